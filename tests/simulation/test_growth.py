"""Worlds of unmodified scripts in the simulation: they shrink in place, and grow at checkpoints.

`python -m simulation --shrinks` replays a seed; its line in kept_seeds.txt has the same option.
"""

import os

import pytest
from played_histories import all_hold, played

from elastane.coordinator.rules import drain, growth, machine
from elastane.coordinator.rules.changes import WaitingCapacity
from simulation import HistoryFailedError, run_seed, setup_of

SEEDS = 100
SOAK_SEEDS = int(os.environ.get("ELASTANE_SOAK_SEEDS", "500000")) // 5
MODES = pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])


def test_worlds_grow_only_at_whole_checkpoints_and_no_capacity_waits_for_ever():
    """Without a store; the test below plays the histories with one."""
    all_hold(range(SEEDS), [False], kind="shrinks")


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@MODES
def test_growth_holds_in_a_hundred_thousand_histories(store_backed):
    jobs = len(os.sched_getaffinity(0))
    all_hold(range(SEEDS, SEEDS + SOAK_SEEDS), [store_backed], jobs, kind="shrinks")


def test_histories_hold_and_meet_growth_and_drains_that_are_called_off():
    grown = called_off = 0
    for seed in range(SEEDS):
        history, _ = played(setup_of(seed, store_backed=True, kind="shrinks"))
        grown += history.cluster.checks.growth.grown
        called_off += history.cluster.checks.growth.called_off
    assert grown > 30 and called_off > 0, (grown, called_off)


def first_failure(seeds, *, first=0):
    for seed in range(first, first + seeds):
        try:
            run_seed(seed, store_backed=True, kind="shrinks")
        except HistoryFailedError as fault:
            return str(fault).splitlines()[-2]
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_a_growth_without_a_checkpoint_is_found(monkeypatch):
    monkeypatch.setattr(WaitingCapacity, "pop_checkpoint", lambda self: "step-0")
    assert "step 0, which is not saved" in first_failure(100)


def test_a_growth_at_a_checkpoint_of_long_ago_is_found(monkeypatch):
    monkeypatch.setattr(WaitingCapacity, "pop_checkpoint", lambda self: self._checkpoint)
    assert "and has made" in first_failure(300)


def test_workers_that_are_killed_without_a_common_boundary_are_found(monkeypatch):
    begin = drain.begin_drain

    def at_once(state, reason, planned=None):
        begin(state, reason, planned)
        if planned is not None:
            for node in state.roster.members():
                node.drain.excuse()
                state.roster.reindex(node)
            state.drain.aim(0, stops_all=True)
        return True

    monkeypatch.setattr(machine.drain, "begin_drain", at_once)
    assert "not parked before a step" in first_failure(100)


def test_capacity_that_waits_for_ever_is_found(monkeypatch):
    monkeypatch.setattr(machine.growth, "growth_due", lambda state: None)
    assert "have no place" in first_failure(100)


def test_a_restart_before_the_interval_has_passed_is_found(monkeypatch):
    monkeypatch.setattr(growth, "_earliest_s", lambda state: 0.0)
    assert "s after its start" in first_failure(100, first=28)


def test_workers_that_stay_parked_after_a_drain_was_called_off_are_found(monkeypatch):
    monkeypatch.setattr(drain, "send_call_off", lambda state, node, number: None)
    found = first_failure(100, first=40)
    assert "stay parked" in found or "nothing was trained" in found


def test_a_script_that_loses_its_work_at_each_growth_is_found(monkeypatch):
    note = WaitingCapacity.note_checkpoint
    monkeypatch.setattr(
        WaitingCapacity,
        "note_checkpoint",
        lambda self, where, now_s, *, resumed: note(self, where, now_s, resumed=True),
    )
    assert "its script does not resume" in first_failure(100, first=700)


def test_a_growth_that_is_charged_is_found(monkeypatch):
    log = growth.log_growth

    def charges(state, planned):
        log(state, planned)
        state.budget.used = min(state.budget.used + 1, state.budget.allowed)
        state.persist()

    monkeypatch.setattr(machine.growth, "log_growth", charges)
    assert "was charged" in first_failure(100)
