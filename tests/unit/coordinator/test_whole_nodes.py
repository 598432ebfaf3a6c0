"""Workers with sharded state take part by whole nodes, never some of a node's workers."""

from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, in_place, kinds, regrouped

from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign, Drain, Interrupt, Lost, Prepare, Stop
from elastane.protocol.model import Fence, Sharding

WHOLE, SOLE = Sharding(), Sharding(sole=True)


def whole_nodes(**more):
    job = in_place(**more)
    able(job, *more.get("nodes", "ab"), sharding=WHOLE)
    job.inbox.clear()
    return job


def test_whole_nodes_wait_for_a_replacement_whatever_the_minimum():
    job = whole_nodes(low=1, min_workers=1)
    dies(job, "a", local_rank=1)
    assert kinds(job, "b") == [Interrupt] and kinds(job, "a") == [Interrupt, Prepare]
    (waiting,) = [event.reason for event in job.events if event.kind is EventKind.WAITING]
    assert waiting.startswith("3 of at least 4 workers are left")
    able(job, "a", workers=(0,), sharding=WHOLE)
    assert kinds(job, "b") == [Interrupt]
    able(job, "a", sharding=WHOLE)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)


def test_whole_nodes_do_not_wait_for_a_lost_node():
    job = whole_nodes(low=1)
    dies(job, "a", local_rank=1)
    job.breaks("a")
    job.passes(0.2, alive="b")
    assert regrouped(job, "b") == (Fence(2, 0), 0, (0, 1), 2)


def test_an_arriving_node_joins_once_all_its_workers_are_ready():
    job = whole_nodes(nodes="a", high=2)
    job.join("b")
    job.passes(6.0, alive="ab")
    able(job, "b", workers=(0,), sharding=WHOLE)
    job.passes(6.0, alive="ab")
    assert Drain not in kinds(job, "a")
    able(job, "b", sharding=WHOLE)
    job.passes(6.0, alive="ab")
    assert kinds(job, "a")[-1] is Drain


def test_an_incomplete_arriving_node_is_not_awaited():
    job = whole_nodes(nodes="ab")
    job.join("c")
    job.passes(6.0, alive="abc")
    able(job, "c", workers=(0,), sharding=WHOLE)
    job.breaks("b")
    job.passes(0.2, alive="ac")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)


def test_a_new_coordinator_learns_of_sharding_from_the_agents():
    before = whole_nodes(low=1)
    after = Driver(job_spec(1, 3, 3), record=before.persisted[-1])
    for node_id in "ab":
        holding = before.holding(node_id, able=(0, 1), in_place=True, sharding=WHOLE)
        after.assigned[node_id] = before.assigned[node_id]
        after.join(node_id, holding=holding)
    after.inbox.clear()
    dies(after, "a", local_rank=1)
    assert Assign not in kinds(after, "b")


def sole(**more):
    """Return a job of one node, whose workers are the only holders of their shards."""
    job = in_place(nodes="a", **more)
    able(job, "a", sharding=SOLE)
    job.inbox.clear()
    return job


def grown(job):
    """Let node b join."""
    job.join("b")
    job.passes(6.0, alive="ab")
    able(job, "b", sharding=WHOLE)
    job.passes(6.0, alive="ab")
    job.marks("a", 3), job.drains("a")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)
    able(job, "a", sharding=SOLE)  # with another port: b has got nothing yet
    job.inbox.clear()
    return job


def test_losing_a_sole_state_holder_restarts_all_at_once():
    job = sole()
    dies(job, "a", local_rank=1)
    assert kinds(job, "a") == [Stop]
    assert job.got("a", Stop)[0].reason.endswith(
        "SIGKILL; no other worker holds its part of the state"
    )
    job.stops("a")
    job.passes(1.0, alive="a")
    given = job.assigned["a"]
    assert not given.in_place and (given.fence, given.restarts_used) == (Fence(1, 1), 1)


def test_a_worker_that_only_lost_a_connection_has_lost_nothing():
    job = sole()
    job.says("a", Lost(fence=Fence(1, 0), reason="Connection closed by peer"))
    job.passes(2.0, alive="a")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)
    assert job.assigned["a"].in_place


def test_the_end_of_a_sole_holder_may_be_reported_after_the_world_ended():
    job = sole()
    job.says("a", Lost(fence=Fence(1, 0), reason="Connection closed by peer"))
    able(job, "a", workers=(0,), sharding=SOLE)
    job.passes(2.0, alive="a")
    assert kinds(job, "a") == [Interrupt]
    dies(job, "a", local_rank=1)
    assert kinds(job, "a") == [Interrupt, Stop]


def test_a_sole_holder_continues_if_a_joining_worker_is_lost():
    job = grown(sole())
    job.breaks("b")
    job.passes(0.2, alive="a")
    assert Stop not in kinds(job, "a")
    assert regrouped(job, "a") == (Fence(3, 0), 0, (0, 1), 2)


def test_once_others_hold_it_too_a_lost_worker_is_followed_by_another():
    job = grown(sole())
    able(job, "a", sharding=WHOLE)
    dies(job, "a", local_rank=1)
    assert kinds(job, "a") == [Interrupt, Prepare]


def test_a_new_coordinator_learns_of_sole_holders():
    before = sole()
    after = Driver(job_spec(1, 3, 3), record=before.persisted[-1])
    after.assigned |= before.assigned
    after.join("a", holding=before.holding("a", able=(0, 1), in_place=True, sharding=SOLE))
    after.inbox.clear()
    dies(after, "a", local_rank=1)
    assert kinds(after, "a") == [Stop]
