"""Recovery in place: survivors get another world, and no worker is stopped."""

import pytest
from coordinator_driver import Driver, job_spec

from elastane.coordinator.rules import MembershipPhase
from elastane.coordinator.rules.incident import SAME_CRASHES_MAX
from elastane.coordinator.rules.recovery import STALLS_MAX
from elastane.protocol.limits import BACKOFF_FIRST_S, LOST_PEER_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    Alive,
    Assign,
    Close,
    Drain,
    DrainTarget,
    Failed,
    Heartbeat,
    Holding,
    Interrupt,
    Lost,
    Prepare,
    Release,
    Stop,
    Stopped,
)
from elastane.protocol.model import Failure, Fence, PortOffer, WaitPoint


def able(job, *node_ids, workers=(0, 1), **more):
    for node_id in node_ids:
        fence = job.assigned[node_id].fence if node_id in job.assigned else None
        offer = PortOffer(8000, True)
        job.says(node_id, Able(workers=workers, offer=offer, fence=fence, **more))


def in_place(low=1, high=3, nodes="ab", restarts=3, **more):
    """A running world of nodes with two workers each, all of which recover in place."""
    job = Driver(job_spec(low, high, restarts, **more))
    for node_id in nodes:
        job.join(node_id)
    job.passes(4.0, alive=nodes)
    able(job, *nodes)
    job.inbox.clear()
    return job


def dies(job, node_id, local_rank=0, pid=4242):
    failure = Failure(local_rank=local_rank, rank=0, pid=pid, exit_code=-9)
    return job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(failure,)))


def kinds(job, node_id):
    return [type(m) for m in job.inbox.get(node_id, []) if not isinstance(m, Alive)]


def regrouped(job, node_id):
    given = job.assigned[node_id]
    return given.fence, given.rank_base, given.workers, given.world_size


def test_a_lost_worker_interrupts_the_others_and_stops_none():
    job = in_place(min_workers=1)
    dies(job, "a", local_rank=0)
    assert kinds(job, "b") == [Interrupt, Assign]
    assert kinds(job, "a") == [Interrupt, Prepare, Assign]
    assert regrouped(job, "a") == (Fence(2, 0), 0, (1,), 3)
    assert regrouped(job, "b") == (Fence(2, 0), 1, (0, 1), 3)
    assert job.assigned["a"].in_place and not job.assigned["a"].waiting
    assert job.persisted[-1].restarts_used == 1
    assert job.persisted[-1].world.fence == Fence(2, 0)


def test_its_replacement_joins_at_a_step_boundary_after_all_survivors():
    job = in_place(min_workers=1)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(1,))
    job.inbox.clear()
    able(job, "a", workers=(0, 1))
    job.passes(1.2, alive="ab")
    assert kinds(job, "b") == [Drain]
    job.marks("a", 10), job.marks("b", 12)
    assert [m.calls for m in job.inbox["b"] if isinstance(m, DrainTarget)] == [13]
    job.drains("a"), job.drains("b")
    assert regrouped(job, "a") == (Fence(3, 0), 0, (1, 0), 4)
    assert regrouped(job, "b") == (Fence(3, 0), 2, (0, 1), 4)
    assert Stop not in kinds(job, "a") + kinds(job, "b")
    assert job.persisted[-1].restarts_used == 1


def test_a_node_with_only_new_workers_comes_after_survivors():
    job = in_place(low=1, high=2, nodes="ab")
    dies(job, "a", 0, 1), able(job, "a", workers=(1,)), able(job, "b")
    dies(job, "a", 1, 2)
    assert regrouped(job, "b")[1:] == (0, (0, 1), 2)
    able(job, "b"), able(job, "a")
    job.passes(1.2, alive="ab")
    job.marks("b", 5), job.drains("b")
    assert job.assigned["b"].rank_base == 0 and job.assigned["a"].rank_base == 2


def test_a_job_of_fixed_size_waits_in_memory_for_the_replacement():
    job = in_place(low=2, high=2)
    dies(job, "a", local_rank=1)
    assert kinds(job, "b") == [Interrupt] and kinds(job, "a") == [Interrupt, Prepare]
    assert job.machine.phase == "regrouping"
    job.passes(5.0, alive="ab")
    able(job, "a", workers=(0,))
    assert kinds(job, "b") == [Interrupt]
    able(job, "a", workers=(0, 1))
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)


def test_a_departed_node_is_left_behind_and_costs_no_restart():
    job = in_place(nodes="abc")
    job.breaks("a")
    job.passes(0.2, alive="bc")
    assert regrouped(job, "b") == (Fence(2, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(2, 0), 2, (0, 1), 4)
    assert job.persisted[-1].restarts_used == 0


@pytest.mark.parametrize("comes", ["b", "c"])
def test_a_job_of_fixed_size_replaces_a_departed_node(comes):
    job = in_place(low=2, high=2)
    job.breaks("b")
    job.passes(1.0, alive="a")
    assert job.machine.phase == "regrouping"
    job.join(comes)
    assert kinds(job, comes)[-1] is Prepare
    able(job, "a"), able(job, comes)
    job.passes(0.2, alive=["a", comes])
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)
    assert regrouped(job, comes) == (Fence(2, 0), 2, (0, 1), 4)


def test_an_arriving_node_prepares_and_then_joins():
    job = in_place(nodes="ab")
    job.join("c")
    assert kinds(job, "c")[-1] is Prepare and job.inbox["c"][-1].assignment.waiting
    job.passes(5.0, alive="abc")
    assert kinds(job, "a") == []
    job.inbox.clear()
    able(job, "c")
    job.passes(1.2, alive="abc")
    assert Drain in kinds(job, "a") and Drain in kinds(job, "b") and Drain not in kinds(job, "c")
    for node_id in "ab":
        job.marks(node_id, 3)
    job.drains("a"), job.drains("b")
    assert regrouped(job, "c") == (Fence(2, 0), 4, (0, 1), 6)


def test_workers_of_an_arriving_node_join_together():
    job = in_place(nodes="ab")
    job.join("c")
    able(job, "c", workers=(1,))
    job.inbox.clear()
    job.passes(4.0, alive="abc")
    assert kinds(job, "a") == [] and kinds(job, "b") == []
    able(job, "c")
    job.passes(1.2, alive="abc")
    assert kinds(job, "a") == kinds(job, "b") == [Drain]


@pytest.mark.parametrize("why", ["late", "lost, and nobody follows it"])
def test_workers_of_an_arriving_node_wait_for_each_other_only_so_long(why):
    job = in_place(nodes="ab", restarts=3 if why == "late" else 0)
    job.join("c")
    able(job, "c", workers=(1,))
    job.assigned["c"] = job.assigned["a"]
    if why != "late":
        dies(job, "c", local_rank=0)
    job.inbox.clear()
    job.passes(4.5 if why == "late" else 0.5, alive="abc")
    assert kinds(job, "a") == []
    job.passes(1.0, alive="abc")
    assert kinds(job, "a") == [Drain]


def test_a_standby_that_dies_interrupts_nothing_and_is_charged():
    job = in_place(nodes="ab")
    job.join("c")
    job.inbox.clear()
    job.assigned["c"] = job.assigned["a"]
    dies(job, "c", pid=77)
    assert kinds(job, "a") == kinds(job, "b") == [] and kinds(job, "c") == [Prepare]
    assert job.persisted[-1].restarts_used == 1
    dies(job, "c", pid=77)
    assert job.persisted[-1].restarts_used == 1, "it was told twice"


def replacements(job):
    """Return the logged replacements that used the budget, each with its data."""
    paid = (EventKind.REPLACEMENT, EventKind.RESTART)
    return [(event.kind, event.data) for event in job.events if event.kind in paid]


def test_a_replacement_is_logged_as_such_and_a_joining_worker_without_a_rank():
    job = in_place(nodes="ab")
    dies(job, "a", local_rank=1)
    job.join("c")
    job.assigned["c"] = job.assigned["b"]
    dies(job, "c", pid=77)
    (first, of_member), (second, of_joiner) = replacements(job)
    assert first is second is EventKind.REPLACEMENT
    assert of_member["cause_rank"] == 0 and "worker of rank 0" in of_member["cause"]
    assert "cause_rank" not in of_joiner and "worker without a rank" in of_joiner["cause"]


def test_a_replacement_after_a_pause_against_a_crash_loop_says_so():
    job = in_place(nodes="ab")
    for pid in (77, 78):
        job.inbox.clear()
        dies(job, "a", local_rank=1, pid=pid)
        (prepare,) = job.got("a", Prepare)
    assert prepare.delay_s == BACKOFF_FIRST_S
    reasons = [e.reason for e in job.events if e.kind is EventKind.REPLACEMENT]
    assert ["pause of 0.5 s" in reason for reason in reasons] == [False, True]


def test_joining_workers_that_crash_at_one_line_do_not_end_a_training_job():
    job = in_place(nodes="ab", restarts=9)
    job.join("c")
    job.assigned["c"] = job.assigned["a"]
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad\n'
    for pid in range(SAME_CRASHES_MAX + 2):
        crash = Failure(
            local_rank=0, rank=0, pid=70 + pid, exit_code=1, message=trace, error_file="error.json"
        )
        job.says("c", Failed(fence=job.assigned["c"].fence, failures=(crash,)))
    assert len(replacements(job)) == SAME_CRASHES_MAX + 2
    assert job.machine.phase == "running"


def test_a_node_leaves_at_a_step_boundary_and_is_released():
    job = in_place(nodes="abc")
    job.leaves("b")
    for node_id in "abc":
        job.marks(node_id, 7)
    for node_id in "abc":
        job.drains(node_id)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(2, 0), 2, (0, 1), 4)
    assert kinds(job, "b")[-1] is Stop
    job.stops("b")
    assert kinds(job, "b")[-1] is Release
    assert job.machine.phase == "running" and job.persisted[-1].restarts_used == 0


def test_without_survivors_all_workers_restart():
    job = in_place(low=1, high=1, nodes="a")
    dies(job, "a", 0, 1)
    assert kinds(job, "a") == [Interrupt, Prepare]
    dies(job, "a", 1, 2)
    assert kinds(job, "a")[-1] is Stop
    job.stops("a")
    assert job.assigned["a"].fence == Fence(1, 1) and not job.assigned["a"].in_place
    assert job.persisted[-1].restarts_used == 1


def test_a_budget_that_is_used_up_ends_the_job_with_the_cause():
    job = in_place(restarts=0, min_workers=1)
    dies(job, "a")
    job.passes(0.5, alive="ab")
    assert kinds(job, "b")[-1] is Close
    assert job.got("b", Close)[-1].outcome.slug == "worker-failed"
    assert job.persisted[-1].restarts_used == 0


def test_a_standby_without_budget_is_not_replaced_and_the_others_continue():
    job = in_place(restarts=1, min_workers=1)
    dies(job, "a", 0, 1)
    job.inbox.clear()
    dies(job, "a", 0, 2)
    assert kinds(job, "a") == kinds(job, "b") == []
    assert [n.kind for n in job.events][-1] is EventKind.WAITING
    assert job.machine.phase == "running"


def test_waiting_for_a_replacement_without_budget_ends_the_job():
    job = in_place(low=2, high=2, restarts=1)
    dies(job, "a", 0, 1)
    dies(job, "a", 0, 2)
    assert kinds(job, "b")[-1] is Close


def test_an_unexplained_lost_peer_ends_the_world_after_a_timeout():
    job = in_place(nodes="ab")
    job.says("a", Lost(fence=Fence(1, 0), reason="lost a peer: reset"))
    job.passes(LOST_PEER_S - 0.2, alive="ab")
    assert kinds(job, "b") == []
    job.passes(0.4, alive="ab")
    assert regrouped(job, "b") == (Fence(2, 0), 2, (0, 1), 4)
    assert job.persisted[-1].restarts_used == 0
    job.says("a", Lost(fence=Fence(1, 0), reason="late"))
    job.passes(2.0, alive="ab")
    assert job.assigned["b"].fence == Fence(2, 0)


def test_a_fault_in_a_drain_for_an_arrival_recovers_in_place():
    job = in_place(nodes="ab", min_workers=1)
    job.join("c")
    able(job, "c")
    job.passes(1.2, alive="abc")
    dies(job, "a", 1)
    assert regrouped(job, "a")[2] == (0,)
    assert job.assigned["c"].in_place, "it is ready, and is taken in at once"
    assert Stop not in kinds(job, "b")


def test_a_second_fault_while_waiting_is_the_same_incident():
    job = in_place(low=2, high=2)
    dies(job, "a", 0, 1)
    dies(job, "b", 1, 2)
    assert job.persisted[-1].restarts_used == 1
    assert kinds(job, "b")[-1] is Prepare
    able(job, "a")
    assert Assign not in kinds(job, "b")
    able(job, "b")
    assert regrouped(job, "b") == (Fence(2, 0), 2, (0, 1), 4)


def test_workers_that_cannot_all_recover_in_place_are_restarted():
    job = Driver(job_spec(1, 3, 3))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able(job, "a")
    dies(job, "b")
    assert kinds(job, "a")[-1] is Stop


@pytest.mark.parametrize("workers", [(9,), (0, 5)])
def test_workers_that_a_node_does_not_have_are_not_counted(workers):
    job = in_place(nodes="ab", min_workers=1)
    able(job, "a", workers=workers)
    dies(job, "b", 0)
    assert set(job.assigned["a"].workers or ()) <= {0, 1}


def test_a_replacement_joins_at_once_without_gathering():
    job = in_place(nodes="ab", min_workers=1)
    dies(job, "a", 0)
    job.inbox.clear()
    able(job, "a")
    assert kinds(job, "b") == [Drain]


def test_starting_replacements_and_arrivals_are_gathered():
    job = in_place(nodes="ab", min_workers=1)
    dies(job, "a", 0, 1)
    able(job, "a", workers=(1,))
    dies(job, "b", 1, 2)
    able(job, "a", workers=(1,))
    able(job, "b", workers=(0,))
    job.inbox.clear()
    able(job, "a")
    assert kinds(job, "b") == []
    able(job, "b")
    assert kinds(job, "b") == [Drain]
    job = in_place(nodes="ab")
    job.join("c")
    able(job, "c")
    assert kinds(job, "b") == []
    job.passes(1.2, alive="abc")
    assert kinds(job, "b") == [Drain]


def beats(job, *node_ids, progress=7, all_wait=True):
    for node_id in node_ids:
        fence = job.assigned[node_id].fence
        waiting = (
            (WaitPoint(ord(node_id) - ord("a"), f"all_reduce of {node_id}"),) if all_wait else ()
        )
        beat = Heartbeat(fence=fence, progress=progress, waiting=waiting, all_wait=all_wait)
        job.says(node_id, beat)


def test_a_stalled_world_is_replaced_without_a_charge():
    job = in_place(nodes="ab")
    beats(job, "a")
    assert kinds(job, "b") == []
    beats(job, "a", all_wait=False)
    beats(job, "b")
    assert kinds(job, "b") == []
    beats(job, "a")
    assert kinds(job, "b") == [Interrupt, Assign]
    assert job.persisted[-1].restarts_used == 0
    late = Heartbeat(fence=Fence(1, 0), all_wait=True)
    job.says("a", late)
    job.says("b", late)
    assert job.assigned["b"].fence == Fence(2, 0)


def test_a_stall_logs_where_each_rank_waits_once():
    job = in_place(nodes="ab")
    where = "rank 0 in all_reduce, rank 1 in _sync_buffers"
    for _ in range(3):
        for node_id, rank, at in (("a", 0, "all_reduce"), ("b", 1, "_sync_buffers")):
            fence = job.assigned[node_id].fence
            job.says(node_id, Heartbeat(fence=fence, waiting=(WaitPoint(rank, at),)))
    [told] = [event for event in job.events if event.kind is EventKind.STALL]
    assert told.reason == f"no progress for 10 s: {where}"
    assert kinds(job, "b") == []


def test_a_stall_in_a_drain_logs_where_each_rank_waits():
    job = in_place(nodes="ab")
    job.join("c")
    job.warms("c")
    able(job, "c")
    job.passes(1.2, alive="abc")
    assert kinds(job, "b") == [Drain]
    beats(job, "a", "b")
    [told] = [event for event in job.events if event.kind is EventKind.STALL]
    assert "rank 0 in all_reduce of a, rank 1 in all_reduce of b" in told.reason
    assert kinds(job, "b") == [Drain], "the drain has a time limit of its own"


def test_repeated_stalls_end_the_job_with_a_next_step():
    job = in_place(nodes="ab")
    for round_ in range(1, STALLS_MAX + 1):
        assert job.assigned["a"].fence.round == round_
        able(job, "a", "b")
        beats(job, "a", "b")
    able(job, "a", "b")
    beats(job, "a", "b")
    [outcome] = [m.outcome for m in job.inbox["a"] if isinstance(m, Close)]
    assert outcome.slug == "world-stalled" and not outcome.ok
    assert "rank 0 in all_reduce of a, rank 1 in all_reduce of b" in outcome.reason


def test_a_step_between_two_stalls_resets_the_count():
    job = in_place(nodes="ab")
    for step in range(3 * STALLS_MAX):
        able(job, "a", "b")
        beats(job, "a", "b", progress=step + 1)
    assert job.assigned["a"].fence == Fence(3 * STALLS_MAX + 1, 0)


def test_standbys_restart_if_no_member_of_the_world_returns():
    job = in_place(low=1, high=3, nodes="ab")
    job.join("c")
    job.warms("c")
    job.passes(1.2, alive="abc")
    beside = job.got("c", Prepare)[-1].assignment
    after = Driver(job.spec, job.persisted[-1])
    after.join("c", holding=Holding(assignment=beside, state="running", able=(0, 1)))
    after.passes(after.spec.timing.reregister_s - 0.2, alive="c")
    assert Stop not in kinds(after, "c")
    after.passes(0.5, alive="c")
    assert kinds(after, "c")[-1] is Stop
    after.says("c", Stopped(beside.fence, PortOffer(9000, True)))
    after.passes(5.0, alive="c")
    assert after.assigned["c"].nodes == 1 and not after.assigned["c"].in_place


def test_a_stall_between_two_loops_of_steps_ends_the_world():
    job = in_place(nodes="ab")
    able(job, "a", "b", workers=())  # They have finished a loop, and evaluate.
    beats(job, "a")
    assert kinds(job, "b") == []
    beats(job, "b")
    assert kinds(job, "b") == [Interrupt]


def reach_target(job, *node_ids, leaves):
    """Let a node leave and all workers stop at one boundary; return their messages."""
    job.leaves(leaves)
    for node_id in node_ids:
        job.marks(node_id, 5)
    return [job.got(node_id, DrainTarget)[-1].stops for node_id in node_ids]


@pytest.mark.parametrize(
    ("least", "saves"), [(2, False), (3, True)], ids=["enough-stay", "too-few-stay"]
)
def test_all_save_before_a_node_leaves_if_too_few_stay_for_a_world(least, saves):
    job = in_place(least, 3, nodes="abc")
    assert reach_target(job, "a", "b", "c", leaves="c") == [saves] * 3
    for node_id in "abc":
        job.drains(node_id)
    assert Interrupt in kinds(job, "c") and not {Stop, Close} & set(kinds(job, "a"))
    assert job.phase == ("regrouping" if saves else "running")


def test_the_others_save_if_more_nodes_leave_than_a_world_can_spare():
    job = in_place(2, 3, nodes="abc")
    assert reach_target(job, "a", "b", "c", leaves="c") == [False] * 3
    job.leaves("b")
    assert job.got("a", DrainTarget)[-1].stops


def test_survivors_that_are_too_few_make_their_coordinator_short_of_nodes():
    """Behind a cut network the lost nodes may reach one another, and elect another coordinator."""
    job = in_place(low=2, high=3, nodes="abc")
    job.breaks("b")
    job.breaks("c")
    job.passes(4.0, alive="a")
    assert job.machine.phase is MembershipPhase.REGROUPING
    assert 3.0 < job.machine.short_of_nodes_s < 4.5


def fails_at_a_step(job, node_id, local_rank, *, pid, met, steps=20):
    """A worker ends by an error of the script, after it met the others in the world of `met`."""
    text = 'Traceback:\n  File "/job/train.py", line 7, in <module>\nValueError: a bad sample\n'
    failure = Failure(
        local_rank=local_rank,
        rank=0,
        pid=pid,
        exit_code=1,
        message=text,
        error_file="error.json",
        steps=steps,
        met=met,
    )
    return job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(failure,)))


def three_fail(job, met, steps):
    """Let three of four workers fail in turn, each in the world of those that are left."""
    left = {"a": {0, 1}, "b": {0, 1}}
    for times, (node_id, local_rank) in enumerate([("a", 0), ("b", 1), ("a", 1)]):
        assert job.persisted[-1].outcome is None
        pid, of, made = 50 + times, met(times + 1), steps(times)
        fails_at_a_step(job, node_id, local_rank, pid=pid, met=of, steps=made)
        left[node_id].discard(local_rank)
        for each in "ab":
            able(job, each, workers=tuple(left[each]))


def test_a_step_that_fails_in_three_worlds_ends_the_job_whoever_tries_it():
    job = in_place(min_workers=1, restarts=100)
    three_fail(job, met=lambda world: world, steps=lambda times: 20)
    reason = job.persisted[-1].outcome.reason
    assert "3 attempts in a row failed after 20 steps" in reason and "a bad sample" in reason


@pytest.mark.parametrize(
    ("met", "steps"),
    [
        (lambda world: world, lambda times: 20 + times),
        (lambda world: world, lambda times: 0),
        (lambda world: 1, lambda times: 20),
        (lambda world: 0, lambda times: 20),
    ],
    ids=["each a step further", "no step shows", "all at once", "before they met"],
)
def test_failures_that_are_no_retries_of_one_step_use_the_budget(met, steps):
    job = in_place(min_workers=1, restarts=100)
    three_fail(job, met, steps)
    assert job.persisted[-1].outcome is None and job.persisted[-1].restarts_used == 3


def test_a_worker_that_ends_in_a_later_world_failed_in_the_one_that_it_met():
    """It lives on after its error, and the others have formed other worlds meanwhile."""
    job = in_place(min_workers=1, restarts=100)
    job.says("a", Lost(fence=Fence(1, 0), reason="lost a peer: reset"))
    able(job, "b", workers=(1,))
    able(job, "a")
    job.passes(1.0, alive="ab")
    assert job.persisted[-1].world.fence == Fence(2, 0)
    for pid, met, counts in [(50, 1, 1), (51, 1, 1), (52, 2, 2)]:
        fails_at_a_step(job, "b", 0, pid=pid, met=met)
        assert job.persisted[-1].crashes == counts, (pid, met)
