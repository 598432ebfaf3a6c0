"""Worlds that were durable when their coordinator died, and that no agent had received."""

import msgspec
from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, in_place, kinds
from test_state_holders import steps

from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Failed, Holding, Stop, Stopped
from elastane.protocol.model import Failure, Fence, PortOffer


def test_workers_that_end_before_their_assignment_arrives_are_reported():
    """The coordinator died when a world was durable and no node knew it; then a worker died."""
    job = in_place(low=1, high=2, nodes="ab", min_workers=1)
    steps(job, "a", "b")
    first = {node_id: job.assigned[node_id] for node_id in "ab"}
    dies(job, "b", local_rank=1)
    assert job.persisted[-1].world.fence == Fence(2, 0)
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="x")
    gone = Failure(local_rank=1, rank=3, pid=4242, exit_code=-9)
    after.join("a", holding=Holding(assignment=first["a"], state="running", able=(0, 1)))
    dead = Failure(local_rank=0, rank=0, pid=7, exit_code=-9)
    after.says("a", Failed(fence=Fence(1, 0), failures=(dead,)))
    held = Holding(assignment=first["b"], state="running", able=(0,), failures=(gone,))
    after.join("b", holding=msgspec.structs.replace(held, renewed=(1,)))
    after.passes(10.0, alive="ab")
    able(after, "a", workers=(1,)), able(after, "b", workers=(0,))
    after.passes(1.0, alive="ab")
    assert Stop not in kinds(after, "a") + kinds(after, "b")
    assert after.assigned["a"].fence > Fence(2, 0) and after.assigned["a"].workers == (1,)
    assert after.assigned["b"].workers == (0,)


def test_a_node_that_stopped_its_workers_before_its_assignment_has_none():
    job = in_place(low=1, high=2, nodes="ab", min_workers=1)
    steps(job, "a", "b")
    first = {node_id: job.assigned[node_id] for node_id in "ab"}
    dies(job, "b", local_rank=1)
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="x")
    after.join("a", holding=Holding(assignment=first["a"], state="running", able=(0, 1)))
    assert after.machine._state.roster.nodes["a"].workers.ranks == (0, 1)
    after.says("a", Stopped(Fence(1, 0), PortOffer(9000, True)))
    node = after.machine._state.roster.nodes["a"]
    assert node.fence is None and not (node.workers.ranks or node.workers.recoverable)


def test_a_member_that_does_not_come_back_to_a_new_coordinator_is_an_incident():
    """A coordinator without a store ended with its node; the other agent reports its world."""
    job = Driver(job_spec(2, 2, 1))
    for node_id in "ab":
        job.join(node_id)
    job.passes(4.0, alive="ab")
    after = Driver(job.spec)
    after.join("b", holding=Holding(assignment=job.assigned["b"], state="running"))
    after.passes(60.0, alive="b")
    [found] = [event for event in after.events if event.kind is EventKind.INCIDENT]
    assert found.reason.endswith("did not come back to the new coordinator within the time")
    assert found.data == {"departed": 1}


def test_a_node_that_was_lost_with_its_coordinator_departs_by_name():
    """The record names it; no session of it ends at the next coordinator."""
    job = Driver(job_spec(1, 3, 1))
    for node_id in "abc":
        job.join(node_id)
    job.passes(4.0, alive="abc")
    after = Driver(job.spec, job.persisted[-1], store_backed=True, previous_holder="a")
    for node_id in "bc":
        after.join(node_id, holding=Holding(assignment=job.assigned[node_id], state="running"))
    after.passes(10.0, alive="bc")
    found = [(one.kind, one.node_id, one.reason) for one in after.events]
    how = "did not come back to the new coordinator within the time"
    departed = (EventKind.NODE_DEPARTED, "a", f"the last coordinator ran on it; it {how}")
    assert found.count(departed) == 1
    assert found.index(departed) < found.index((EventKind.INCIDENT, "", f"node a {how}"))
