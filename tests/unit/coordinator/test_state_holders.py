"""Unreachable or displaced state holders: no worker starts from a checkpoint too early."""

import traceback

import msgspec
import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_crossings import holding, successor
from test_in_place_recovery import able, dies, in_place, kinds, regrouped

from elastane.coordinator.rules import MembershipPhase
from elastane.errors import JobError
from elastane.protocol.events import Resized
from elastane.protocol.limits import Timing
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Assign,
    DrainTarget,
    Failed,
    Heartbeat,
    Holding,
    Interrupt,
    Prepare,
    Stop,
    Stopped,
)
from elastane.protocol.model import Failure, Fence, Joining, PortOffer


def steps(job, *node_ids, progress=5, met=None):
    """Let these nodes report steps, of their current world or of round `met`."""
    for node_id in node_ids:
        fence = job.assigned[node_id].fence
        met_in = fence.round if met is None else met
        job.says(node_id, Heartbeat(fence=fence, progress=progress, met=met_in))


def trains_on(job, seconds, *node_ids):
    """Let time pass in which these nodes report steps."""
    end_s = job.now_s + seconds
    while job.now_s < end_s:
        job.passes(0.5)
        steps(job, *node_ids)


def settled(job):
    return [event.fence for event in job.events if event.kind is EventKind.ROUND_SETTLED]


def unheard(store_backed=True, spec=None, incarnation="1"):
    """a and b made steps; b became silent, c replaced it, and a became silent before a report."""
    job = Driver(spec or job_spec(2, 2), store_backed=store_backed)
    for name in "ab":
        job.join(name, incarnation.format(name))
    job.passes(4.0, alive="ab")
    able(job, "a", "b")
    steps(job, "a", "b")
    job.join("c", incarnation.format("c"))
    able(job, "c")
    job.passes(2.9, alive="ac")
    job.passes(0.3, alive="c")  # a is heard no more, and b is counted out
    assert regrouped(job, "c") == (Fence(2, 0), 2, (0, 1), 4)
    job.inbox.clear()
    job.passes(3.5, alive="c")
    assert "a" not in job.machine._state.roster.nodes
    return job


def test_joining_workers_wait_while_state_holders_may_train_out_of_sight():
    job = unheard()
    job.join("d")
    able(job, "d")
    job.passes(Timing().fence_wait_s - 20.0, alive="cd")
    assert job.machine.phase is MembershipPhase.REGROUPING
    assert Assign not in kinds(job, "c") and Assign not in kinds(job, "d")
    waits = [n.reason for n in job.events if n.kind is EventKind.WAITING]
    assert any("train where this coordinator cannot see it" in reason for reason in waits)
    job.passes(25.0, alive="cd")  # By now those out of sight have stopped themselves.
    assert regrouped(job, "c")[0] == regrouped(job, "d")[0] == Fence(3, 0)


def test_without_a_store_unreachable_state_holders_are_not_awaited():
    job = unheard(store_backed=False)
    job.join("d")
    able(job, "d")
    job.passes(10.0, alive="cd")
    assert regrouped(job, "c")[0] == regrouped(job, "d")[0] == Fence(3, 0)


def test_a_returning_state_holder_ends_the_wait():
    job = unheard()
    from_before = job.assigned["a"]  # Round 2 was never assigned to it.
    first = job.persisted[0].world.fence
    holding = holding_of(from_before, first)
    job.join("a", holding=holding)
    job.says("a", Heartbeat(fence=first, progress=5, met=1))
    job.passes(0.5, alive="c")
    assert regrouped(job, "a") == (Fence(3, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(3, 0), 2, (0, 1), 4)


def holding_of(assignment, fence):
    old = msgspec.structs.replace(assignment, fence=fence, in_place=False, workers=())
    return Holding(assignment=old, state="running", able=(0, 1))


def test_a_state_holder_in_the_current_world_rules_out_older_worlds():
    """Otherwise the loss of all nodes, hours later, would lead to a useless wait."""
    job = in_place(low=1, high=2, nodes="ab")
    steps(job, "a", "b")
    trains_on(job, 4.0, "a")
    assert settled(job)[-1] == Fence(2, 0)
    assert job.machine._state.holders.possibly_training == {}


@pytest.mark.parametrize("how", ["killed", "stopped", "its connection ended"])
def test_the_end_of_a_state_holder_ends_all_its_worlds(how):
    job = Driver(job_spec(1, 2), store_backed=True)
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able(job, "a", "b")
    steps(job, "a", "b")
    job.machine._state.holders.note_possibly_training("b", "1", job.now_s)
    if how == "killed":
        dies(job, "a", local_rank=0)
    elif how == "stopped":
        job.says("a", Stopped(job.assigned["a"].fence, PortOffer(9000, True)))
    else:
        job.breaks("a")
        job.passes(0.2, alive="b")
    assert job.machine._state.holders.possibly_training == {}


def narrowed():
    """a, b and c made steps; the owner wants one node, and round 2 has a alone."""
    job = in_place(low=1, high=3, nodes="abc")
    steps(job, "a", "b", "c")
    job.handle(Resized(min_nodes=1, max_nodes=1))
    trains_on(job, 6.0, "a", "b", "c")
    for node_id in "abc":
        job.marks(node_id, 10)
    assert [m.calls for m in job.inbox["a"] if isinstance(m, DrainTarget)] == [11]
    for node_id in "abc":
        job.drains(node_id)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)
    job.inbox.clear()
    return job


def test_displaced_nodes_continue_if_the_next_world_is_lost_before_its_first_step():
    job = narrowed()
    job.breaks("a")
    job.passes(0.2, alive="bc")
    assert Stop not in kinds(job, "b") + kinds(job, "c")
    assert regrouped(job, "b") == (Fence(3, 0), 0, (0, 1), 2)
    assert job.assigned["c"].fence == Fence(1, 0)  # One node at most.


def test_displaced_state_is_stale_once_the_next_world_steps():
    job = narrowed()
    steps(job, "a", progress=11)
    job.breaks("a")
    job.passes(0.2, alive="bc")
    assert Stop in kinds(job, "b") and Stop in kinds(job, "c")


def test_displaced_nodes_count_until_the_next_world_meets():
    job = narrowed()
    steps(job, "a", met=1)
    job.breaks("a")
    job.passes(0.2, alive="bc")
    assert regrouped(job, "b") == (Fence(3, 0), 0, (0, 1), 2)


def cut_off():
    """a, b, c and d made steps; c and d were displaced; then a and b became silent in turn."""
    job = Driver(job_spec(1, 4), store_backed=True)
    for node_id in "abcd":
        job.join(node_id)
    job.passes(4.0, alive="abcd")
    able(job, "a", "b", "c", "d")
    steps(job, "a", "b", "c", "d")
    job.handle(Resized(min_nodes=1, max_nodes=2))
    trains_on(job, 6.0, "a", "b", "c", "d")
    for node_id in "abcd":
        job.marks(node_id, 10)
    for node_id in "abcd":
        job.drains(node_id)
    trains_on(job, 8.0, "a", "b", "c", "d")  # New port offers arrive meanwhile.
    assert settled(job)[-1] == job.assigned["b"].fence == Fence(2, 0)
    trains_on(job, 1.0, "b", "c", "d")
    while job.assigned["c"].fence == Fence(1, 0):  # Until a is counted out.
        job.passes(0.5)
        steps(job, "c", "d", met=1)
    assert settled(job)[-1] == Fence(3, 0)
    return job


def test_a_displaced_node_does_not_rule_out_a_world_it_was_not_in():
    """a and b may train in round 2, which needs no other node; c was in rounds 1 and 3."""
    job = cut_off()
    for _ in range(40):
        job.passes(0.5, alive="d")
        steps(job, "c", met=1)  # Round 3 does not meet without b.
    assert "b" not in job.machine._state.roster.nodes
    assert settled(job)[-1] == Fence(3, 0)
    assert job.machine.phase is MembershipPhase.REGROUPING
    for _ in range(int(2 * Timing().fence_wait_s)):
        job.passes(0.5, alive="d")
        steps(job, "c", met=1)
    assert settled(job)[-1] == Fence(4, 0)  # By now a and b have stopped themselves.


def test_meeting_in_a_later_world_rules_out_the_earlier_ones():
    """Round 3 began with the state of b, which had left round 2."""
    job = cut_off()
    for _ in range(20):
        job.passes(0.5, alive="d")
        steps(job, "c", met=3)
    assert "b" not in job.machine._state.roster.nodes
    assert settled(job)[-1] == Fence(4, 0)


@pytest.mark.parametrize("met, waits", [(2, False), (1, True)])
def test_a_new_coordinator_accepts_a_meeting_in_the_world_before_the_last(met, waits):
    """The last coordinator's host died before round 3 met; c had left round 2 for round 3."""
    job = cut_off()
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="b")
    after.join("c", holding=Holding(assignment=job.assigned["c"], state="running", able=(0, 1)))
    after.assigned["c"] = job.assigned["c"]
    for _ in range(60):
        after.passes(0.5)
        steps(after, "c", met=met)
    assert after.assigned["c"].fence == Fence(3 if waits else 4, 0)


@pytest.mark.parametrize("b_is", ["heard", "silent", "back with a"])
def test_an_exhausted_budget_ends_the_job_only_if_no_member_may_train_unseen(b_is):
    job = Driver(job_spec(1, 2, 1, min_workers=2), store_backed=True)
    job.join("a"), job.join("b", size=1)
    job.passes(4.0, alive="ab")
    able(job, "a"), able(job, "b", workers=(0,))
    steps(job, "a", "b")
    dies(job, "a")
    trains_on(job, 1.0, "a", "b")
    dies(job, "a", pid=99)  # Its replacement, which is not replaced.
    trains_on(job, 1.0, "b")
    job.passes(2.5)
    assert "a" not in job.machine._state.roster.nodes and job.phase == "regrouping"
    if b_is == "heard":  # Round 2 makes no step without it.
        steps(job, "b")
    elif b_is == "silent":
        job.passes(Timing().fence_wait_s - 3.0)
    else:
        held = Holding(assignment=job.assigned["a"], state="running", able=(1,))
        job.join("a", holding=held)
        job.passes(1.0, alive="ab")
    outcome = job.persisted[-1].outcome
    assert (outcome is not None) == (b_is == "heard")
    if outcome is not None:
        assert "the restart budget pays for no replacement" in outcome.reason


@pytest.mark.parametrize("comes", [True, False])
def test_an_exhausted_budget_waits_for_members_to_come_back(comes):
    """A worker without a place dies before all members have registered with a new coordinator."""
    before = in_place(low=2, high=3, restarts=0)
    steps(before, "a", "b")
    before.join("c"), before.warms("c")
    before.assigned["c"] = before.got("c", Prepare)[-1].assignment
    job = Driver(before.spec, before.persisted[-1], store_backed=True)
    job.assigned |= before.assigned
    for node_id, ranks in (("b", (0, 1)), ("c", (1,))):
        job.join(node_id, holding=before.holding(node_id, able=ranks, in_place=True))
    steps(job, "b")
    job.passes(3.0, alive="bc")
    steps(job, "b")
    dies(job, "c")
    job.passes(60.0, alive="bc")
    assert job.phase == "regrouping"
    if comes:
        job.join("a", holding=before.holding("a", able=(0, 1), in_place=True))
        assert regrouped(job, "a")[3] == 5
    job.passes(Timing().fence_wait_s - 60.0, alive="abc" if comes else "bc")
    assert any(record.outcome for record in job.persisted) != comes


def test_a_node_within_its_grace_is_not_missed():
    """No node replaces one whose connection has just broken."""
    job = narrowed()
    job.breaks("a")
    job.passes(0.05, alive="bc")
    assert job.machine.phase is MembershipPhase.RUNNING


def test_a_leaving_node_that_disconnects_counts_as_released():
    job = Driver(job_spec(1, 3))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    job.join("c")
    job.leaves("a")
    job.authority(False)  # It cannot be let go now, and leaves alone.
    job.stops("a")
    job.breaks("a")
    job.passes(0.2, alive="bc")
    said = [event.kind for event in job.events if event.node_id == "a"]
    assert EventKind.NODE_RELEASED in said and EventKind.NODE_DEPARTED not in said


def test_a_node_silent_before_the_first_step_is_not_awaited():
    """It cannot make steps without the others, and there was no world before the first."""
    job = Driver(job_spec(1, 2), store_backed=True)
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able(job, "a", "b")
    job.passes(4.0, alive="a")
    assert regrouped(job, "a")[0] == Fence(2, 0)


def test_displaced_nodes_continue_under_a_new_coordinator():
    """The last coordinator may have run on the node that replaced them."""
    job = narrowed()
    assert job.persisted[-1].kept == ("b", "c")
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="a")
    for node_id in "bc":
        first = msgspec.structs.replace(job.assigned[node_id], in_place=False)
        held = Holding(assignment=first, state="running", able=(0, 1), draining=True, halted="x")
        after.join(node_id, holding=held)
        after.assigned[node_id] = first
    after.passes(20.0, alive="bc")
    assert Stop not in kinds(after, "b") + kinds(after, "c")
    after.passes(Timing().fence_wait_s, alive="bc")  # The node that displaced them may train.
    assert regrouped(after, "b") == (Fence(3, 0), 0, (0, 1), 2)


def test_the_record_drops_displaced_nodes_once_the_next_world_steps():
    job = narrowed()
    steps(job, "a", progress=11)
    assert job.persisted[-1].kept == ()
    count = len(job.persisted)
    steps(job, "a", progress=12)
    assert len(job.persisted) == count


def test_a_restarted_script_does_not_wait_for_a_dead_coordinators_node():
    """Its other worker died of the same loss, so no worker can make a step."""
    job = Driver(job_spec(1, 2), store_backed=True)
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="a")
    failed = Failure(local_rank=0, rank=2, pid=7, exit_code=1, message="reset by peer")
    others = msgspec.structs.replace(failed, local_rank=1, rank=3, pid=8)
    held = Holding(assignment=job.assigned["b"], state="failed", failures=(failed, others))
    after.join("b", holding=held)
    after.assigned["b"] = job.assigned["b"]
    after.passes(after.spec.timing.reregister_s + 1.0, alive="b")
    after.stops("b")
    after.passes(5.0, alive="b")
    assert after.assigned["b"].fence == Fence(2, 0)


def test_the_last_holder_of_an_unrecorded_world_may_end_during_recovery():
    """The coordinator knows that world only from this node, and no node of it is left."""
    job = Driver(job_spec(1, 2))
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    after = Driver(job.spec)
    after.join("b", holding=Holding(assignment=job.assigned["b"], state="running"))
    after.join("c")
    after.passes(after.spec.timing.reregister_s - 0.05, alive="bc")
    after.breaks("b")
    after.passes(0.06, alive="c")
    assert after.phase == "forming" and "b" in after.machine._state.roster.nodes
    after.passes(5.0, alive="c")
    assert after.assigned["c"].fence == Fence(2, 0)


def test_displaced_nodes_join_the_one_survivor_of_a_world_without_a_known_step():
    """The survivor may lack the state, or may be a step ahead, so the displaced nodes join it."""
    job = in_place(low=1, high=3, nodes="abc", min_workers=1)
    steps(job, "a", "b", "c")
    dies(job, "a", local_rank=0)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (1,), 5)
    steps(job, "a", "b", "c")
    job.handle(Resized(min_nodes=1, max_nodes=1))
    able(job, "a")
    trains_on(job, 6.0, "a", "b", "c")
    for node_id in "abc":
        job.marks(node_id, 10)
    for node_id in "abc":
        job.drains(node_id)
    assert regrouped(job, "a") == (Fence(3, 0), 0, (1, 0), 2)
    dies(job, "a", local_rank=1, pid=4243)
    able(job, "a", workers=(0,))  # and where the next world meets
    assert regrouped(job, "a") == (Fence(4, 0), 0, (0,), 3)
    assert regrouped(job, "b") == (Fence(4, 0), 1, (0, 1), 3), "one of them is enough"
    assert job.assigned["c"].fence == Fence(2, 0)


def loses_state(job, node_id, local_rank=0, slug="job-state-lost"):
    """A worker of the node finds that no member of its world holds the state."""
    error = JobError("no worker holds the state", slug=slug, expected="one that does")
    said = "".join(traceback.format_exception(error))
    failure = Failure(local_rank=local_rank, rank=0, pid=77, exit_code=1, message=said)
    job.says(node_id, Failed(fence=job.assigned[node_id].fence, failures=(failure,)))


def test_a_world_that_lost_the_state_restarts_at_once_and_uses_no_restart():
    """The loss of the holders was charged before; the loss of a host is free."""
    job = in_place(nodes="abc", restarts=0)
    job.breaks("c")
    job.passes(0.2, alive="ab")
    job.inbox.clear()
    loses_state(job, "b")
    assert kinds(job, "a") == kinds(job, "b") == [Stop]
    loses_state(job, "a")
    job.stops("a", "b")
    assert job.phase == "running" and not job.assigned["a"].in_place
    assert job.assigned["a"].restarts_used == 0
    reasons = [event.reason for event in job.events if event.kind is EventKind.INCIDENT]
    assert reasons[-1].endswith("ended with exit code 1 after the state of the job was lost")


def test_a_lost_state_uses_no_restart_of_the_next_coordinator_which_did_not_see_the_loss():
    job = in_place(nodes="abc", restarts=0)
    job.breaks("c")
    job.passes(0.2, alive="ab")
    able(job, "a", "b")
    after = successor(job)
    for node_id in "ab":
        after.join(node_id, holding=holding(after, node_id))
    for node_id in "ab":
        loses_state(after, node_id)
    after.stops("a", "b")
    after.passes(2.0, alive="ab")
    assert after.phase == "running" and not after.assigned["a"].in_place
    assert after.assigned["a"].restarts_used == 0
    assert (job.persisted[-1].lost, after.persisted[-1].lost) == (True, False)


def test_workers_that_join_with_another_mesh_restart_all_and_use_no_restart():
    """The members hold the state, in shards of the former mesh."""
    job = in_place(nodes="ab", restarts=0)
    steps(job, "a")
    loses_state(job, "b", slug="job-mesh-size")
    assert kinds(job, "a")[-1] is kinds(job, "b")[-1] is Stop
    job.stops("a", "b")
    assert job.phase == "running" and not job.assigned["a"].in_place
    assert job.assigned["a"].restarts_used == 0


def test_a_lost_state_without_a_loss_before_is_charged():
    """Otherwise a job that loses its state by itself would restart for ever."""
    job = in_place(nodes="abc")
    job.breaks("c")
    job.passes(0.2, alive="ab")
    for used in (0, 1):
        able(job, "a", "b")
        loses_state(job, "b")
        job.stops("a", "b")
        assert job.assigned["a"].restarts_used == used


def test_a_state_lost_with_workers_that_the_budget_did_not_pay_for_ends_the_job():
    """Otherwise each restart after it is free, and the same error follows without end."""
    job = in_place(nodes="ab", restarts=0, min_workers=1)
    able(job, "a", "b", joining=Joining.PLANNED)
    dies(job, "a", 0)
    job.passes(0.4, alive="ab")
    able(job, "a", workers=(1,), joining=Joining.PLANNED)
    able(job, "b", joining=Joining.PLANNED)
    assert job.persisted[-1].world.fence == Fence(2, 0) and job.persisted[-1].outcome is None
    loses_state(job, "b")
    job.stops("a", "b")
    job.passes(0.4, alive="ab")
    assert "no restarts are allowed" in job.persisted[-1].outcome.reason


def test_a_worker_that_fails_by_itself_in_a_world_that_lost_the_state_is_charged():
    job = in_place(nodes="abc")
    job.breaks("c")
    job.passes(0.2, alive="ab")
    loses_state(job, "b")
    dies(job, "a")
    job.stops("a", "b")
    assert job.assigned["a"].restarts_used == 1


def test_workers_that_hold_the_state_outlive_a_world_that_lost_it():
    """The report came late, from the world before the one with the holder."""
    job = in_place(nodes="ab")
    steps(job, "a")
    loses_state(job, "b")
    assert Stop not in kinds(job, "a") and Interrupt in kinds(job, "a")
