"""The plans of histories of jobs: pure, whole, and within what the backend promises."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from agent_plans import (
    DEATHS,
    DISK_FAULTS,
    HOST_FAULTS,
    REMEMBERS_S,
    SCRIPTS,
    STORE_FAULTS,
    WORKER_FAULTS,
    ZYGOTE_FAULTS,
    AgentHistory,
    Fault,
)

RUN_S = 30.0


def drawn(seed: int, backend: str = "etcd") -> AgentHistory:
    return AgentHistory.drawn(seed, "in-place", backend, RUN_S)


def test_a_seed_is_one_history_and_another_seed_another():
    assert drawn(4) == drawn(4)
    assert len({str(drawn(seed)) for seed in range(50)}) == 50


def test_fifty_seeds_have_every_fault_several_at_a_time_and_late_hosts():
    histories = [drawn(seed) for seed in range(50)]
    kinds = {fault.kind for history in histories for fault in history.faults}
    assert len(kinds) == 18
    assert {history.hosts for history in histories} == {"abc", "abcd"}
    assert {bool(history.late_s) for history in histories} == {True, False}
    assert any(
        later.at_s < earlier.end_s
        for history in histories
        for earlier, later in itertools.pairwise(history.faults)
    )
    assert all(fault.at_s < RUN_S for history in histories for fault in history.faults)


def test_histories_of_scripts_harm_zygotes_and_never_the_disk_on_two_or_three_hosts():
    for recovery, backend in itertools.product(SCRIPTS, ("elastane", "file", "etcd", "redis")):
        histories = [AgentHistory.drawn(seed, recovery, backend, RUN_S) for seed in range(50)]
        kinds = {fault.kind for history in histories for fault in history.faults}
        assert kinds.issuperset(ZYGOTE_FAULTS) and kinds.isdisjoint(DISK_FAULTS)
        assert kinds.isdisjoint(STORE_FAULTS) == (backend in ("elastane", "file"))
        assert {history.hosts for history in histories} == {"ab", "abc"}
        assert all(len(h.hosts) - bool(h.late_s) >= h.nodes_min for h in histories)


def test_every_third_history_harms_no_worker_directly():
    for seed in range(0, 30, 3):
        assert not [fault for fault in drawn(seed).faults if fault.kind in WORKER_FAULTS]


@pytest.mark.parametrize(
    ("host", "from_s", "for_s", "continues"),
    [("a", 1.0, 5.0, True), ("a", 3.0, 2.0, True), ("a", 1.0, 9.0, False), ("b", 1.0, 5.0, False)],
)
def test_a_suspension_harms_workers_if_the_agent_continues_before_them(
    host, from_s, for_s, continues
):
    suspension = Fault(2.0, 6.0, "suspend", "a")
    faults = (suspension, Fault(from_s, for_s, "stop-agent", host))
    history = dataclasses.replace(drawn(0), faults=faults)
    assert history.agent_continues_alone(suspension) == continues


@pytest.mark.parametrize("seed", range(30))
def test_without_a_store_a_majority_is_needed_and_an_agent_remembers_the_fences(seed: int):
    history = drawn(seed, "elastane")
    assert history.nodes_min > len(history.hosts) / 2
    harmful = [fault for fault in history.faults if fault.kind in HOST_FAULTS]
    for end in [one for one in harmful if one.kind in DEATHS and one.host == "a"]:
        for other in harmful:
            apart = other.end_s + REMEMBERS_S < end.at_s or end.end_s + REMEMBERS_S < other.at_s
            assert other is end or apart
