"""Each planted bug is found by the checkers within a bounded number of seeds.

A checker that no bug can fail proves nothing; these are the bugs that it is there for.
"""

import pytest

from elastane.core.agent import AgentCore
from elastane.core.budget import RestartBudget
from elastane.core.effects import Persist
from elastane.core.messages import Stopped
from elastane.core.model import Fence
from elastane.core.rendezvous import door, forming, phases, presence, reports
from elastane.core.rendezvous.machine import Rendezvous
from elastane.core.rendezvous.state import Incident, State
from elastane.testing.simulation import HistoryFailedError, run_seed
from elastane.testing.simulation.seat import Seat


def first_failure(seeds, *, store_backed=True, first=0):
    """Return the account of the first of `seeds` histories that fails, from seed `first` on."""
    for seed in range(first, first + seeds):
        try:
            run_seed(seed, store_backed=store_backed)
        except HistoryFailedError as fault:
            return str(fault)
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_a_fence_that_starts_anew_is_found(monkeypatch):
    monkeypatch.setattr(State, "hold_up", lambda self, fence: None)
    assert "after it started" in first_failure(600, store_backed=False)


def test_a_membership_changed_within_a_round_is_found(monkeypatch):
    def same_round(previous, specs, floor):
        return Fence(previous.fence.round, previous.fence.attempt + 1) if previous else Fence(1, 0)

    monkeypatch.setattr(forming, "next_fence", same_round)
    assert "two memberships in round" in first_failure(100)


def test_departures_that_are_charged_are_found(monkeypatch):
    charged = property(lambda self: not self.planned)
    monkeypatch.setattr(Incident, "is_charged", charged)
    first_failure(200)


def test_a_budget_that_is_not_kept_is_found(monkeypatch):
    original = RestartBudget.charge

    def charge(self, *args):
        verdict = original(self, *args)
        if not verdict.restart:
            self.used += 1
            return original(RestartBudget(allowed=1), *args)
        return verdict

    monkeypatch.setattr(RestartBudget, "charge", charge)
    assert "restarts were used of" in first_failure(200)


def test_a_ghost_that_is_not_replaced_is_found(monkeypatch):
    def turn_away(state, event, join):
        if join.node.node_id in state.nodes:
            old = state.nodes[join.node.node_id]
            if old.spec.incarnation != join.node.incarnation:
                door._refuse(state, event.session, old.id, door._duplicate(event, old))
                return
        original(state, event, join)

    original = door._enter
    monkeypatch.setattr(door, "_enter", turn_away)
    assert "was refused" in first_failure(300)


def test_a_holder_that_is_forgotten_is_found(monkeypatch):
    original = phases._stop_world

    def forget_one(state, reason):
        result = original(state, reason)
        for node in [state.nodes[i] for i in sorted(state.holding)][:1]:
            node.fence = None
            state.refile(node)
        return result

    monkeypatch.setattr(phases, "_stop_world", forget_one)
    first_failure(300)


def test_a_late_stopped_that_counts_is_found(monkeypatch):
    original = reports._stopped
    monkeypatch.setattr(
        reports, "_stopped", lambda state, node, fence: original(state, node, node.fence or fence)
    )
    stop = AgentCore._stop

    def answers_at_once(self, message):
        stop(self, message)
        if self.group is not None:
            self._send(Stopped(Fence(0, 0), self.offer))

    monkeypatch.setattr(AgentCore, "_stop", answers_at_once)
    first_failure(300)


def test_messages_sent_before_the_record_is_durable_are_found(monkeypatch):
    original = Seat._carry_out

    def sends_first(self, effects):
        effects = type(effects)(sorted(effects, key=lambda e: isinstance(e, Persist)))
        original(self, effects)

    monkeypatch.setattr(Seat, "_carry_out", sends_first)
    assert "before it was durable" in first_failure(10)


def test_a_coordinator_that_decides_without_its_lease_is_found(monkeypatch):
    # It neither minds its lease, nor is its write guarded by the version it read.
    monkeypatch.setattr(Seat, "_mind_lease", lambda self: None)
    monkeypatch.setattr(Rendezvous, "_set_authority", lambda self, held, reason: None)
    from elastane.testing.simulation.store import SimulatedStore

    original = SimulatedStore.write
    monkeypatch.setattr(
        SimulatedStore, "write", lambda self, version, record: original(self, self.version, record)
    )
    first_failure(2000)


def test_a_world_settled_without_waiting_for_its_predecessor_is_found(monkeypatch):
    original = phases._stopping

    def impatient(state):
        for node in [state.nodes[i] for i in sorted(state.holding)]:
            node.fence = None
            state.refile(node)
        return original(state)

    monkeypatch.setitem(phases.RULES, phases.Phase.STOPPING, impatient)
    first_failure(300)


def test_the_other_side_of_a_partition_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(forming, "FENCE_WAIT_S", 0.0)
    assert "two sides train" in first_failure(2000)


def test_an_agent_that_never_isolates_itself_is_found(monkeypatch):
    monkeypatch.setattr(AgentCore, "_mind_isolation", lambda self: None)
    assert "two sides train" in first_failure(4000, first=2000)


def test_ranks_given_by_name_are_found(monkeypatch):
    def by_name(previous, candidates, max_nodes, static):
        return [c.spec for c in sorted(candidates, key=lambda c: c.spec.node_id)][:max_nodes]

    monkeypatch.setattr(forming, "choose", by_name)
    assert "before survivors" in first_failure(300)


def test_a_target_that_some_have_passed_is_found(monkeypatch):
    original = phases._aim

    def aim_low(state):
        for node in state.nodes.values():
            node.calls = max(0, (node.calls or 0) - 1) or None
        original(state)

    monkeypatch.setattr(phases, "_aim", aim_low)
    assert "calls before it was told" in first_failure(100)


def test_silence_that_is_never_noticed_is_found(monkeypatch):
    monkeypatch.setattr(presence, "_verdict", lambda state, node: "")
    first_failure(100)
