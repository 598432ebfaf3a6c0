"""Each bug planted in the recovery in place is found within a bounded number of seeds."""

from dataclasses import replace

import msgspec
import pytest
from planted_probes import answer_all, ignore_silence

from elastane.agent.rules import Group, LocalWorkers
from elastane.coordinator.rules import (
    admission,
    cuts,
    drain,
    incident,
    machine,
    next_world,
    recovery,
    reports,
)
from elastane.coordinator.rules.changes import OwnerOrders
from elastane.coordinator.rules.incident import Incident
from elastane.coordinator.rules.nodes import HeldWorkers, Place
from elastane.coordinator.rules.sizing import NodeWorkers
from elastane.coordinator.rules.state import MembershipPhase
from elastane.coordinator.rules.state_holders import StateHolders
from elastane.coordinator.rules.step_downs import StepDowns
from elastane.protocol.effects import RegroupWorkers
from elastane.protocol.hangs import HANG_STEPS_FIRST, HangRules
from elastane.protocol.limits import STEP_DOWN_S
from simulation import HistoryFailedError, in_place_workers, run_seed
from simulation.node import SimulatedNode
from simulation.places import InPlaceGroup
from simulation.setup import LEADER_ISOLATED, Cut


def first_failure(seeds, *, store_backed=True, first=0, **drawn):
    for seed in range(first, first + seeds):
        try:
            run_seed(seed, store_backed=store_backed, in_place=True, **drawn)
        except HistoryFailedError as fault:
            return str(fault).splitlines()[-2]
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_a_replacement_ranked_before_survivors_is_found(monkeypatch):
    monkeypatch.setattr(
        NodeWorkers, "workers", property(lambda self: self.joining + self.survivors)
    )
    found = first_failure(300)
    assert "joiner" in found or "have the order" in found


def test_nodes_of_survivors_that_are_put_in_another_order_are_found(monkeypatch):
    original = next_world._in_place
    monkeypatch.setattr(next_world, "_in_place", lambda state: original(state)[::-1])
    found = first_failure(300)
    assert "have the order" in found or "joiner" in found


def test_a_worker_that_died_and_is_given_a_place_is_found(monkeypatch):
    original = HeldWorkers.lose

    def stays_able(self, failures):
        able = {*self.recoverable}
        original(self, failures)
        self.recoverable, self.lost = able, set()

    monkeypatch.setattr(HeldWorkers, "lose", stays_able)
    first_failure(300)


def test_a_failure_of_the_last_world_dropped_at_a_commit_is_found(monkeypatch):
    original = Group.enter

    def forgets(self, assignment):
        original(self, assignment)
        self.failures.clear()

    monkeypatch.setattr(Group, "enter", forgets)
    first_failure(1000)


def test_workers_that_do_not_look_at_their_deadline_are_found(monkeypatch):
    """Agent and reaper stand still, so that no process is left to kill the workers."""
    monkeypatch.setattr(SimulatedNode, "is_overdue", property(lambda self: False))
    assert "two sides train" in first_failure(10, first=2_060)


def test_a_waiting_node_that_is_taken_for_a_member_is_found(monkeypatch):
    def at_once(state):
        look_after(state)
        for node in state.roster.nodes.values():
            if node.place is Place.STANDBY and not node.workers.recoverable:
                node.workers.recover(set(range(node.spec.local_world_size)))
                state.roster.reindex(node)

    look_after = recovery.prepare_standbys
    monkeypatch.setattr(recovery, "prepare_standbys", at_once)
    assert "is not able" in first_failure(300)


def test_a_regroup_that_meets_at_the_old_port_is_found(monkeypatch):
    original = next_world._commit

    def not_spent(*args):
        original(*args)
        state = args[0]
        for node in state.roster.nodes.values():
            node.offer_used = False

    monkeypatch.setattr(next_world, "_commit", not_spent)
    assert "which is free" in first_failure(1000)


def test_an_incident_that_is_charged_twice_is_found(monkeypatch):
    original = recovery.charge_replacements

    def twice(state, incident):
        original(state, incident)
        return original(state, incident)

    monkeypatch.setattr(recovery, "charge_replacements", twice)
    assert "restarts" in first_failure(300)


def test_departures_that_are_charged_are_found(monkeypatch):
    original = recovery.interrupt_world

    def charges(state, reason):
        state.budget.used = min(state.budget.allowed, state.budget.used + 1)
        return original(state, reason)

    monkeypatch.setattr(recovery, "interrupt_world", charges)
    assert "workers died" in first_failure(300)


def test_continuing_from_a_worker_that_is_behind_is_found(monkeypatch):
    original = in_place_workers.decide

    def least(statuses):
        found, held = original(statuses), [each.committed for each in statuses if each.holds]
        return replace(found, committed=min(held)) if found is not None and held else found

    monkeypatch.setattr(in_place_workers, "decide", least)
    assert "and continues from" in first_failure(300)


def test_a_drained_boundary_that_regroups_before_all_are_parked_is_found(monkeypatch):
    original = machine._draining

    def impatient(state):
        if state.drain.target_sent and state.in_place.active and state.incidents.is_planned:
            state.roster.unsaved.clear()
        return original(state)

    monkeypatch.setitem(machine.RULES, MembershipPhase.DRAINING, impatient)
    assert "parks for a planned change" in first_failure(500)


def test_a_report_of_a_drain_that_was_called_off_is_found_to_count_for_the_next(monkeypatch):
    original = reports._drained

    def any_drain(state, node, message):
        original(state, node, msgspec.structs.replace(message, drain=state.drain.number))

    monkeypatch.setattr(reports, "_drained", any_drain)
    found = first_failure(1, first=29122960, kind="planned", cut=Cut(without=(LEADER_ISOLATED,)))
    assert "not parked" in found


def test_survivors_that_are_stopped_by_a_new_coordinator_are_found(monkeypatch):
    monkeypatch.setattr(admission, "missed_place", lambda *args: None)
    found = first_failure(20, first=1600)
    assert "was stopped" in found or "continues from" in found


def test_a_fault_that_restarts_all_though_some_survive_is_found(monkeypatch):
    monkeypatch.setattr(recovery, "has_survivors", lambda state: False)
    assert "was stopped" in first_failure(300)


def test_a_world_that_is_left_for_one_of_before_is_found(monkeypatch):
    original = LocalWorkers._regroup

    def again(self, assignment, *, leaving):
        before = self.group.assignment if self.group is not None else None
        original(self, assignment, leaving=leaving)
        if before is not None and self.group is not None and before.in_place and before.workers:
            self._outbox.add(RegroupWorkers(self.group.start_fence, before, before.workers))

    monkeypatch.setattr(LocalWorkers, "_regroup", again)
    first_failure(500)


def test_joining_workers_that_start_afresh_while_others_train_out_of_sight_are_found(monkeypatch):
    monkeypatch.setattr(StateHolders, "wait_until_s", lambda self, members, world: 0.0)
    assert "two sides train" in first_failure(100, first=20_002_575)


def test_displaced_holders_stopped_though_needed_are_found(monkeypatch):
    monkeypatch.setattr(StateHolders, "is_displaced_holder", lambda self, node: False)
    assert "was stopped" in first_failure(100, first=20_037_285)


def test_an_assignment_dropped_without_a_report_is_found(monkeypatch):
    def silently(self, group, fence, *, finished):
        group.move(fence)

    monkeypatch.setattr(LocalWorkers, "_stay_out", silently)
    assert "nothing was trained" in first_failure(100, first=43_440, store_backed=False)


def test_an_old_step_taken_as_proof_of_a_later_world_is_found(monkeypatch):
    monkeypatch.setattr(InPlaceGroup, "met", property(lambda self: self.fence.round))
    assert "two sides train" in first_failure(1, first=84_007_299)


def test_an_agent_that_was_given_up_and_is_let_in_again_is_found(monkeypatch):
    monkeypatch.setattr(admission, "refuse_if_fenced", lambda state, node: None)
    assert "whom the owner gave up" in first_failure(100, first=130_000_000)


def test_an_agent_that_is_given_up_and_stays_in_its_world_is_found(monkeypatch):
    def at_the_door_alone(state, incarnations, dead):
        state.owner.fenced = frozenset(incarnations)

    monkeypatch.setattr(admission, "apply_fencing", at_the_door_alone)
    assert "whom the owner gave up" in first_failure(100, first=130_000_025)


def test_a_live_agent_counted_as_dead_is_found(monkeypatch):
    monkeypatch.setattr(OwnerOrders, "is_dead", lambda self, incarnation: True)
    found = first_failure(100, first=20_002_500)
    assert "continues from step" in found or "two sides train" in found


def test_stopped_workers_that_alone_had_a_step_are_found(monkeypatch):
    monkeypatch.setattr(drain, "all_save", lambda state: not state.in_place.active)
    assert "leaves with step" in first_failure(100, first=170)


def test_the_last_that_leave_during_a_drain_and_do_not_save_are_found(monkeypatch):
    monkeypatch.setattr(drain, "stop_at_target", lambda state: None)
    assert "leaves with step" in first_failure(20, first=3255)


def test_a_node_that_takes_part_with_some_of_its_workers_is_found(monkeypatch):
    least = next_world.workers_needed
    monkeypatch.setattr(next_world, "workers_needed", lambda state, found: least(state, []))
    assert "has a part of the workers of" in first_failure(50, span=1)


def test_a_coordinator_that_forgets_that_nodes_are_whole_is_found(monkeypatch):
    take = admission.record_workers

    def forgets(state, node, holding):
        take(state, node, holding)
        node.workers.shard(None)

    monkeypatch.setattr(admission, "record_workers", forgets)
    assert "has a part of the workers of" in first_failure(100, span=1)


def test_a_stall_that_is_not_believed_in_the_first_steps_of_a_process_is_found(monkeypatch):
    original = HangRules._is_stalled

    def patient(self, worker):
        return worker.sight.steps >= HANG_STEPS_FIRST and original(self, worker)

    monkeypatch.setattr(HangRules, "_is_stalled", patient)
    assert "nothing was trained" in first_failure(60, first=20)


def test_a_stall_that_heartbeats_do_not_report_is_found(monkeypatch):
    monkeypatch.setattr(recovery, "end_if_stalled", lambda state: False)
    assert "nothing was trained" in first_failure(60)


def test_joined_workers_that_begin_again_without_the_state_are_found(monkeypatch):
    original = in_place_workers.decide

    def ignores_joining(statuses):
        return original([replace(each, came_later=False) for each in statuses])

    monkeypatch.setattr(in_place_workers, "decide", ignores_joining)
    assert "is saved" in first_failure(60, first=528)


def test_a_lost_state_that_is_charged_again_is_found(monkeypatch):
    charged = property(lambda self: bool(self.seen) and not self.planned and not self.departed)
    monkeypatch.setattr(Incident, "is_chargeable", charged)
    assert "a state that an earlier world had lost" in first_failure(60, first=99)


@pytest.mark.parametrize("seed", [132, 141])
def test_a_restart_that_a_leave_or_a_charged_loss_makes_necessary_and_that_is_charged_is_found(
    monkeypatch, seed
):
    monkeypatch.setattr(incident, "asks_restart", lambda failure: False)
    assert "workers died" in first_failure(1, first=seed, kind="planned")


@pytest.mark.parametrize(
    ("steps_down", "first", "without"),
    [
        pytest.param(lambda steps, world, short_s: False, 2690, (), id="never"),
        pytest.param(
            lambda steps, world, short_s: not steps.stands_later and short_s >= STEP_DOWN_S,
            1690,
            (0, 1, 2, 3),
            id="once",
        ),
    ],
)
def test_a_coordinator_that_no_node_reaches_and_that_stays_is_found(
    monkeypatch, steps_down, first, without
):
    monkeypatch.setattr(StepDowns, "is_due", steps_down)
    found = first_failure(10, first=first, cut=Cut(without=without))
    assert "nodes were there, undisturbed" in found


def test_two_nodes_that_do_not_reach_each_other_and_are_both_kept_are_found(monkeypatch):
    monkeypatch.setattr(cuts, "leave_out", lambda state: "")
    assert first_failure(40, first=2860)


def test_a_drain_that_hides_nodes_that_do_not_reach_each_other_is_found(monkeypatch):
    monkeypatch.setattr(recovery, "end_cut_drain", lambda state: False)
    assert "nothing was trained" in first_failure(5, first=1436)


def test_a_pause_that_ends_while_two_nodes_are_apart_is_found(monkeypatch):
    ignore_silence(monkeypatch)
    assert "cannot connect" in first_failure(2, first=1219)


def test_probes_whose_answers_nobody_sent_are_found(monkeypatch):
    answer_all(monkeypatch)
    assert "were apart all along" in first_failure(2, first=168)
