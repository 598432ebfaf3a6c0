"""Each planted bug is found by the checkers within a bounded number of seeds.

A checker that no bug can fail proves nothing; these are the bugs that it is there for.
"""

import math

import msgspec
import pytest
from planted_probes import answer_all, ignore_silence

from elastane.agent.rules import AgentCore, Contact, LocalWorkers
from elastane.coordinator.rules import (
    admission,
    cuts,
    drain,
    ending,
    liveness,
    machine,
    next_world,
    reports,
)
from elastane.coordinator.rules.incident import Incident, RestartBudget
from elastane.coordinator.rules.machine import Rendezvous
from elastane.coordinator.rules.nodes import Roster
from elastane.coordinator.rules.ranks import WorldAssignment, assignments, member_of
from elastane.coordinator.rules.worlds import WorldHistory
from elastane.protocol.effects import Persist, Send
from elastane.protocol.limits import Timing
from elastane.protocol.messages import Assign, Stopped
from elastane.protocol.model import Fence, PortOffer
from simulation import HistoryFailedError, history, run_seed
from simulation.cluster import SimulatedCluster
from simulation.coordinator import SimulatedCoordinator
from simulation.election import SimulatedElection
from simulation.node import SimulatedNode
from simulation.setup import PlannedFault, setup_of
from simulation.store import SimulatedStore


def first_failure(seeds, *, store_backed=True, first=0):
    """Return the account of the first of `seeds` histories that fails, from seed `first` on."""
    for seed in range(first, first + seeds):
        try:
            run_seed(seed, store_backed=store_backed)
        except HistoryFailedError as fault:
            return str(fault)
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_a_fence_that_starts_anew_is_found(monkeypatch):
    monkeypatch.setattr(WorldHistory, "note_fence", lambda self, fence: None)
    assert "after it started" in first_failure(300, store_backed=False, first=45)


def test_a_membership_changed_within_a_round_is_found(monkeypatch):
    def same_round(previous, specs, floor):
        return Fence(previous.fence.round, previous.fence.attempt + 1) if previous else Fence(1, 0)

    monkeypatch.setattr(next_world, "next_fence", same_round)
    assert "two memberships in round" in first_failure(100)


def test_departures_that_are_charged_are_found(monkeypatch):
    charged = property(lambda self: not self.planned)
    monkeypatch.setattr(Incident, "is_chargeable", charged)
    first_failure(200)


def test_a_budget_that_is_not_kept_is_found(monkeypatch):
    original = RestartBudget.charge

    def charge(self, *args, **more):
        verdict = original(self, *args, **more)
        if not verdict.restart:
            self.used += 1
            return original(RestartBudget(allowed=1), *args, **more)
        return verdict

    monkeypatch.setattr(RestartBudget, "charge", charge)
    assert "restarts were used of" in first_failure(200)


def test_a_disconnected_agent_that_is_not_replaced_is_found(monkeypatch):
    def turn_away(state, event, join):
        if join.node.node_id in state.roster.nodes:
            old = state.roster.nodes[join.node.node_id]
            if old.spec.incarnation != join.node.incarnation:
                admission._refuse(state, event.session, old.id, admission._duplicate(event, old))
                return
        original(state, event, join)

    original = admission._admit_or_contest
    monkeypatch.setattr(admission, "_admit_or_contest", turn_away)
    assert "was refused" in first_failure(300)


def test_a_holder_that_is_forgotten_is_found(monkeypatch):
    original = machine._stop_world

    def forget_one(state, reason):
        result = original(state, reason)
        for node in state.roster.holders_of_workers()[:1]:
            node.forget_workers()
            state.roster.reindex(node)
        return result

    monkeypatch.setattr(machine, "_stop_world", forget_one)
    first_failure(300)


def test_a_late_stop_report_that_counts_is_found(monkeypatch):
    original = reports._stopped
    monkeypatch.setattr(
        reports, "_stopped", lambda state, node, fence: original(state, node, node.fence or fence)
    )
    stop = LocalWorkers._stop

    def answers_at_once(self, message):
        stop(self, message)
        if self.group is not None:
            self._outbox.send(Stopped(Fence(0, 0), self.offer))

    monkeypatch.setattr(LocalWorkers, "_stop", answers_at_once)
    first_failure(300)


def test_messages_sent_before_the_record_is_durable_are_found(monkeypatch):
    original = SimulatedCoordinator._carry_out

    def sends_first(self, effects, done):
        effects = type(effects)(sorted(effects, key=lambda e: isinstance(e, Persist)))
        original(self, effects, done)

    monkeypatch.setattr(SimulatedCoordinator, "_carry_out", sends_first)
    assert "before it was durable" in first_failure(10)


def test_a_coordinator_that_decides_without_its_lease_is_found(monkeypatch):
    # It neither minds its lease, nor is its write guarded by the version that it read.
    monkeypatch.setattr(SimulatedElection, "held", lambda self: True)
    monkeypatch.setattr(Rendezvous, "_set_authority", lambda self, held, reason: None)
    original = SimulatedStore.write

    def unguarded(self, after):
        return original(self, msgspec.structs.replace(after, version=self.filed.version))

    monkeypatch.setattr(SimulatedStore, "write", unguarded)
    assert "has written after" in first_failure(200, first=110)


def test_a_successor_that_does_not_fence_its_predecessor_is_found(monkeypatch):
    def only_reads(self, answer):
        def read(filed):
            if filed is None:
                answer(None)
                return
            self.filed, self.fenced_term = filed, self.term
            answer(True)

        self._ask(self._store.read, read)

    monkeypatch.setattr(SimulatedElection, "_fence", only_reads)
    first_failure(1000)


def test_a_round_number_that_a_coordinator_restart_resets_is_found(monkeypatch):
    """As torchft's lighthouse numbers its quorums."""
    original = machine.load_record

    def forgets_the_world(state, record):
        original(state, msgspec.structs.replace(record, world=None))

    monkeypatch.setattr(machine, "load_record", forgets_the_world)
    monkeypatch.setattr(WorldHistory, "note_fence", lambda self, fence: None)
    assert "forgotten" in first_failure(100) or "was committed after" in first_failure(100)


def test_a_store_that_outlives_its_attempt_is_found(monkeypatch):
    """As the keys of torchrun's default store, which do not name the attempt."""
    monkeypatch.setattr(SimulatedNode, "new_offer", lambda self: PortOffer(20_000, True))
    assert "met those of" in first_failure(50)


def test_an_offer_that_others_may_know_is_found_when_it_is_made_again(monkeypatch):
    original = AgentCore._link
    monkeypatch.setattr(AgentCore, "_link", lambda self, offer: original(self, None))
    assert "met those of" in first_failure(100, first=2_800)


def test_a_stale_address_of_rank_0_is_found(monkeypatch):
    """As torchrun's, which stays where it was while a lower address takes rank 0."""
    original, first = next_world.master_addr, {}

    def stays(state, node):
        return first.setdefault(state.spec.job, original(state, node))

    monkeypatch.setattr(next_world, "master_addr", stays)
    assert "assigned" in first_failure(200)


def test_clocks_of_two_hosts_that_are_compared_are_found(monkeypatch):
    """As where torchrun and NVRx judge a heartbeat by the time that its sender wrote into it."""
    send_up, take = SimulatedCluster.send_up, reports.record_message
    sent_s = {}

    def stamps(self, session, message):
        sent_s[session.number] = self.nodes[session.up.source].clock.now_s
        send_up(self, session, message)

    def by_the_senders_clock(state, session, message):
        result = take(state, session, message)
        if (node_id := state.roster.by_session.get(session)) in state.roster.nodes:
            state.roster.nodes[node_id].connection.heard_s = sent_s[session]
        return result

    monkeypatch.setattr(SimulatedCluster, "send_up", stamps)
    monkeypatch.setattr(reports, "record_message", by_the_senders_clock)
    first_failure(100)


def test_a_lease_that_is_judged_by_another_hosts_clock_is_found(monkeypatch):
    monkeypatch.setattr(
        SimulatedElection,
        "_end_of",
        lambda self, begun_s: self._node.cluster.nodes["n0"].clock.boot_s + 1.8,
    )
    first_failure(400)


def test_a_late_message_of_a_dead_agent_that_refuses_its_replacement_is_found(monkeypatch):
    def at_once(state):
        for node_id, contest in [*state.roster.contests.items()]:
            old = state.roster.nodes.get(node_id)
            if old is not None and old.connection.heard_s > contest.began_s:
                del state.roster.contests[node_id]
                join = contest.join
                admission._refuse(state, join.session, node_id, admission._duplicate(join, old))
        original(state)

    original = admission.resolve_contests
    monkeypatch.setattr(admission, "resolve_contests", at_once)
    assert "was refused" in first_failure(100, store_backed=False, first=13_950)


def test_a_newcomer_that_gets_the_name_of_a_briefly_silent_agent_is_found(monkeypatch):
    def early(state):
        for contest in [*state.roster.contests.values()]:
            old = state.roster.nodes.get(contest.join.message.node.node_id)
            if old is None or old.session is None:
                continue
            due_s = max(contest.began_s, old.connection.heard_s) + 1.5
            if state.now_s >= due_s:
                liveness.depart(state, old, "the same node came back as a new agent")
            else:
                state.queue.wait_until(due_s)
        original(state)

    original = admission.resolve_contests
    monkeypatch.setattr(admission, "resolve_contests", early)
    assert "lost its node id to" in first_failure(60, store_backed=False, first=80)


def test_a_budget_of_each_agent_is_found(monkeypatch):
    """As torchrun counts: an agent that is new has all of its restarts."""
    original = admission._admit

    def anew(state, event):
        state.budget.used = 0
        original(state, event)

    monkeypatch.setattr(admission, "_admit", anew)
    assert "restarts used went" in first_failure(200)


def test_a_world_that_is_charged_twice_is_found(monkeypatch):
    original = RestartBudget.charge

    def twice(self, *args, **more):
        original(self, *args, **more)
        return original(self, *args, **more)

    monkeypatch.setattr(RestartBudget, "charge", twice)
    assert "at once" in first_failure(200)


def test_a_failure_that_is_not_charged_is_found(monkeypatch):
    original = RestartBudget.charge

    def now_and_then(self, *args, **more):
        verdict = original(self, *args, **more)
        self.used -= self.used == 1
        return verdict

    monkeypatch.setattr(RestartBudget, "charge", now_and_then)
    assert "was not charged" in first_failure(400)


def test_a_late_node_in_a_committed_round_is_found(monkeypatch):
    original = admission._admit

    def lets_in(state, event):
        original(state, event)
        node = state.roster.nodes[event.message.node.node_id]
        if state.phase is not machine.MembershipPhase.RUNNING or node.is_member:
            return
        members = (*state.world.members, member_of(node.spec))
        state.worlds.current = msgspec.structs.replace(state.world, members=members)
        first = state.roster.nodes.get(members[0].node_id, node)
        place = WorldAssignment(
            master_addr=next_world.master_addr(state, first),
            offer=first.offer,
            restarts_used=state.budget.used,
            max_restarts=state.budget.allowed,
            reason="late",
        )
        node.fence = node.agent_fence = state.world.fence
        node.become_member(recorded=True)
        state.roster.reindex(node)
        state.persist()
        state.queue.send(node, Assign(assignments(state.world, place)[-1]))

    monkeypatch.setattr(admission, "_admit", lets_in)
    assert "was committed after" in first_failure(100)


def test_a_drained_node_that_is_started_again_is_found(monkeypatch):
    original = Roster.reindex

    def takes_leaving_too(self, node):
        original(self, node)
        if node.session is not None and node.fence is None:
            self.idle.add(node.id)

    monkeypatch.setattr(Roster, "reindex", takes_leaving_too)
    monkeypatch.setattr(machine, "_release_leaving", lambda state: None)
    assert "is to leave" in first_failure(200)


def test_an_outcome_sent_before_it_is_durable_is_found(monkeypatch):
    original = ending._close

    def tells_first(state, outcome):
        original(state, outcome)
        late = [e for e in state.queue.effects if isinstance(e, Persist)][-1:]
        state.queue.effects = [e for e in state.queue.effects if isinstance(e, Send)] + late
        return True

    monkeypatch.setattr(ending, "_close", tells_first)
    assert "not durable" in first_failure(200)


def test_an_assignment_that_waited_for_too_long_and_is_started_is_found(monkeypatch):
    monkeypatch.setattr(Contact, "authority_s", property(lambda s: 1e12, lambda s, v: None), False)
    first_failure(1000, first=125)


def test_a_world_committed_without_waiting_for_its_predecessor_is_found(monkeypatch):
    original = machine._stopping

    def impatient(state):
        for node in state.roster.holders_of_workers():
            node.forget_workers()
            state.roster.reindex(node)
        return original(state)

    monkeypatch.setitem(machine.RULES, machine.MembershipPhase.STOPPING, impatient)
    first_failure(300)


def test_the_other_side_of_a_partition_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(Timing, "fence_wait_s", 0.0)
    assert "two sides train" in first_failure(2000)


def test_an_agent_that_never_isolates_itself_is_found(monkeypatch):
    monkeypatch.setattr(AgentCore, "_check_isolation", lambda self: None)
    # Its orphan reaper would do it six seconds later.
    monkeypatch.setattr(AgentCore, "train_until_s", property(lambda self: None))
    # Two sides at once, or one that outlives the job which ended without it.
    found = first_failure(200, first=5_355)
    assert "two sides train" in found or "after the job's end" in found


def test_an_agent_that_stands_still_without_a_deadline_for_its_workers_is_found(monkeypatch):
    monkeypatch.setattr(AgentCore, "train_until_s", property(lambda self: None))
    assert "two sides train" in first_failure(10, first=940)


def test_ranks_given_by_name_are_found(monkeypatch):
    def by_name(previous, candidates, max_nodes, static):
        return [c.spec for c in sorted(candidates, key=lambda c: c.spec.node_id)][:max_nodes]

    monkeypatch.setattr(next_world, "choose", by_name)
    assert "before survivors" in first_failure(300)


def test_a_target_that_some_have_passed_is_found(monkeypatch):
    original = drain.set_target

    def aim_low(state):
        for node in state.roster.nodes.values():
            node.drain.calls = max(0, (node.drain.calls or 0) - 1) or None
        original(state)

    monkeypatch.setattr(drain, "set_target", aim_low)
    assert "before it was told" in first_failure(100)


def test_silence_that_is_never_noticed_is_found(monkeypatch):
    monkeypatch.setattr(liveness, "_deadline", lambda state, node: math.inf)
    assert "nothing was trained" in first_failure(200, first=185)


def test_a_leave_lost_during_a_contest_is_found(monkeypatch):
    def restarted_and_drained(seed, **drawn):
        plan = (PlannedFault(0, 10.0, "restart_agent"), PlannedFault(1, 10.5, "drain"))
        return msgspec.structs.replace(setup_of(seed, **drawn), plan=plan)

    monkeypatch.setattr(history, "setup_of", restarted_and_drained)
    monkeypatch.setattr(reports, "_keep_for_contest", lambda state, session, message: None)
    assert "is to leave" in first_failure(100, store_backed=False, first=100)


def test_an_offer_that_a_declined_assignment_leaves_is_found_when_it_is_made_again(monkeypatch):
    original = SimulatedNode.new_offer

    def same_again(self):
        core = self.core
        if core is not None and self.alive and core.group is None and self.session is not None:
            return core.offer
        return original(self)

    monkeypatch.setattr(SimulatedNode, "new_offer", same_again)
    assert "met those of" in first_failure(20, store_backed=False, first=57_220)


def test_workers_that_cannot_connect_and_start_again_on_the_same_nodes_are_found(monkeypatch):
    monkeypatch.setattr(cuts, "leave_out_failed", lambda state, incident: "")
    assert "nothing was trained" in first_failure(5, first=822)


def test_probes_whose_answers_are_ignored_are_found(monkeypatch):
    monkeypatch.setattr(reports.cuts, "record_probes", lambda state, node, results: False)
    assert "is left out, and all have reached it" in first_failure(3, first=168)


def test_a_probe_that_is_said_to_be_answered_and_was_not_is_found(monkeypatch):
    answer_all(monkeypatch)
    assert "were apart all along" in first_failure(3, first=168)


def test_a_pause_that_ends_while_a_probe_is_not_answered_is_found(monkeypatch):
    ignore_silence(monkeypatch)
    assert "cannot connect" in first_failure(3, first=1053)
