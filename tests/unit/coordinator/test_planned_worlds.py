"""Worlds that others join only by planned changes: survivors first, others at boundaries.

Their workers run unmodified scripts whose loop has boundaries (`Joining.PLANNED`).
"""

import re

import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_crossings import holding, successor
from test_in_place_recovery import able as able_in_place
from test_in_place_recovery import dies, fails_at_a_step, kinds, regrouped

from elastane.coordinator.rules import drain
from elastane.coordinator.rules.incident import SAME_CRASHES_MAX
from elastane.protocol.events import Resized
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Assign,
    CallOff,
    Checkpointed,
    Drain,
    Drained,
    DrainTarget,
    Failed,
    Heartbeat,
    Interrupt,
    Marked,
    Prepare,
    Release,
    Stop,
)
from elastane.protocol.model import UNUSED, CheckpointUse, Failure, Fence, Joining

SOON = {"drain_timeout_s": 5.0}


def able(job, *node_ids, workers=(0, 1)):
    able_in_place(job, *node_ids, workers=workers, joining=Joining.PLANNED)


def planned(low=1, high=3, nodes="ab", restarts=3, **more):
    """A running world of nodes with two workers each, whose script has made its loader."""
    more.setdefault("timing", SOON)
    job = Driver(job_spec(low, high, restarts, **more))
    for node_id in nodes:
        job.join(node_id)
    job.passes(4.0, alive=nodes)
    able_in_place(job, *nodes, joining=Joining.NEVER)
    able(job, *nodes)
    job.inbox.clear()
    return job


def reasons(job, kind):
    return [event.reason for event in job.events if event.kind == kind]


def reaches_boundary(job, *node_ids, calls=7):
    for node_id in node_ids:
        job.marks(node_id, calls)
    for node_id in node_ids:
        job.drains(node_id)


def until(job, phase):
    """Let time pass until the coordinator is in `phase`; return how long it took."""
    began_s = job.now_s
    while job.phase != phase:
        assert job.now_s < began_s + 100.0, f"still {job.phase}, not {phase}"
        job.passes(0.1, alive="ab")
    return job.now_s - began_s


def shrunk(**more):
    """A world that lost worker 0 of node a, whose replacement is starting."""
    job = planned(min_workers=1, **more)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,)), able(job, "b")
    job.inbox.clear()
    return job


def test_survivors_continue_alone_and_the_lost_worker_is_charged_and_replaced():
    job = planned(min_workers=1)
    dies(job, "a", local_rank=0)
    assert kinds(job, "a") == [Interrupt, Prepare, Assign] and kinds(job, "b") == [
        Interrupt,
        Assign,
    ]
    assert regrouped(job, "a") == (Fence(2, 0), 0, (1,), 3)
    assert job.persisted[-1].restarts_used == 1
    job.meets("a", "b")
    assert "continues with 3 of 4 workers" in reasons(job, EventKind.WAITING)


def test_a_replacement_that_is_ready_gets_no_place_in_a_world_after_a_fault():
    job = shrunk()
    job.breaks("b")  # Nothing is committed while a session is broken.
    able(job, "a")
    dies(job, "a", local_rank=1, pid=4243)
    job.passes(0.2, alive="a")
    assert not job.got("a", Assign), "it has no state, and nobody is at a boundary"
    assert Stop in kinds(job, "a")  # No survivor is left, so all start afresh.


def test_ready_replacements_join_at_a_boundary_after_the_survivors():
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    assert kinds(job, "a") == kinds(job, "b") == [Drain]
    reaches_boundary(job, "a", "b")
    assert job.got("b", DrainTarget) == [DrainTarget(fence=Fence(2, 0), drain=1, calls=8)]
    assert regrouped(job, "a") == (Fence(3, 0), 0, (1, 0), 4)
    assert regrouped(job, "b") == (Fence(3, 0), 2, (0, 1), 4)
    assert Stop not in kinds(job, "a") + kinds(job, "b")
    assert job.persisted[-1].restarts_used == 1


def test_a_node_that_arrives_is_prepared_and_joins_at_a_boundary():
    job = planned()
    job.join("c")
    job.passes(0.2, alive="abc")
    assert kinds(job, "c")[-1] is Prepare
    assert job.got("c", Prepare)[-1].assignment.waiting
    able(job, "c")
    job.passes(6.0, alive="abc")
    reaches_boundary(job, "a", "b")
    assert regrouped(job, "c") == (Fence(2, 0), 4, (0, 1), 6)


def test_a_fault_during_the_drain_leaves_the_ready_replacement_out():
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    dies(job, "b", local_rank=1)
    assert regrouped(job, "a") == (Fence(3, 0), 0, (1,), 2)
    assert regrouped(job, "b") == (Fence(3, 0), 1, (0,), 2)
    able(job, "a"), able(job, "b", workers=(0, 1))
    job.passes(1.2, alive="ab")
    reaches_boundary(job, "a", "b")
    assert job.persisted[-1].world.world_size == 4 and job.persisted[-1].restarts_used == 2


def test_a_used_up_budget_does_not_end_the_job_and_is_logged_once():
    job = planned(min_workers=1, restarts=0)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,)), able(job, "b")
    job.passes(5.0, alive="ab")
    assert job.phase == "running" and job.persisted[-1].world.world_size == 3
    assert not job.got("a", Prepare)
    told = [why for why in reasons(job, EventKind.WAITING) if "no worker is replaced" in why]
    assert len(told) == 1 and "--max-restarts 0" in told[0]


def test_an_uncharged_loss_stays_uncharged_when_its_agent_returns():
    job = planned(min_workers=1, restarts=0)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,)), able(job, "b")
    died = Failure(local_rank=0, rank=0, pid=4242, exit_code=-9, age_s=1.0)
    job.breaks("a")
    job.inbox.clear()
    back = job.holding("a", able=(1,), in_place=True, joining=Joining.PLANNED, failures=(died,))
    job.join("a", holding=back)
    job.passes(1.0, alive="ab")
    assert job.phase == "running" and not job.got("a", Prepare)


def test_a_standby_that_ends_is_replaced_within_the_budget():
    job = shrunk(restarts=2)
    dies(job, "a", local_rank=0, pid=4243)
    assert Prepare in kinds(job, "a") and job.persisted[-1].restarts_used == 2
    job.inbox.clear()
    dies(job, "a", local_rank=0, pid=4244)
    assert not kinds(job, "a") and job.phase == "running"
    assert "no worker is replaced" in reasons(job, EventKind.WAITING)[-1]


def test_a_drain_for_joining_workers_that_times_out_is_called_off():
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(5.0, alive="ab")
    assert job.phase == "running" and kinds(job, "a")[-1] is CallOff
    assert kinds(job, "b")[-1] is CallOff
    (ended,) = [event for event in job.events if event.kind is EventKind.DRAIN_ENDED]
    assert "others join at a later boundary" in ended.reason and ended.data == {"called_off": True}
    assert job.persisted[-1].world.world_size == 3


def test_late_reports_of_a_drain_that_was_called_off_do_not_count_for_the_next():
    """A worker that is released would count as one that waits at the boundary."""
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(5.0, alive="ab")
    fence = job.assigned["b"].fence
    job.leaves("b")
    assert job.phase == "draining" and job.got("b", Drain)[-1].drain == 2
    job.marks("a", 12)
    job.says("b", Marked(fence=fence, drain=1, calls=7))
    assert job.got("a", DrainTarget)[-1].drain == 1, "b has not answered"
    job.marks("b", 12), job.drains("a")
    job.says("b", Drained(fence=fence, drain=1))
    assert job.phase == "draining"
    job.drains("b")
    assert job.phase != "draining"


def resumed_by_another(job, *, draining):
    """A new coordinator; by node, the last drain that it reports, and whether that lasts."""
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    for node_id, (number, lasts) in draining.items():
        holding = job.holding(
            node_id,
            able=(0, 1),
            in_place=True,
            joining=Joining.PLANNED,
            draining=lasts,
            last_drain=number,
        )
        after.join(node_id, holding=holding, incarnation="1")
    return after


def test_a_new_coordinator_resumes_a_drain_of_which_not_all_have_heard():
    after = resumed_by_another(planned(), draining={"a": (3, True), "b": (2, False)})
    assert after.phase == "draining"
    assert [after.got(n, Drain)[-1].drain for n in "ab"] == [3, 3]


@pytest.mark.parametrize("other", [(3, False), (4, False)])
def test_a_new_coordinator_calls_off_a_drain_that_the_last_one_called_off(other):
    after = resumed_by_another(planned(), draining={"a": (3, True), "b": other})
    assert after.phase == "running" and not after.got("b", CallOff)
    assert after.got("a", CallOff) == [CallOff(fence=Fence(1, 0), drain=3)]
    after.leaves("b")
    assert after.got("a", Drain)[-1].drain == other[0] + 1


def test_a_node_that_missed_the_end_of_a_drain_is_asked_for_the_next_one():
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    job.marks("a", 7), job.marks("b", 7), job.drains("b")
    job.passes(5.0, alive="ab")
    assert job.phase == "running", "the end of the drain is lost on the way to b"
    job.leaves("a")
    holding = job.holding(
        "b", able=(0, 1), in_place=True, joining=Joining.PLANNED, draining=True, last_drain=1
    )
    job.join("b", holding=holding, incarnation="1")
    assert job.got("b", Drain)[-1].drain == 2


def test_the_next_try_waits_twice_as_long_as_the_one_before():
    job = shrunk()
    able(job, "a")
    for time_s in (5.0, 10.0, 20.0):
        assert job.phase == "draining" and job.got("a", Drain)[-1].timeout_s == time_s
        job.marks("a", 7), job.marks("b", 7), job.drains("a")
        assert until(job, "running") == pytest.approx(time_s, abs=0.2)
        assert until(job, "draining") == pytest.approx(2 * time_s, abs=0.2)
    reaches_boundary(job, "a", "b")
    assert job.persisted[-1].world.world_size == 4
    able(job, "a", "b")
    dies(job, "b", local_rank=0, pid=77)
    able(job, "b", workers=(1,))
    able(job, "b")
    until(job, "draining")
    assert job.got("a", Drain)[-1].timeout_s == 5.0, "a boundary was reached in time"


def test_the_time_of_a_drain_for_joining_workers_has_a_bound():
    job = shrunk(timing={"drain_timeout_s": 5.0, "silence_s": 1e6})
    job.machine._state.joining_tries.called_off = 30
    able(job, "a")
    job.passes(1.2, alive="ab")
    assert job.got("a", Drain)[-1].timeout_s == drain.DRAIN_MAX_S


def test_too_few_survivors_restart_at_once_and_are_charged_once():
    job = planned(low=2, high=2)
    dies(job, "a", local_rank=1)
    assert Stop in kinds(job, "a") and Stop in kinds(job, "b")
    assert not job.got("a", Prepare)
    job.stops("a", "b")
    assert job.phase == "running" and job.persisted[-1].restarts_used == 1
    assert not job.assigned["a"].in_place and job.persisted[-1].world.world_size == 4


def test_a_checkpoint_restarts_no_worker():
    job = shrunk(timing={"growth_interval_s": 0.0, "drain_timeout_s": 5.0})
    job.says("b", Checkpointed(job.assigned["b"].fence, "run/last.pt"))
    assert not kinds(job, "b") and job.phase == "running"


def test_a_node_leaves_at_the_boundary_at_which_others_join():
    job = planned(nodes="ab", high=3)
    job.join("c")
    job.passes(0.2, alive="abc")
    able(job, "c")
    job.leaves("b")
    reaches_boundary(job, "a", "b")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(2, 0), 2, (0, 1), 4)
    job.stops("b")
    assert job.got("b", Release)


def test_a_node_leaves_after_the_timeout_without_any_worker_that_joins():
    job = planned(nodes="ab", high=3)
    job.join("c")
    job.passes(0.2, alive="abc")
    able(job, "c")
    job.leaves("b")
    job.marks("a", 7), job.marks("b", 7), job.drains("b")
    job.passes(5.2, alive="abc")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)
    assert not job.got("c", Assign)


def test_a_surplus_node_restarts_as_a_standby_and_is_not_taken_back_after_a_fault():
    job = planned(nodes="ab", high=2, min_workers=1)
    job.handle(Resized(min_nodes=1, max_nodes=1))
    until(job, "draining")
    reaches_boundary(job, "a", "b")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)
    assert Stop in kinds(job, "b")
    dies(job, "a", local_rank=0)
    assert not job.got("b", Assign)
    job.stops("b")
    able(job, "a", workers=(1,))
    job.inbox.clear()
    job.handle(Resized(min_nodes=1, max_nodes=2))
    job.passes(0.2, alive="ab")
    assert job.got("b", Prepare)


def test_workers_displaced_before_there_were_boundaries_start_afresh_once_there_are():
    job = Driver(job_spec(1, 2, 3, min_workers=1, timing=SOON))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able_in_place(job, "a", "b", joining=Joining.NEVER)
    job.handle(Resized(min_nodes=1, max_nodes=1))
    until(job, "draining")
    reaches_boundary(job, "a", "b")
    job.says("a", Heartbeat(fence=Fence(2, 0), met=2))
    job.inbox.clear()
    able(job, "b"), able(job, "a")
    assert kinds(job, "b") == [Stop] and not kinds(job, "a")
    job.handle(Resized(min_nodes=1, max_nodes=2))
    job.passes(2.0, alive="ab")
    assert job.phase == "running" and not job.got("b", Assign)
    job.stops("b")
    assert job.got("b", Prepare)


def test_workers_lost_before_the_loader_was_made_are_replaced_without_a_charge():
    job = Driver(job_spec(1, 3, 0, min_workers=1))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able_in_place(job, "a", "b", joining=Joining.NEVER)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,))
    job.inbox.clear()
    job.passes(1.0, alive="ab")
    assert not job.got("a", Prepare), "a worker of node b has no loader yet"
    able(job, "b")
    assert job.got("a", Prepare) and job.persisted[-1].restarts_used == 0


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_new_coordinator_knows_from_the_agents_that_workers_join_at_boundaries(restarts):
    job = shrunk(restarts=restarts)
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    holds = {"in_place": True, "joining": Joining.PLANNED}
    after.join("a", holding=job.holding("a", able=(1,), **holds), incarnation="1")
    after.join("b", holding=job.holding("b", able=(0, 1), **holds), incarnation="1")
    assert after.phase == "running"
    after.join("c")
    after.passes(0.2, alive="abc")
    assert after.got("c", Prepare)
    dies(after, "b", local_rank=0, pid=55)
    assert after.persisted[-1].world.world_size == 2
    assert bool(after.got("b", Prepare)) == bool(restarts) and after.phase == "running"


def test_a_new_coordinator_calls_off_a_drain_of_the_last_one_that_times_out():
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    holds = {"in_place": True, "joining": Joining.PLANNED, "draining": True, "last_drain": 1}
    after.join("a", holding=job.holding("a", able=(0, 1), **holds), incarnation="1")
    after.join("b", holding=job.holding("b", able=(0, 1), **holds), incarnation="1")
    after.marks("a", 7), after.marks("b", 7), after.drains("a")
    after.passes(5.2, alive="ab")
    assert after.phase == "running" and CallOff in kinds(after, "b")


def test_a_joining_worker_without_a_step_counts_as_a_survivor_after_a_fault():
    """A member of the last world that has made no step is a survivor like the others."""
    job = shrunk()
    able(job, "a")
    job.passes(1.2, alive="ab")
    reaches_boundary(job, "a", "b")
    able(job, "a", "b")
    dies(job, "b", local_rank=1)
    assert regrouped(job, "a") == (Fence(4, 0), 0, (1, 0), 3)
    job.says("a", Heartbeat(fence=Fence(4, 0), met=4))
    assert job.phase == "running"


def test_no_worker_joins_before_any_worker_has_reached_a_boundary():
    job = shrunk()
    able(job, "a")
    assert job.phase == "draining"
    job.marks("a", None), job.marks("b", None)
    assert job.phase == "running" and kinds(job, "a")[-1] is CallOff
    assert not job.got("a", DrainTarget)


def test_a_node_leaves_at_once_if_no_worker_has_reached_a_boundary():
    job = planned(min_workers=1)
    job.leaves("b")
    job.marks("a", None), job.marks("b", None)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)
    assert not job.got("a", DrainTarget), "it would send SIGTERM to workers that catch it"


def asks_restart(job, node_id, local_rank, *earlier):
    """A survivor ends, since the world cannot continue without the lost worker.

    `earlier`: failures of its node that its agent reports again.
    """
    said = "elastane: all workers restart: the worker of rank 0 is lost [in-place-restart]"
    failure = Failure(local_rank=local_rank, rank=1, pid=5, exit_code=75, message=said)
    failures = (*earlier, failure)
    job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=failures))


def used_by_loss_and_restart(job, *survivors):
    """Let the survivors of a loss end, so that all restart; return the restarts used."""
    for node_id, local_rank in survivors:
        asks_restart(job, node_id, local_rank)
    job.passes(20.0, alive="ab")
    job.stops("a", "b")
    job.passes(20.0, alive="ab")
    assert job.phase == "running" and not job.assigned["a"].in_place
    return job.assigned["a"].restarts_used


def test_a_restart_of_all_that_a_lost_worker_makes_necessary_is_charged_once():
    job = planned(min_workers=1)
    dies(job, "a", local_rank=0)
    assert job.persisted[-1].restarts_used == 1, "its replacement"
    assert used_by_loss_and_restart(job, ("a", 1), ("b", 0), ("b", 1)) == 1


def test_the_root_cause_of_a_restart_that_workers_ask_for_begins_with_the_loss():
    job = planned(min_workers=1)
    able_in_place(job, "a", "b", joining=Joining.NEVER)
    dies(job, "a", local_rank=0)
    used_by_loss_and_restart(job, ("a", 1), ("b", 0), ("b", 1))
    [restart] = [event for event in job.events if event.kind is EventKind.RESTART]
    lost, _, asked = restart.data["cause"].partition("; so ")
    assert re.fullmatch(r"worker of rank 0 \(.*\) on node a ended with SIGKILL", lost)
    assert restart.data["cause_rank"] == 0 and restart.data["consequences"] == 3
    assert "ended with exit code 75" in asked and "the worker of rank 0 is lost" in asked


def restarts_after_a_loss(job, lose, *, use=UNUSED):
    """Let an attempt lose worker 0, so that the others ask for a restart; all start again."""
    lose(job)
    for node_id, local_rank in (("a", 1), ("b", 0), ("b", 1)):
        asks_restart(job, node_id, local_rank)
    job.passes(20.0, alive="ab")
    for node_id in "ab":
        job.stops(node_id, use=use)
    job.passes(40.0, alive="ab")
    if job.phase == "running":
        able_in_place(job, "a", "b", joining=Joining.NEVER)
        able(job, "a", "b")


def crashes_as_rank_0(job, steps=20):
    fails_at_a_step(job, "a", 0, pid=7, met=job.assigned["a"].fence.round, steps=steps)


@pytest.mark.parametrize("steps", [0, 20])
def test_a_crash_after_which_all_ask_for_a_restart_ends_the_job_at_the_third_time(steps):
    job = planned(min_workers=1, restarts=100)
    for attempt in range(SAME_CRASHES_MAX):
        assert job.persisted[-1].outcome is None, attempt
        restarts_after_a_loss(job, lambda job: crashes_as_rank_0(job, steps))
    outcome = job.persisted[-1].outcome
    assert "3 attempts in a row failed" in outcome.reason and "a bad sample" in outcome.reason
    assert "a bad sample" in outcome.cause.what and outcome.restarts_used == SAME_CRASHES_MAX


@pytest.mark.parametrize(
    ("lose", "use"),
    [
        (lambda job: dies(job, "a"), UNUSED),
        (crashes_as_rank_0, CheckpointUse(read=True, written=True)),
        (lambda job: crashes_as_rank_0(job, steps=len(job.persisted)), UNUSED),
    ],
    ids=["killed-from-outside", "from-a-newer-checkpoint", "at-other-steps"],
)
def test_losses_that_another_attempt_may_do_without_do_not_end_a_job_that_restarts(lose, use):
    job = planned(min_workers=1, restarts=100)
    for _ in range(2 * SAME_CRASHES_MAX):
        restarts_after_a_loss(job, lose, use=use)
    assert job.phase == "running" and job.persisted[-1].outcome is None


def test_a_charged_replacement_in_each_attempt_does_not_hide_that_all_crash_alike():
    job = planned(min_workers=1, restarts=100)
    for attempt in range(SAME_CRASHES_MAX):
        assert job.persisted[-1].outcome is None, attempt
        met = job.assigned["a"].fence.round
        for node_id, local_rank in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
            fails_at_a_step(job, node_id, local_rank, pid=7 + local_rank, met=met)
        job.passes(1.0, alive="ab")
        job.stops("a", "b")
        job.passes(40.0, alive="ab")
        if job.phase == "running":
            able_in_place(job, "a", "b", joining=Joining.NEVER)
            able(job, "a", "b")
    assert "3 attempts in a row failed after 20 steps" in job.persisted[-1].outcome.reason


def test_a_charged_standby_is_not_charged_again_with_a_restart_that_all_ask_for():
    job = shrunk(low=2, restarts=9)
    dies(job, "a", local_rank=0, pid=4243)
    assert job.persisted[-1].restarts_used == 2, "a member, and the standby in its place"
    asks_restart(job, "b", 0), asks_restart(job, "b", 1)
    assert Stop in kinds(job, "a"), "too few are left"
    standby = Failure(local_rank=0, rank=0, pid=4243, exit_code=-9)
    asks_restart(job, "a", 1, standby)
    job.stops("a", "b")
    job.passes(20.0, alive="ab")
    assert job.phase == "running" and job.persisted[-1].restarts_used == 2


def test_a_restart_of_all_is_charged_if_the_loss_was_not():
    job = planned(min_workers=1)
    able_in_place(job, "a", "b", joining=Joining.NEVER)
    dies(job, "a", local_rank=0)
    assert job.persisted[-1].restarts_used == 0, "the world shrinks"
    assert used_by_loss_and_restart(job, ("a", 1), ("b", 0), ("b", 1)) == 1


@pytest.mark.parametrize("moved", [False, True], ids=["one-coordinator", "the-next-coordinator"])
def test_a_restart_of_all_that_a_lost_node_makes_necessary_costs_nothing(moved):
    job = planned(nodes="abc", restarts=0)
    job.breaks("c")
    job.passes(0.2, alive="ab")
    if moved:
        before, job = job, successor(job)
        for node_id in "ab":
            job.join(node_id, holding=holding(before, node_id))
    survivors = [(node_id, local_rank) for node_id in "ab" for local_rank in (0, 1)]
    assert used_by_loss_and_restart(job, *survivors) == 0


def test_a_restart_of_all_that_a_leave_makes_necessary_costs_nothing():
    job = planned(nodes="abc", restarts=0)
    job.leaves("c")
    reaches_boundary(job, "a", "b", "c")
    assert job.assigned["a"].fence == Fence(2, 0)
    survivors = [(node_id, local_rank) for node_id in "ab" for local_rank in (0, 1)]
    assert used_by_loss_and_restart(job, *survivors) == 0


def test_a_restart_of_all_after_a_leave_that_not_all_reached_in_time_costs_nothing():
    job = planned(nodes="abc", restarts=0, timing=SOON)
    job.leaves("c")
    job.passes(6.0, alive="abc")
    assert job.assigned["a"].fence == Fence(2, 0)
    survivors = [(node_id, local_rank) for node_id in "ab" for local_rank in (0, 1)]
    assert used_by_loss_and_restart(job, *survivors) == 0
