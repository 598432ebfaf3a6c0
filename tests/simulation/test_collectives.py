"""Histories of view-synchronous collectives: no broken promise, and each planted bug is found."""

import dataclasses

import pytest

from elastane.synchrony import rules
from elastane.synchrony.rules import ViewMember, ViewPhase
from simulation import collectives
from simulation.collectives import CollectiveHistory, CollectiveViolation, play

HISTORIES = 150
# Seeds that once broke a promise: a size that depended on the pace of deliveries, a sum that was
# read together with the size of a later view, a result handed over that was handed on after the
# next fault, by a member that had dropped it.
KEPT = (2, 5, 30_975)


def test_no_history_breaks_a_promise():
    handed = sum(play(seed).counts["handed"] for seed in (*KEPT, *range(1000, 1000 + HISTORIES)))
    assert handed > 25, "the faults of these histories never made a member lack a result"


def test_no_history_with_newcomers_breaks_a_promise():
    joined = sum(play(seed, admits=True).counts["joined"] for seed in range(3000, 3000 + HISTORIES))
    assert joined > HISTORIES / 2, "hardly any newcomer got the state of the others"


def test_operations_with_a_known_meaning_never_restart_a_job():
    assert not any(play(seed, keepable=True).restarted for seed in range(2000, 2100))


# Planted bugs: each takes one idea of the protocol away.


def size_at_the_meeting(patch):
    install = ViewMember.install

    def wrong(self, view, decided):
        starts = install(self, view, decided)
        self.visible, self._pending = self.view.members, []
        return starts

    patch.setattr(ViewMember, "install", wrong)


def size_at_delivery(patch):
    def wrong(self):
        while self._pending and self._pending[0].at < self.delivered:
            self._passed.append(self._pending.pop(0))
            self.visible = self._passed[-1].members

    patch.setattr(ViewMember, "_switch", wrong)


def stable_by_the_pace_of_deliveries(patch):
    issue = ViewMember.issue

    def wrong(self, signature, **more):
        issued = issue(self, signature, **more)
        if issued.number in self._operations:
            self._operations[issued.number].waited_before = self.delivered
        return issued

    patch.setattr(ViewMember, "issue", wrong)


def results_dropped_at_delivery(patch):
    patch.setattr(ViewMember, "_forget", lambda self: self._kept.clear())


def survivors_need_the_last_view(patch):
    right = rules.plan

    def wrong(tables):
        latest = max(table.view.number for table in tables)
        informed = tuple(t.identity for t in tables if t.view.number == latest)
        late = tuple(t.identity for t in tables if t.view.number != latest)
        return dataclasses.replace(right(tables), survivors=informed, left_out=late)

    patch.setattr(collectives, "plan", wrong)


def divisor_of_the_old_view(patch):
    right = ViewMember._start

    def wrong(self, operation, **more):
        start = right(self, operation, **more)
        return dataclasses.replace(start, divisor=start.divided_by)

    patch.setattr(ViewMember, "_start", wrong)


def buckets_delivered_one_by_one(patch):
    def wrong(self):
        return [self.delivered] if self.delivered < self.issued else []

    patch.setattr(ViewMember, "_next_unit", wrong)


def handed_results_are_held(patch):
    right = ViewMember.seal

    def wrong(self):
        for number in self._handed & {*self._operations}:
            self._operations[number].is_held = True
        right(self)

    patch.setattr(ViewMember, "seal", wrong)


def no_vote(patch):
    right = ViewMember.deliver

    def wrong(self):
        delivery = right(self)
        self.vote = None
        return delivery

    patch.setattr(ViewMember, "deliver", wrong)


def refusals_not_told(patch):
    patch.setattr(rules, "_refusals", lambda survivors, cut: {})


def passed_switches_forgotten(patch):
    right = ViewMember.table

    def wrong(self):
        return dataclasses.replace(right(self), switches=tuple(self._pending))

    patch.setattr(ViewMember, "table", wrong)


def delivered_operations_run_again(patch):
    patch.setattr(rules, "_cut", lambda survivors: min(t.delivered for t in survivors))


def rank_0_is_not_missed(patch):
    patch.setattr(rules, "_why_a_first_is_missed", lambda survivors: "")


def all_have_ended_once_one_has(patch):
    def wrong(self, process, view):
        process.member.all_ended = True
        return ends(self, process, view)

    ends = CollectiveHistory._end_events
    patch.setattr(CollectiveHistory, "_end_events", wrong)


def roots_by_rank(patch):
    patch.setattr(rules, "root_in", lambda signature, view: view.members[0])


def leaving_without_agreement(patch):
    patch.setattr(CollectiveHistory, "_end_events", lambda self, p, _view: [lambda: self._leave(p)])


def leaving_after_one_agreement(patch):
    right = CollectiveHistory._learn_that_all_ended

    def wrong(self, process, leaving):
        right(self, process, leaving)
        self._leave(process)

    patch.setattr(CollectiveHistory, "_learn_that_all_ended", wrong)


def old_sums_read_with_the_new_size(patch):
    patch.setattr(ViewMember, "_refuse_unread", lambda _self, _at: None)


# Of boundaries.


def newcomers_where_one_survivor_waits(patch):
    patch.setattr(rules, "_boundary", lambda survivors: survivors[0].boundary)


def size_at_the_next_operation(patch):
    right = rules.plan

    def wrong(tables):
        decided = right(tables)
        late = (dataclasses.replace(s, boundary=None) for s in decided.switches)
        return dataclasses.replace(decided, switches=tuple(late))

    patch.setattr(collectives, "plan", wrong)


def leaving_a_boundary_between_views(patch):
    def wrong(self):
        self.phase, phase = ViewPhase.RUNNING, self.phase
        left = depart(self)
        self.phase = phase
        return left

    def may_act(self, process):
        is_gone = process.member.phase in (ViewPhase.NEW, ViewPhase.LEFT)
        if self.program[process.at].what == "depart" and not is_gone:
            return not self._is_held(process)
        return acts(self, process)

    depart, acts = ViewMember.depart, CollectiveHistory._may_act
    patch.setattr(ViewMember, "depart", wrong)
    patch.setattr(CollectiveHistory, "_may_act", may_act)


def survivors_do_not_wait_for_newcomers(patch):
    patch.setattr(
        CollectiveHistory, "_install_events", lambda self, p, view: [lambda: self._install(p, view)]
    )
    patch.setattr(
        CollectiveHistory,
        "_is_held",
        lambda self, p: p.member.at_boundary and p.member.boundaries == self.gate,
    )


def void_switches_at_a_boundary(patch):
    right = ViewMember.install

    def wrong(self, view, decided):
        pending = list(self._pending)
        starts = right(self, view, decided)
        self._pending += [s for s in pending if s not in self._pending]
        return starts

    patch.setattr(ViewMember, "install", wrong)


def arriving_is_no_wait(patch):
    def wrong(self):
        if self.phase is not ViewPhase.RUNNING or self.delivered < self.issued:
            return False
        self.boundaries += 1
        self.at_boundary = True
        return True

    patch.setattr(ViewMember, "arrive", wrong)


# The first seed that finds each.
BUGS_OF_BOUNDARIES = {
    newcomers_where_one_survivor_waits: 24,
    size_at_the_next_operation: 1,
    leaving_a_boundary_between_views: 7,
    survivors_do_not_wait_for_newcomers: 1,
    void_switches_at_a_boundary: 2,
    arriving_is_no_wait: 73,
}


@pytest.mark.parametrize("bug", BUGS_OF_BOUNDARIES, ids=lambda bug: bug.__name__)
def test_each_planted_bug_of_boundaries_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((CollectiveViolation, AssertionError)):
        play(BUGS_OF_BOUNDARIES[bug], admits=True)


# The first seed that finds each.
BUGS = {
    size_at_the_meeting: 0,
    size_at_delivery: 0,
    stable_by_the_pace_of_deliveries: 0,
    results_dropped_at_delivery: 0,
    survivors_need_the_last_view: 31,
    divisor_of_the_old_view: 2,
    buckets_delivered_one_by_one: 36,
    handed_results_are_held: 30_975,
    no_vote: 24,
    refusals_not_told: 980,
    passed_switches_forgotten: 2164,
    delivered_operations_run_again: 0,
    roots_by_rank: 23,
    leaving_without_agreement: 99,
    leaving_after_one_agreement: 10_337,
    rank_0_is_not_missed: 1,
    all_have_ended_once_one_has: 71,
    old_sums_read_with_the_new_size: 9,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((CollectiveViolation, AssertionError)):
        play(BUGS[bug])
