"""Shrink-only worlds: only survivors enter the next one; at a checkpoint all restart and grow."""

from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, kinds, regrouped
from test_restarts import crash

from elastane.coordinator.rules import growth
from elastane.coordinator.rules.incident import SAME_CRASHES_MAX
from elastane.errors import ExitCode
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Assign,
    CallOff,
    Checkpointed,
    Drain,
    DrainTarget,
    Failed,
    Interrupt,
    Prepare,
    Stop,
)
from elastane.protocol.model import UNUSED, Failure, Fence, Joining


def shrinking(low=1, high=3, nodes="ab", restarts=3, **more):
    """A running world of nodes with two workers each, of an unmodified script."""
    job = Driver(job_spec(low, high, restarts, **more))
    for node_id in nodes:
        job.join(node_id)
    job.passes(4.0, alive=nodes)
    able(job, *nodes, joining=Joining.NEVER)
    job.inbox.clear()
    return job


def test_survivors_alone_form_the_next_world_and_no_worker_is_replaced():
    job = shrinking(min_workers=1)
    dies(job, "a", local_rank=0)
    assert kinds(job, "a") == kinds(job, "b") == [Interrupt, Assign]
    assert regrouped(job, "a") == (Fence(2, 0), 0, (1,), 3)
    assert regrouped(job, "b") == (Fence(2, 0), 1, (0, 1), 3)


def test_a_world_that_shrinks_uses_no_restart_and_says_what_is_missing():
    job = shrinking(min_workers=1, restarts=0)
    dies(job, "a", local_rank=0)
    assert job.persisted[-1].world.fence == Fence(2, 0)
    assert job.persisted[-1].restarts_used == 0
    job.meets("a", "b")
    assert reasons(job, EventKind.WAITING)[0] == "continues with 3 of 4 workers"


def test_a_world_that_shrinks_says_that_it_continues_once_all_its_workers_have_agreed_to():
    job = shrinking(min_workers=1)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    job.meets("a")
    assert not reasons(job, EventKind.WAITING)
    ended = Failure(local_rank=0, rank=1, pid=4244, exit_code=ExitCode.TRY_AGAIN)
    job.says("b", Failed(fence=job.assigned["b"].fence, failures=(ended,)))
    job.stops("a", "b")
    assert job.ranks() == ["a", "b"] and not job.assigned["a"].in_place
    job.passes(2.0, alive="ab")
    assert not reasons(job, EventKind.WAITING)


def test_a_worker_that_was_left_out_does_not_come_back_in_place():
    job = shrinking(min_workers=1)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(0, 1), joining=Joining.NEVER), able(job, "b", joining=Joining.NEVER)
    dies(job, "b", local_rank=1)
    assert regrouped(job, "a")[1:] == (0, (1,), 2) and regrouped(job, "b")[1:] == (1, (0,), 2)


def test_a_node_that_arrives_gets_no_standby():
    job = shrinking(min_workers=1)
    job.join("c")
    job.passes(5.0, alive="abc")
    assert Prepare not in kinds(job, "c") and job.machine.phase == "running"


def test_the_latest_report_of_each_node_says_whether_others_can_join():
    job = shrinking(min_workers=1)
    job.join("c")
    able(job, "a", joining=Joining.ANYTIME)
    job.passes(0.2, alive="abc")
    assert Prepare not in kinds(job, "c")
    able(job, "b", joining=Joining.ANYTIME)
    assert Prepare in kinds(job, "c")


def test_too_few_survivors_restart_at_once():
    job = shrinking(low=2, high=2)
    dies(job, "a", local_rank=1)
    assert Stop in kinds(job, "a") and Stop in kinds(job, "b")
    assert Prepare not in kinds(job, "a")
    job.stops("a", "b")
    restart = [one for one in job.events if one.kind is EventKind.RESTART][-1]
    assert restart.reason.endswith(
        "3 workers of at least 4 left; a smaller --min-workers lets them continue"
    )


def test_workers_that_crash_one_after_the_other_before_a_step_are_one_crash_of_the_script():
    job = shrinking(low=1, high=1, nodes="a", min_workers=1, restarts=100)
    for attempt in range(SAME_CRASHES_MAX):
        assert job.persisted[-1].outcome is None
        # The text names the rank, and another worker is the last one in each attempt.
        for local_rank in ((0, 1), (1, 0))[attempt % 2]:
            crashed = crash(f"ValueError: of rank {local_rank}", local_rank=local_rank)
            job.says("a", Failed(fence=job.assigned["a"].fence, failures=(crashed,)))
        job.stops("a")
        job.passes(1.0, alive="a")
        if attempt < SAME_CRASHES_MAX - 1:
            able(job, "a", joining=Joining.NEVER)
    assert "3 attempts in a row" in job.persisted[-1].outcome.reason
    assert job.persisted[-1].restarts_used == SAME_CRASHES_MAX - 1


def test_a_crash_on_two_nodes_is_the_same_on_whichever_of_them_the_last_worker_is():
    job = shrinking(low=1, high=2, nodes="ab", min_workers=1, restarts=100)
    for attempt in range(SAME_CRASHES_MAX):
        assert job.persisted[-1].outcome is None
        for node_id in ("ab", "ba")[attempt % 2]:
            for local_rank in (0, 1):
                crashed = crash(local_rank=local_rank, steps=5)
                job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(crashed,)))
                job.passes(10.0, alive="ab")
        job.stops("a", "b", use=UNUSED)
        job.passes(20.0, alive="ab")
        if attempt < SAME_CRASHES_MAX - 1:
            able(job, "a", "b", joining=Joining.NEVER)
    assert "3 attempts in a row failed after 5 steps" in job.persisted[-1].outcome.reason


def shrunk(**more):
    """Return a world that has just lost one of its four workers."""
    job = shrinking(min_workers=1, **more)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    job.meets("a", "b")
    job.inbox.clear()
    return job


def checkpoints(job, node_id="b", where="run/last.pt", *, resumed=True):
    job.says(node_id, Checkpointed(job.assigned[node_id].fence, where, resumed))


def reaches_boundary(job, *node_ids, calls=7):
    for node_id in node_ids:
        job.marks(node_id, calls)
    for node_id in node_ids:
        job.drains(node_id)


def reasons(job, kind):
    return [event.reason for event in job.events if event.kind == kind]


SOON = {"timing": {"growth_interval_s": 0.0}}


def test_a_checkpoint_of_a_world_that_shrank_shows_that_its_workers_agreed_to_continue():
    job = shrinking(min_workers=1, **SOON)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    checkpoints(job)
    assert reasons(job, EventKind.WAITING)[0] == "continues with 3 of 4 workers"
    assert job.phase == "draining"


def test_a_checkpoint_lets_all_workers_restart_with_those_that_wait():
    job = shrunk(restarts=0, **SOON)
    job.passes(3.0, alive="ab")
    checkpoints(job)
    reaches_boundary(job, "a", "b")
    assert job.got("a", DrainTarget) == [
        DrainTarget(fence=Fence(2, 0), drain=1, calls=8, stops=True)
    ]
    assert Stop in kinds(job, "a") and Stop in kinds(job, "b")
    job.stops("a", "b")
    assert job.phase == "running" and job.persisted[-1].world.world_size == 4
    assert not job.assigned["a"].in_place and job.persisted[-1].restarts_used == 0
    [event] = [event for event in job.events if event.kind == EventKind.GROWTH]
    assert event.data["checkpoint"] == "run/last.pt" and event.data["workers"] == 1
    assert event.data["nodes"] == "a" and 2.9 < event.data["waited_s"] < 3.2


def grown():
    """Return a world that lost a worker, grew again, and has lost another worker since."""
    job = shrunk(restarts=3, **SOON)
    checkpoints(job, resumed=False)
    reaches_boundary(job, "a", "b")
    job.stops("a", "b")
    for node_id in "ab":
        able(job, node_id, joining=Joining.NEVER)
    job.inbox.clear()
    job.passes(growth.LASTS_S, alive="ab")
    return job


def loses_another(job):
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    job.meets("a", "b")
    job.inbox.clear()


def test_a_world_whose_script_read_no_checkpoint_after_a_growth_does_not_grow_again():
    job = grown()
    checkpoints(job, where="run/epoch-1.pt", resumed=False)
    [reason] = reasons(job, EventKind.NOT_RESUMED)
    assert reason.startswith("the script wrote run/epoch-1.pt and had read no checkpoint")
    loses_another(job)
    for _ in range(3):
        checkpoints(job, resumed=False)
        job.passes(growth.PAUSE_MAX_S, alive="ab")
    assert DrainTarget not in kinds(job, "a") and len(reasons(job, EventKind.NOT_RESUMED)) == 1
    assert "since the script does not resume" in reasons(job, EventKind.WAITING)[-1]


def test_a_script_that_read_a_checkpoint_grows_again():
    job = grown()
    checkpoints(job, resumed=True)
    loses_another(job)
    checkpoints(
        job, node_id="a", resumed=False
    )  # by another worker, which the first one gave its state
    reaches_boundary(job, "a", "b")
    assert DrainTarget in kinds(job, "a") and not reasons(job, EventKind.NOT_RESUMED)


def test_the_first_checkpoint_of_a_script_needs_no_other_before_it():
    job = shrunk(**SOON)
    for _ in range(3):
        checkpoints(job, resumed=False)
    assert not reasons(job, EventKind.NOT_RESUMED)


def test_a_job_of_fixed_size_without_restarts_does_not_grow_since_its_script_may_not_resume():
    job = shrinking(2, 2, min_workers=1, restarts=0, **SOON)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,), joining=Joining.NEVER), able(job, "b", joining=Joining.NEVER)
    checkpoints(job)
    for _ in range(3):
        job.passes(growth.QUIET_S, alive="ab")
    assert not reasons(job, EventKind.GROWTH)
    waiting = [each for each in reasons(job, EventKind.WAITING) if "could run on" in each]
    assert len(waiting) == 1 and "add --max-restarts N" in waiting[0], waiting
    assert not [each for each in reasons(job, EventKind.WAITING) if "no checkpoint" in each]


def test_a_waiting_node_joins_at_a_checkpoint():
    job = shrinking(min_workers=1, **SOON)
    job.join("c")
    job.passes(5.0, alive="abc")
    assert "2 more workers could run on c" in reasons(job, EventKind.WAITING)[-1]
    checkpoints(job)
    reaches_boundary(job, "a", "b")
    job.stops("a", "b")
    assert job.ranks() == ["a", "b", "c"] and job.persisted[-1].restarts_used == 0


def test_without_waiting_capacity_a_checkpoint_changes_nothing_also_not_later():
    job = shrinking(min_workers=1, **SOON)
    checkpoints(job)
    assert not kinds(job, "a")
    dies(job, "a", local_rank=0)  # Its place waits for the next checkpoint, not the last one.
    assert job.phase == "running" and Drain not in kinds(job, "b")


def test_a_checkpoint_of_an_older_world_is_ignored():
    job = shrunk(**SOON)
    job.says("b", Checkpointed(Fence(1, 0), "run/last.pt"))
    assert not kinds(job, "b")


def test_workers_do_not_restart_again_before_the_interval_has_passed():
    job = shrunk(timing={"growth_interval_s": 60.0})
    assert "at the earliest" in reasons(job, EventKind.WAITING)[-1]
    job.passes(30.0, alive="ab")
    checkpoints(job)
    assert job.phase == "running"
    job.passes(40.0, alive="ab")
    assert job.phase == "running"  # It is not made up for: the next checkpoint counts.
    checkpoints(job)
    assert job.phase == "draining"


def test_a_node_that_comes_and_goes_before_the_checkpoint_changes_nothing():
    job = shrinking(min_workers=1, **SOON)
    job.join("c")
    job.passes(2.0, alive="abc")
    job.breaks("c")
    job.passes(2.0, alive="ab")
    checkpoints(job)
    assert not kinds(job, "a") and not kinds(job, "b")


def test_a_worker_lost_on_the_way_to_the_boundary_shrinks_the_world_again():
    job = shrunk(**SOON)
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7)
    dies(job, "b", local_rank=1)
    assert regrouped(job, "a")[1:] == (0, (1,), 2) and regrouped(job, "b")[1:] == (1, (0,), 2)
    assert Stop not in kinds(job, "a") and job.persisted[-1].restarts_used == 0
    able(job, "b", workers=(0,), joining=Joining.NEVER)
    checkpoints(job)
    reaches_boundary(job, "a", "b")
    job.stops("a", "b")
    assert job.persisted[-1].world.world_size == 4


def test_workers_that_reach_no_boundary_continue_until_a_later_checkpoint():
    job = shrunk(timing={"growth_interval_s": 0.0, "drain_timeout_s": 5.0})
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(6.0, alive="ab")
    assert job.phase == "running" and Stop not in kinds(job, "a")
    assert kinds(job, "a")[-1] is CallOff and kinds(job, "b")[-1] is CallOff
    assert "b reached no step boundary within 5 s" in reasons(job, EventKind.DRAIN_ENDED)[-1]
    checkpoints(job)
    assert job.phase == "draining"


def test_an_agent_without_a_session_learns_later_that_the_drain_was_called_off():
    job = shrunk(timing={"growth_interval_s": 0.0, "drain_timeout_s": 5.0, "silence_s": 60.0})
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(4.99, alive="ab")
    job.breaks("a")
    job.passes(0.02, alive="b")
    job.inbox.clear()
    job.join("a", holding=job.holding("a", draining=True, able=(1,), joining=Joining.NEVER))
    assert CallOff in kinds(job, "a")


def test_a_script_without_checkpoints_gets_one_warning():
    job = shrunk(**SOON)
    for _ in range(3):
        job.passes(growth.QUIET_S, alive="ab")
    told = [why for why in reasons(job, EventKind.WAITING) if why.startswith("no checkpoint")]
    assert len(told) == 1 and job.phase == "running"


def test_workers_that_finish_do_not_restart_for_growth():
    job = shrunk(**SOON)
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7)
    (
        able(job, "a", workers=(), joining=Joining.NEVER),
        able(job, "b", workers=(), joining=Joining.NEVER),
    )
    assert job.phase == "running" and Stop not in kinds(job, "a")


def test_a_node_leaves_at_a_boundary_and_no_other_node_restarts():
    job = shrinking(min_workers=1)
    job.leaves("b")
    reaches_boundary(job, "a", "b")
    assert job.got("a", DrainTarget) == [DrainTarget(fence=Fence(1, 0), drain=1, calls=8)]
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2) and Stop not in kinds(job, "a")


def test_workers_that_all_leave_get_sigterm_since_they_know_no_step_to_save_at():
    job = shrinking(min_workers=1)
    job.leaves("a"), job.leaves("b")
    job.marks("a", 7), job.marks("b", 7)
    assert job.got("a", DrainTarget)[-1] == DrainTarget(
        fence=Fence(1, 0), drain=1, calls=None, stops=True
    )


def taken_over(job, **holdings):
    """Let a new coordinator take over from the record, and the agents register again."""
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    for node_id, holding in holdings.items():
        after.join(node_id, holding=holding, incarnation="1")
    return after


def test_a_new_coordinator_charges_no_death_that_its_world_had_survived():
    job = shrunk(restarts=2)
    died = Failure(local_rank=0, rank=0, pid=4242, exit_code=-9, age_s=5.0)
    after = taken_over(
        job,
        a=job.holding("a", able=(1,), in_place=True, joining=Joining.NEVER, failures=(died,)),
        b=job.holding("b", able=(0, 1), in_place=True, joining=Joining.NEVER),
    )
    assert after.phase == "running" and after.persisted[-1].restarts_used == 0
    assert not after.got("a", Prepare), "a worker could join no world of these"


def test_a_worker_without_a_place_ends_at_no_cost():
    job = shrunk(restarts=2)
    dies(job, "a", local_rank=0, pid=4343)
    assert job.phase == "running" and job.persisted[-1].restarts_used == 0
    assert Prepare not in kinds(job, "a")


def grows(job, wait_s=0.0, lost=0):
    """Let all workers restart at a checkpoint after a worker of node a was lost."""
    dies(job, "a", local_rank=0, pid=5000 + lost)
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    job.meets("a", "b")
    job.passes(wait_s, alive="ab")
    checkpoints(job)
    if job.phase != "draining":
        return False
    reaches_boundary(job, "a", "b")
    job.stops("a", "b")
    assert job.phase == "running" and not job.assigned["a"].in_place
    able(job, "a", "b", joining=Joining.NEVER)
    return True


def test_the_pause_before_a_growth_doubles_while_faults_follow_each_one_soon():
    job = shrinking(min_workers=1, timing={"growth_interval_s": 10.0})
    job.passes(10.0, alive="ab")
    assert grows(job, lost=1)
    assert not grows(job, 19.0, lost=2)  # The growth of before has failed.
    job.passes(2.0, alive="ab")
    checkpoints(job)
    reaches_boundary(job, "a", "b")
    job.stops("a", "b")
    able(job, "a", "b", joining=Joining.NEVER)
    assert not grows(job, 38.0, lost=3)
    job.passes(3.0, alive="ab")
    checkpoints(job)
    assert job.phase == "draining"


def test_a_growth_that_holds_ends_the_pauses():
    job = shrinking(min_workers=1, timing={"growth_interval_s": 10.0})
    job.passes(10.0, alive="ab")
    assert grows(job, lost=1) and grows(job, 21.0, lost=2)
    job.passes(growth.LASTS_S, alive="ab")
    assert grows(job, lost=3) and grows(job, growth.LASTS_S / 2, lost=4)


def test_a_pause_after_failed_growths_has_a_bound():
    job = shrinking(min_workers=1, timing={"growth_interval_s": 3000.0, "silence_s": 1e6})
    job.now_s += 3000.0
    assert grows(job, lost=1)
    dies(job, "a", local_rank=0, pid=5002)  # A growth that failed; twice the interval is too long.
    able(job, "a", workers=(1,), joining=Joining.NEVER)
    job.meets("a", "b")
    job.now_s += growth.PAUSE_MAX_S - 1.0
    checkpoints(job)
    assert job.phase == "running"
    job.now_s += 2.0
    checkpoints(job)
    assert job.phase == "draining"


def test_a_planned_departure_after_a_growth_is_no_failed_growth():
    job = shrinking(nodes="ab", min_workers=1, timing={"growth_interval_s": 10.0})
    job.passes(10.0, alive="ab")
    assert grows(job, lost=1)
    job.leaves("b")
    reaches_boundary(job, "a", "b")
    able(job, "a", joining=Joining.NEVER)
    job.stops("b"), job.join("b", incarnation="2"), job.warms("b")
    job.passes(10.5, alive="ab")
    checkpoints(job, "a")
    assert job.phase == "draining"


def test_a_drain_for_growth_gets_twice_the_time_after_each_that_was_called_off():
    job = shrunk(timing={"growth_interval_s": 0.0, "drain_timeout_s": 5.0})
    for limit_s in (5.0, 10.0, 20.0):
        checkpoints(job)
        assert job.got("a", Drain)[-1].timeout_s == limit_s
        job.marks("a", 7), job.marks("b", 7), job.drains("a")
        job.passes(limit_s - 0.2, alive="ab")
        assert job.phase == "draining"
        job.passes(0.4, alive="ab")
        assert job.phase == "running"
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(30.0, alive="ab")
    job.drains("b")
    job.stops("a", "b")
    assert job.persisted[-1].world.world_size == 4
    able(job, "a", "b", joining=Joining.NEVER)
    dies(job, "a", local_rank=0, pid=4244)
    job.passes(3.0, alive="ab")
    checkpoints(job)
    assert job.got("a", Drain)[-1].timeout_s == 5.0, "all workers have started since"


def test_a_node_that_leaves_does_not_wait_for_a_long_drain_of_a_growth():
    job = shrunk(timing={"growth_interval_s": 0.0, "drain_timeout_s": 5.0})
    checkpoints(job)
    job.marks("a", 7), job.marks("b", 7), job.drains("a")
    job.passes(5.1, alive="ab")
    checkpoints(job)
    job.marks("a", 9), job.marks("b", 9), job.drains("a")
    job.passes(6.0, alive="ab")
    assert job.phase == "draining"
    job.leaves("b")
    assert [type(m) for m in job.inbox["b"] if isinstance(m, CallOff | Drain)][-2:] == [
        CallOff,
        Drain,
    ]
    assert job.got("b", Drain)[-1].timeout_s == 5.0


def test_a_drain_before_all_workers_have_joined_aims_at_the_step_of_those_who_have():
    job = Driver(job_spec(1, 3, 3, min_workers=1))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able(job, "a", joining=Joining.NEVER)
    job.leaves("b")
    job.marks("a", 1), job.marks("b", None)
    assert job.got("a", DrainTarget) == [
        DrainTarget(fence=Fence(1, 0), drain=1, calls=2, stops=True)
    ]
    assert job.got("b", DrainTarget) == job.got("a", DrainTarget)
