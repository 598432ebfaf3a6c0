"""The culprit, over generated histories of groups and their workers."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from elastane.protocol.culprits import (
    PASSED_MAX,
    PAUSED,
    STANDSTILL_MOVES_FIRST,
    ProcessFacts,
    Reports,
    StandstillEvidence,
    StandstillRules,
    ends_slowly,
    hung_alone,
    is_shown,
    judge,
)
from elastane.protocol.ring import CALLS_MAX, GroupBoard, GroupCall, Position, spans
from elastane.protocol.verdicts import CERTAIN, Kind, Verdict

SEEDS = range(400)
# Of each kind of fault, what its worker's process shows.
FACTS = {
    Kind.STOPPED: ProcessFacts(state="T", lock_held=True),
    Kind.ENDED: ProcessFacts(state="X", exit_code=0, lock_held=True),
    Kind.LOCK_HELD: ProcessFacts(state="R", busy=1.0, lock_held=True),
    Kind.DATA_LOADER: ProcessFacts(loads=True),
    Kind.DISK: ProcessFacts(reads="/data/shard-7", loads=True),
    Kind.BUSY: ProcessFacts(state="R", busy=0.9),
    Kind.SLEEPS: ProcessFacts(),
    Kind.DEBUGGED: ProcessFacts(state="t", lock_held=True),
}


class Cluster:
    """Workers whose groups have made some collectives, with a planted fault."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.size = self.random.randint(2, 12)
        ranks = [*range(self.size)]
        self.members = {"0": ranks}
        for name in "123"[: self.random.randint(0, 3)]:
            some = self.random.sample(ranks, self.random.randint(2, self.size))
            self.members[name] = sorted(some)
        self.calls = {
            name: [self.call(n) for n in range(1, self.random.randint(20, 90))]
            for name in self.members
        }
        self.begun = {
            (rank, name): len(self.calls[name])
            for name, some in self.members.items()
            for rank in some
        }
        self.own = {}
        self.facts = dict.fromkeys(ranks, ProcessFacts())
        self.waiting = set()
        self.change = {}

    def call(self, number):
        operation = self.random.choice(["all_reduce", "broadcast", "all_gather", "barrier"])
        return GroupCall(number, operation, self.random.choice([1, 28, 4096]), "Float")

    def stand(self, name):
        """Let all members of a group except the culprits begin one more collective and wait."""
        self.calls[name].append(self.call(len(self.calls[name]) + 1))
        for rank in self.members[name]:
            if rank not in self.culprits:
                self.begun[rank, name] += 1
                self.waiting.add((rank, name))

    def plant(self, kind):
        """Let some workers of one group show this fault, for which the others wait."""
        name = self.random.choice([*self.members])
        most = max(1, (len(self.members[name]) - 1) // 2)
        count = self.random.randint(1, most)
        self.culprits = sorted(self.random.sample(self.members[name], count))
        self.facts.update(dict.fromkeys(self.culprits, FACTS.get(kind, ProcessFacts())))
        self.stand(name)
        # Others wait in groups of theirs for those that wait here.
        if kind in FACTS:
            for other in self.members:
                free = [r for r in self.members[other] if (r, name) not in self.waiting]
                free = [rank for rank in free if rank not in self.culprits]
                if other != name and len(free) < len(self.members[other]):
                    self.call_alone(other, free)
        return name

    def call_alone(self, name, ranks):
        self.calls[name].append(self.call(len(self.calls[name]) + 1))
        for rank in ranks:
            self.begun[rank, name] += 1
            self.waiting.add((rank, name))

    def evidence(self):
        return [self.standing(rank) for rank in range(self.size)]

    def standing(self, rank):
        groups = {}
        for name, some in self.members.items():
            if rank in some:
                groups[name] = self.board(rank, name)
        facts = self.facts[rank]
        silent = facts.lock_held
        return StandstillEvidence(
            rank=rank,
            node_id=f"n{rank % 3}",
            facts=facts,
            groups=groups,
            where="" if silent else f"something (train.py:{rank}, main)",
        )

    def board(self, rank, name):
        begun = self.begun[rank, name]
        calls = [self.own.get((rank, name, c.sequence), c) for c in self.calls[name][:begun]]
        return GroupBoard(
            position=Position(begun, begun - ((rank, name) in self.waiting)),
            ranks="" if name == "0" else spans(self.members[name]),
            **{"backend": "gloo", **self.change},
            calls=() if self.facts[rank].lock_held else tuple(calls[-CALLS_MAX:]),
        )


@pytest.mark.parametrize("kind", FACTS)
def test_the_right_ranks_and_the_right_kind_are_named(kind):
    for seed in SEEDS:
        cluster = Cluster(seed)
        cluster.plant(kind)
        found = judge(cluster.evidence(), cluster.size)
        assert found is not None, seed
        assert found.kind is kind, (seed, found)
        assert list(found.ranks) == cluster.culprits, (seed, found)
        assert found.is_certain == (kind in CERTAIN)
        assert found.sequence == len(cluster.calls[found.group]), (seed, found)
        others = {rank for rank in cluster.members[found.group] if rank not in cluster.culprits}
        assert others & {rank for rank, where in cluster.waiting if where == found.group}


def test_a_worker_that_only_waits_is_never_blamed():
    for seed in SEEDS:
        cluster = Cluster(seed)
        cluster.plant(cluster.random.choice([*FACTS]))
        found = judge(cluster.evidence(), cluster.size)
        waiting = {rank for rank, _ in cluster.waiting}
        assert not waiting & set(found.ranks), (seed, found)


@pytest.mark.parametrize("kind", [Kind.OTHER_COLLECTIVE, Kind.OTHER_SHAPE])
def test_a_worker_that_calls_another_collective_or_shape_is_named_with_both_sites(kind):
    for seed in SEEDS:
        cluster = Cluster(seed)
        name = cluster.plant(kind)
        last = GroupCall(len(cluster.calls[name]), "all_reduce", 28, "Float")
        cluster.calls[name][-1] = last
        other = {Kind.OTHER_SHAPE: GroupCall(last.sequence, "all_reduce", 29, "Float")}
        odd = other.get(kind, GroupCall(last.sequence, "reduce_scatter", 28, "Float"))
        ahead = cluster.random.random() < 0.3
        for rank in cluster.culprits:
            cluster.own[rank, name, last.sequence] = odd
            cluster.begun[rank, name] += 1
            cluster.waiting.add((rank, name))
            if ahead:  # its own call was complete, and it waits in the next one
                cluster.calls[name][last.sequence :] = [cluster.call(last.sequence + 1)]
                cluster.begun[rank, name] += 1
        found = judge(cluster.evidence(), cluster.size)
        others = [r for r in cluster.members[name] if r not in cluster.culprits]
        assert found.kind is kind, (seed, found)
        tied = len(others) == len(cluster.culprits)
        assert list(found.ranks) == ([] if tied else cluster.culprits), (seed, found)
        for rank in (cluster.culprits[0], others[0]):
            assert f"(train.py:{rank}, main)" in found.sentence, (seed, found)
        if kind is Kind.OTHER_SHAPE:
            assert "called all_reduce of 29 x Float (" in found.sentence, (seed, found)


def test_there_is_no_culprit_while_no_worker_waits():
    for seed in SEEDS:
        cluster = Cluster(seed)
        for rank in range(cluster.size):
            cluster.facts[rank] = cluster.random.choice([*FACTS.values()])
        assert judge(cluster.evidence(), cluster.size) is None, seed


def test_there_is_no_culprit_before_all_workers_are_known():
    cluster = Cluster(3)
    cluster.plant(Kind.BUSY)
    assert judge(cluster.evidence()[1:], cluster.size) is None
    assert judge([], 0) is None


def test_workers_in_one_collective_that_does_not_complete_have_no_culprit():
    cluster = Cluster(4)
    cluster.culprits = []
    cluster.stand("0")
    found = judge(cluster.evidence(), cluster.size)
    assert (found.kind, found.ranks) == (Kind.NETWORK, ())
    assert "none is behind" in found.sentence
    cluster.facts[1] = FACTS[Kind.LOCK_HELD]
    found = judge(cluster.evidence(), cluster.size)
    assert (found.kind, found.ranks) == (Kind.LOCK_HELD, (1,))


def test_workers_that_wait_for_each_other_in_two_groups_are_named_with_their_places():
    waits, done = Position(5, 4), Position(4, 4)
    one, other = GroupBoard(position=waits, ranks="0-1"), GroupBoard(position=done, ranks="0-1")
    evidence = [
        StandstillEvidence(rank=0, node_id="n", facts=ProcessFacts(), groups={"1": one, "2": other},
                 where="barrier (a.py:1, f)"),
        StandstillEvidence(rank=1, node_id="n", facts=ProcessFacts(), groups={"1": other, "2": one},
                 where="barrier (a.py:2, f)"),
    ]  # fmt: skip
    found = judge(evidence, 2)
    assert (found.kind, found.ranks) == (Kind.DEADLOCK, ())
    assert "a.py:1" in found.sentence and "a.py:2" in found.sentence


def test_the_ranks_to_end_where_the_wait_never_ends():
    for seed in SEEDS:
        cluster = Cluster(seed)
        kind = cluster.random.choice([*FACTS])
        cluster.plant(kind)
        found = judge(cluster.evidence(), cluster.size)
        if kind not in CERTAIN:
            assert not found.ends
        elif kind is Kind.ENDED:  # it has ended itself; the others cannot go on
            assert set(found.ends) <= {rank for rank, _ in cluster.waiting} and found.ends
        else:
            assert list(found.ends) == cluster.culprits


def test_thousands_of_workers_are_compared_in_seconds():
    cluster = Cluster(1)
    cluster.size = 4096
    cluster.members = {"0": [*range(cluster.size)]}
    cluster.calls = {"0": [cluster.call(number) for number in range(1, 20)]}
    cluster.begun = dict.fromkeys(((rank, "0") for rank in range(cluster.size)), 19)
    cluster.facts = dict.fromkeys(range(cluster.size), ProcessFacts())
    cluster.culprits = [4000]
    cluster.stand("0")
    evidence = cluster.evidence()
    begun_s = time.process_time()
    assert judge(evidence, cluster.size).ranks == (4000,)
    # 0.3 s; a comparison of each worker with each other one would take minutes.
    assert time.process_time() - begun_s < 10.0


def test_a_wait_that_passed_is_reported_again_once_it_lasts_twice_as_long():
    reports = Reports()
    evaluation = Verdict(kind=Kind.BUSY, ranks=(0,), sentence="", place="train.py:8, main")
    other = Verdict(kind=Kind.BUSY, ranks=(0,), sentence="", place="train.py:9, main")
    endless = Verdict(kind=Kind.STOPPED, ranks=(0,), sentence="", place="train.py:8, main")
    assert reports.is_new(evaluation, 20.0) and not reports.is_new(evaluation, 20.2)
    assert reports.end(60.0)
    assert not reports.is_new(evaluation, 100.0)
    assert not reports.end(100.0), "it was not reported"
    assert reports.is_new(other, 20.0) and reports.is_new(endless, 21.0)
    assert not reports.is_new(endless, 22.0)
    reports.end(22.0)
    assert reports.is_new(evaluation, 120.0)


def test_a_wait_that_passed_for_one_rank_delays_no_report_about_another():
    reports = Reports()
    place = "train.py:8, main"
    for rank in range(3):
        loader = Verdict(kind=Kind.DATA_LOADER, ranks=(rank,), sentence="", place=place)
        assert reports.is_new(loader, 20.0), rank
        reports.end(25.0)
    assert not reports.is_new(loader, 30.0)


def test_remembered_places_of_reported_waits_are_bounded():
    reports = Reports()
    for line in range(3 * PASSED_MAX):
        verdict = Verdict(kind=Kind.BUSY, ranks=(0,), sentence="", place=f"train.py:{line}")
        assert reports.is_new(verdict, 20.0)
        reports.end(20.0)
    assert len(reports._passed_s) <= PASSED_MAX


@pytest.mark.parametrize("kind", FACTS)
def test_a_worker_that_hangs_alone_is_described_by_what_it_does(kind):
    standing = StandstillEvidence(
        rank=3, node_id="a", facts=FACTS[kind], where="step (train.py:7, main)"
    )
    found = hung_alone(standing, "no progress for 20.1 s")
    assert (found.kind, found.ranks, found.ends) == (kind, (3,), (3,))
    assert found.sentence.startswith("rank 3 on node a hangs, no progress for 20.1 s; rank 3 ")


def test_a_worker_that_lives_on_is_named_with_its_error_or_with_none():
    still = StandstillEvidence(rank=3, node_id="a", facts=ProcessFacts(state="S"))
    raised, ended = (ends_slowly(still, error, 2.0, 60.0) for error in ("KeyError: 'x'", ""))
    assert raised.sentence.startswith("rank 3 on node a raised KeyError: 'x'; its process has not")
    assert ended.sentence.startswith("rank 3 on node a ended its program as failed; its process")
    assert {raised.kind, ended.kind} == {Kind.RAISED}


class Looks:
    """Looks at one worker, twice a second, as an agent does."""

    def __init__(self):
        self.rules = StandstillRules(20.0)
        self.now_s = 0.0
        self.number = 0

    def wait(self, seconds):
        """Let time pass without a collective; return for how long there has been none."""
        still_s = 0.0
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            still_s = self.rules.look({1: (self.number,), 2: (0,)}, self.now_s)
        return still_s

    def steps(self, count, step_s):
        for _ in range(count):
            self.wait(step_s - 0.5)
            self.number += 1
            self.wait(0.5)
        return self


@pytest.mark.parametrize(
    ("step_s", "limit_s"), [(0.5, 20.0), (1.0, 20.0), (7.0, 70.0), (400.0, 1800.0)]
)
def test_workers_are_compared_after_ten_times_their_longest_step_and_20_s_at_least(step_s, limit_s):
    looks = Looks().steps(STANDSTILL_MOVES_FIRST + 5, step_s)
    assert not looks.rules.is_due(looks.wait(limit_s - 1.0))
    assert looks.rules.is_due(looks.wait(1.5))


def test_the_first_collectives_may_take_any_time():
    looks = Looks()
    for _ in range(STANDSTILL_MOVES_FIRST):
        assert not looks.rules.is_due(looks.wait(900.0))
        looks.number += 1
    # Nor is anything learned from them.
    looks.steps(20, 1.0)
    assert looks.rules.is_due(looks.wait(20.0))


def test_a_replaced_worker_starts_with_no_history():
    looks = Looks().steps(20, 1.0)
    assert looks.rules.is_due(looks.wait(40.0))
    assert not looks.rules.is_due(looks.rules.look({3: (19,)}, looks.now_s + 0.5))
    looks.rules.forget()
    assert not looks.rules.is_due(looks.wait(40.0))


def test_a_reported_standstill_is_no_step_to_learn_from():
    for reported, due_s in ((True, 20.0), (False, 600.0)):
        looks = Looks().steps(10, 1.0)
        looks.wait(60.0)
        if reported:
            looks.rules.note_report()
        looks.steps(1, 0.5)
        assert looks.rules.is_due(due_s + 20.0) and not looks.rules.is_due(due_s - 1.0)


def test_an_agent_that_was_stopped_for_an_hour_judges_no_worker_when_it_continues():
    looks = Looks().steps(20, 1.0)
    looks.now_s += 3600.0
    assert looks.wait(0.5) < 3.0


def test_there_is_no_culprit_if_all_workers_are_stopped():
    cluster = Cluster(5)
    cluster.culprits = []
    cluster.stand("0")
    cluster.facts = dict.fromkeys(range(cluster.size), FACTS[Kind.STOPPED])
    found = judge(cluster.evidence(), cluster.size)
    assert not found.is_certain and found.kind is not Kind.STOPPED


@pytest.mark.parametrize("change", [{"sends": True}, {"backend": "nccl"}])
def test_a_mismatch_is_no_proof_where_counts_are_not_those_of_collectives(change):
    for seed in range(100):
        cluster = Cluster(seed)
        name = cluster.plant(Kind.OTHER_COLLECTIVE)
        number = len(cluster.calls[name])
        for rank in cluster.culprits:
            cluster.own[rank, name, number] = GroupCall(number, "reduce_scatter", 28, "Float")
            cluster.begun[rank, name] += 1
            cluster.waiting.add((rank, name))
        cluster.change = change
        found = judge(cluster.evidence(), cluster.size)
        assert found is None or not found.is_certain, (seed, found)


def test_a_worker_that_is_paused_for_a_moment_is_not_shown_yet():
    paused = StandstillEvidence(
        rank=0, node_id="a", facts=ProcessFacts(state=PAUSED), where="x (y.py:1, z)"
    )
    assert not is_shown(paused)
    assert is_shown(msgspec.structs.replace(paused, facts=ProcessFacts()))
