"""Worlds of unmodified scripts that others join at boundaries, in the simulation.

`python -m simulation --planned` replays a seed; its line in kept_seeds.txt has the same option.
"""

import os

import pytest
from played_histories import all_hold, played

from elastane.coordinator.rules import drain, machine, next_world, recovery
from elastane.coordinator.rules.nodes import HeldWorkers
from elastane.protocol.model import Joining
from simulation import HistoryFailedError, run_seed, setup_of

SEEDS = 100
SOAK_SEEDS = int(os.environ.get("ELASTANE_SOAK_SEEDS", "500000")) // 5
MODES = pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])


def test_workers_join_at_boundaries_alone_and_none_waits_for_ever():
    """Without a store; the test below plays the histories with one."""
    all_hold(range(SEEDS), [False], kind="planned")


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@MODES
def test_joining_at_boundaries_holds_in_a_hundred_thousand_histories(store_backed):
    jobs = len(os.sched_getaffinity(0))
    all_hold(range(SEEDS, SEEDS + SOAK_SEEDS), [store_backed], jobs, kind="planned")


def test_histories_hold_and_meet_joining_workers_faults_among_them_and_drains_that_are_called_off():
    joined = again = called_off = 0
    for seed in range(SEEDS):
        history, _ = played(setup_of(seed, store_backed=True, kind="planned"))
        checks = history.cluster.checks
        joined, again = joined + checks.boundaries.joined, again + checks.boundaries.handed_again
        called_off += checks.growth.called_off
    assert joined > 60 and again > 0 and called_off > 0, (joined, again, called_off)


def first_failure(seeds, *, first=0):
    for seed in range(first, first + seeds):
        try:
            run_seed(seed, store_backed=True, kind="planned")
        except HistoryFailedError as fault:
            return str(fault).splitlines()[-2]
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_a_worker_that_joins_in_a_world_after_a_fault_is_found(monkeypatch):
    never = lambda state: next_world.joining(state) is Joining.NEVER  # noqa: E731
    monkeypatch.setattr(next_world, "takes_survivors_only", never)
    found = first_failure(100)
    assert "follows a fault" in found or "not parked" in found or "get a state" in found


def test_workers_that_join_after_a_drain_that_not_all_reached_are_found(monkeypatch):
    monkeypatch.setattr(drain, "call_off", lambda state: machine._end_world(state, "late"))
    assert "not parked" in first_failure(100, first=40)


def test_workers_that_wait_for_ever_are_found(monkeypatch):
    monkeypatch.setattr(recovery, "standbys_due", lambda state: [])
    assert "have no place" in first_failure(100)


def test_lost_workers_that_the_budget_pays_for_and_that_are_not_replaced_are_found(monkeypatch):
    monkeypatch.setattr(recovery, "_charge_or_forgo", lambda state, incident: None)
    monkeypatch.setattr(recovery, "replace_lost", lambda state, incident, delay_s: None)
    monkeypatch.setattr(recovery, "replace_uncharged", lambda state: None)
    assert "have no place" in first_failure(100)


def test_displaced_workers_that_join_with_a_state_of_before_are_found(monkeypatch):
    monkeypatch.setattr(recovery, "_displaced_from_boundaries", lambda state: [])
    monkeypatch.setattr(HeldWorkers, "leave_world", lambda self, ranks: None)
    assert "with a state of before" in first_failure(100, first=215)
