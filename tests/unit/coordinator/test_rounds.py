"""Rounds: gathering, membership, and the effects of arrivals and departures."""

import pytest
from coordinator_driver import job_spec

from elastane.protocol.limits import Timing
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign, Drain, Release, Stop
from elastane.protocol.model import Fence, JobRecord


def test_a_fixed_size_job_starts_once_all_nodes_have_joined(driver):
    job = driver(job_spec(3, 3))
    job.join("a")
    job.join("b")
    job.passes(40.0, alive="ab")
    assert job.phase == "forming"
    assert "2 of at least 3 nodes are here (a, b)" in job.machine.report().reason
    job.join("c")
    assert job.phase == "running"


def test_a_job_of_too_few_nodes_ends_with_what_it_waited_for(driver):
    job = driver(job_spec(3, 3, timing={"join_timeout_s": 30.0}))
    job.join("a")
    job.join("b")
    job.passes(29.9, alive="ab")
    assert job.phase == "forming"
    job.passes(0.2, alive="ab")
    outcome = job.persisted[-1].outcome
    assert outcome.reason == (
        "rendezvous: 2 of at least 3 nodes joined within 30 s (present: a, b)"
    )
    assert (outcome.slug, outcome.exit_code) == ("rdzv-timeout", 75)
    assert "--nnodes MIN:MAX" in outcome.next_step


@pytest.mark.parametrize(("rejoin_s", "waits_s"), [(0.0, 30.0), (5.0, 5.0)])
def test_a_lost_node_is_waited_for_as_long_as_a_first_one_or_for_its_own_time(
    driver, rejoin_s, waits_s
):
    timing = {"join_timeout_s": 30.0, "rejoin_timeout_s": rejoin_s}
    job = driver(job_spec(2, 2, timing=timing))
    job.join("a")
    job.passes(29.0, alive="a")
    job.join("b")
    job.breaks("b")
    job.passes(0.2, alive="a")
    job.stops("a")
    assert f"the job waits for 1 more, {waits_s:g} s at most" in job.machine.report().reason
    job.passes(waits_s - 1.0, alive="a")
    assert job.phase == "forming"
    job.passes(1.2, alive="a")
    outcome = job.persisted[-1].outcome
    assert (outcome.slug, outcome.exit_code) == ("rdzv-timeout", 75)
    setting = "rejoin_timeout" if rejoin_s else " join_timeout"
    assert f"--rdzv-conf {setting.strip()}=SECONDS" in outcome.next_step


def test_the_last_call_ends_after_the_latest_arrival_or_at_the_maximum(driver):
    job = driver(job_spec(1, 3))
    job.join("a")
    job.passes(2.0, alive="a")
    job.join("b")
    job.passes(2.9, alive="ab")
    assert job.phase == "forming"
    job.passes(0.2, alive="ab")
    assert job.phase == "running" and job.ranks() == ["a", "b"]

    full = driver(job_spec(1, 2))
    full.join("a")
    full.join("b")
    assert full.phase == "running"


def test_last_calls_end_though_nodes_keep_arriving(driver):
    job = driver(job_spec(1, 100))
    names = [f"n{i}" for i in range(16)]
    for i, name in enumerate(names):
        job.join(name)
        job.passes(2.0, alive=names[: i + 1])
    assert job.phase in ("running", "draining")
    assert len(job.persisted[0].world.members) <= 16


def test_five_arrivals_are_one_change(driver):
    job = driver(job_spec(1, 10))
    job.join("a")
    job.passes(3.1, alive="a")
    for i in range(5):
        job.join(f"new{i}")
        job.passes(0.3, alive=["a"])
    job.passes(0.9, alive="a")
    assert job.phase == "draining"
    job.marks("a", None)
    job.drains("a")
    job.stops("a")
    assert len(job.ranks()) == 6 and job.ranks()[0] == "a"
    assert len(job.got("a", Drain)) == 1
    assert job.assigned["a"].fence == Fence(2, 0)


def test_arrivals_that_still_warm_up_are_gathered_from_when_they_are_ready(elastic):
    elastic.join("c", ready=False)
    elastic.join("d", ready=False)
    elastic.passes(20.0, alive="abcd")
    assert elastic.phase == "running"
    elastic.warms("c")
    elastic.passes(0.5, alive="abcd")
    assert elastic.phase == "running"
    elastic.warms("d")
    assert elastic.phase == "draining"  # The job is full.


def test_a_survivor_that_never_became_ready_is_not_left_out(driver):
    job = driver(job_spec(1, 2))
    job.join("a")
    job.join("b", ready=False)
    job.fails("a")
    job.stops("a", "b")
    assert job.ranks() == ["a", "b"] and job.assigned["b"].fence == Fence(1, 1)


def test_a_spare_replaces_a_departed_node(pair):
    pair.join("spare")
    pair.passes(10.0, alive=["a", "b", "spare"])
    assert pair.phase == "running"
    pair.breaks("a")
    pair.passes(0.2, alive=["b", "spare"])
    assert pair.got("b", Stop)
    pair.stops("b")
    assert pair.ranks() == ["b", "spare"]
    assert pair.assigned["b"].fence == Fence(2, 0)


def test_the_departure_of_a_spare_is_logged_as_one_and_that_of_a_member_is_not(pair):
    pair.join("spare")
    pair.passes(10.0, alive=["a", "b", "spare"])
    for node_id, alive in (("spare", "ab"), ("a", "b")):
        pair.breaks(node_id)
        pair.passes(0.2, alive=alive)
    gone = [event for event in pair.events if event.kind is EventKind.NODE_DEPARTED]
    assert [(one.node_id, one.data.get("spare", False)) for one in gone] == [
        ("spare", True),
        ("a", False),
    ]


def test_a_departure_is_noticed_at_once_and_costs_no_restart(elastic):
    elastic.breaks("a")
    elastic.passes(0.11, alive="b")
    assert "node a departed: its connection ended: EOF" in elastic.machine.report().reason
    ages = {one.kind: one.data["age_s"] for one in elastic.events if "age_s" in one.data}
    assert ages == {
        EventKind.NODE_DEPARTED: pytest.approx(0.1, abs=0.02),
        EventKind.INCIDENT: ages[EventKind.NODE_DEPARTED],
    }
    elastic.stops("b")
    report = elastic.machine.report()
    assert (report.phase, report.restarts_used) == ("running", 0)
    assert elastic.ranks() == ["b"]


def test_silence_is_a_departure_after_its_bound(elastic):
    elastic.passes(2.8, alive="b")
    assert elastic.phase == "running"
    elastic.passes(0.4, alive="b")
    assert elastic.phase == "stopping"
    assert "node a departed: silent for 3." in elastic.machine.report().reason
    [found] = [one for one in elastic.events if one.kind is EventKind.INCIDENT]
    assert 3.0 <= found.data["age_s"] < 3.5, "since it was heard last"


def test_a_fixed_size_job_waits_for_a_replacement(pair):
    pair.breaks("a")
    pair.passes(0.2, alive="b")
    pair.stops("b")
    assert pair.phase == "forming"
    assert "1 of at least 2 nodes are here (b)" in pair.machine.report().reason
    pair.join("c")
    assert pair.ranks() == ["b", "c"]


def test_an_arrival_gets_the_rank_that_it_requests(driver):
    job = driver(job_spec(3, 3))
    job.join("a", node_rank=2)
    job.join("b", node_rank=0)
    job.join("c", node_rank=1)
    assert job.ranks() == ["b", "c", "a"]


def test_a_node_that_leaves_is_drained_released_and_never_a_fault(elastic):
    elastic.leaves("a", "SIGTERM")
    assert elastic.phase == "draining"
    for name in "ab":
        elastic.marks(name, None)
        elastic.drains(name)
    elastic.stops("a", "b")
    assert elastic.got("a", Release)
    assert elastic.ranks() == ["b"] and elastic.phase == "running"
    assert elastic.machine.report().restarts_used == 0
    assert not [n for n in elastic.events if n.kind in ("incident", "node-departed")]


def test_a_spare_that_leaves_disturbs_no_worker(pair):
    pair.join("spare")
    pair.leaves("spare")
    assert pair.got("spare", Release) and pair.phase == "running"
    assert not pair.got("a", Stop)


@pytest.mark.parametrize("limit_s", [15.0, Timing().isolation_limit_s])
def test_an_unreachable_world_delays_the_next_until_it_must_have_stopped(driver, limit_s):
    timing = Timing(isolation_limit_s=limit_s)
    world_of_a = driver(job_spec(1, 1, timing={"isolation_limit_s": limit_s}), store_backed=True)
    world_of_a.join("a")
    world_of_a.join("spare")
    world_of_a.passes(3.2, alive=["spare"])
    assert world_of_a.phase == "forming"
    assert "may still train" in world_of_a.machine.report().reason
    world_of_a.passes(timing.fence_wait_s - 1.0, alive=["spare"])
    assert world_of_a.phase == "forming"
    world_of_a.passes(2.0, alive=["spare"])
    assert world_of_a.ranks() == ["spare"]


def test_a_world_whose_agent_died_delays_nothing(driver):
    job = driver(job_spec(1, 1), store_backed=True)
    job.join("a")
    job.join("spare")
    job.breaks("a", clean=True)
    job.passes(0.2, alive=["spare"])
    assert job.ranks() == ["spare"]


def test_a_broken_session_alone_is_no_proof_of_death(driver):
    job = driver(job_spec(1, 1), store_backed=True)
    job.join("a")
    job.join("spare")
    job.breaks("a", clean=False)
    job.passes(5.0, alive=["spare"])
    assert job.phase == "forming"
    job.join("a", holding=job.holding("a"))
    assert job.phase == "running" and job.ranks() == ["a"]


def test_without_authority_nothing_is_decided_and_nothing_forgotten(pair):
    pair.authority(False)
    pair.fails("a")
    pair.passes(1.0, alive="ab")
    assert pair.phase == "running" and not pair.got("b", Stop)
    pair.authority(True)
    assert pair.phase == "stopping" and pair.got("b", Stop)


def test_a_deposed_coordinator_stops_no_worker_of_a_later_world(driver):
    first = driver(job_spec(2, 2), store_backed=True)
    first.join("a")
    first.join("b")
    later = driver(job_spec(2, 2), record=None, store_backed=True)
    later.join("a", seen=Fence(3, 0))
    later.join("b")
    assert later.assigned["a"].fence > Fence(3, 0)
    first.breaks("a")
    first.join("a", holding=later.holding("a"))
    assert not first.got("a", Stop) and not first.got("b", Stop)


def record_of(job):
    return job.persisted[-1]


def test_a_new_coordinator_restarts_nothing_when_all_are_back(pair, driver):
    new = driver(record=record_of(pair), store_backed=True)
    new.assigned = pair.assigned
    new.join("a", holding=pair.holding("a"))
    assert new.phase == "recovering"
    new.join("b", holding=pair.holding("b"))
    assert new.phase == "running"
    assert not new.got("a", Stop) and not new.got("a", Assign)


@pytest.mark.parametrize("late_s", [0.05, 0.4])
def test_a_coordinator_that_only_lost_its_leadership_returns_with_the_others(pair, driver, late_s):
    new = driver(record=record_of(pair), store_backed=True, previous_holder="b")
    new.assigned = pair.assigned
    new.passes(0.6)  # of nobody being back
    new.join("a", holding=pair.holding("a"))
    new.passes(late_s, alive="a")
    new.join("b", holding=pair.holding("b"))
    assert new.phase == "running" and not new.got("a", Stop)


def test_a_dead_coordinator_is_awaited_for_less_time_than_another_node(pair, driver):
    new = driver(record=record_of(pair), store_backed=True, previous_holder="b")
    new.join("a", holding=pair.holding("a"))
    new.passes(0.6, alive="a")
    assert new.got("a", Stop)
    other = driver(record=record_of(pair), store_backed=True, previous_holder="b")
    other.join("b", holding=pair.holding("b"))
    other.passes(0.6, alive="b")
    assert other.phase == "recovering"


def test_a_coordinator_that_refuses_connections_is_awaited_like_a_broken_session(pair, driver):
    last = {"store_backed": True, "previous_holder": "b", "previous_refuses": True}
    new = driver(record=record_of(pair), **last)
    new.join("a", holding=pair.holding("a"))
    new.passes(0.05, alive="a")
    assert new.phase == "recovering"
    new.passes(0.1, alive="a")
    assert new.got("a", Stop)


def test_in_the_default_store_holders_restore_the_world_without_a_record(pair, driver):
    new = driver()
    new.join("a", holding=pair.holding("a"), welcomed=True)
    assert new.phase == "recovering"
    new.join("b", holding=pair.holding("b"), welcomed=True)
    assert new.phase == "running"
    assert new.ranks() == ["a", "b"] and new.fence == {"round": 1, "attempt": 0}
    assert not new.got("a", Stop) and not new.got("b", Stop)


def test_half_a_world_that_comes_back_is_stopped_and_gets_another_round(pair, driver):
    new = driver(pair.spec)
    new.join("b", holding=pair.holding("b"), welcomed=True)
    new.passes(2.1, alive="b")
    assert new.got("b", Stop)
    new.assigned["b"] = pair.assigned["b"]
    new.stops("b")
    new.join("c")
    assert new.ranks() == ["b", "c"] and new.assigned["b"].fence == Fence(2, 0)


def test_half_a_world_that_continues_alone_gets_another_round(elastic, driver):
    new = driver(elastic.spec)
    new.join("b", holding=elastic.holding("b"), welcomed=True)
    new.passes(2.1, alive="b")
    assert new.got("b", Stop)
    new.assigned["b"] = elastic.assigned["b"]
    new.stops("b")
    assert new.ranks() == ["b"] and new.assigned["b"].fence == Fence(2, 0)


def test_fences_and_budget_continue_without_any_workers(driver):
    new = driver()
    new.join("a", welcomed=True, seen=Fence(4, 2), restarts_seen=2)
    new.join("b")
    new.passes(2.1, alive="ab")
    assert new.assigned["a"].fence == Fence(5, 0)
    assert new.assigned["a"].restarts_used == 2


def test_a_failure_while_the_world_is_gathered_again_is_not_lost(pair, driver):
    new = driver(record=record_of(pair), store_backed=True)
    new.assigned = pair.assigned
    new.join("a", holding=pair.holding("a"))
    new.fails("a")
    new.join("b", holding=pair.holding("b"))
    assert new.phase == "stopping"
    new.stops("a", "b")
    assert new.machine.report().restarts_used == 1


def test_an_ended_job_informs_its_agents_under_a_new_coordinator(pair, driver):
    pair.succeeds("a", "b")
    new = driver(record=record_of(pair), store_backed=True)
    new.passes(4.9)
    assert new.finished is None
    new.join("a", welcomed=True)
    assert new.inbox["a"][0].outcome.ok
    new.passes(0.3)
    assert new.finished.ok


def test_a_record_of_a_world_is_all_a_successor_needs(pair):
    record = record_of(pair)
    assert isinstance(record, JobRecord)
    assert [member.node_id for member in record.world.members] == ["a", "b"]
    assert record.versions is not None and record.outcome is None
