"""Replicas of two nodes each: a world has whole ones, after all survivors reached one step."""

import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, in_place, kinds, regrouped

from elastane.protocol.events import Resized
from elastane.protocol.messages import Assign, Drain, Heartbeat, Interrupt, Prepare, Stop, Welcome
from elastane.protocol.model import NO_SLICE, Fence, Sharding


def says(job, node_id, part, *, level=None, **more):
    able(job, node_id, sharding=Sharding(span=2, part=part, level=level), **more)


def two_replicas(low=2, high=4, **more):
    """Return four nodes: a and c hold the first slice, b and d the second."""
    job = in_place(low=low, high=high, nodes="abcd", **more)
    for part, node_id in enumerate("abcd"):
        says(job, node_id, part % 2)
    job.inbox.clear()
    return job


def lost(job, *node_ids):
    for node_id in node_ids:
        job.breaks(node_id)
    job.passes(0.2, alive=sorted(set("abcd") - {*node_ids}))


def test_survivors_without_whole_replicas_first_reach_one_step_together():
    job = two_replicas()
    lost(job, "a")
    assert [regrouped(job, each)[1:] for each in "bcd"] == [
        (0, (0, 1), 6),
        (2, (0, 1), 6),
        (4, (0, 1), 6),
    ]
    fence = job.assigned["b"].fence
    job.inbox.clear()
    says(job, "b", 1), says(job, "d", 1), says(job, "c", 0)
    job.passes(30.0, alive="bcd")
    assert not any(kinds(job, each) for each in "bcd"), "it makes no steps, and nobody leaves"
    says(job, "c", 0, level=fence)
    assert [kinds(job, each) for each in "bcd"] == [[Interrupt, Assign]] * 2 + [[Interrupt]]
    assert regrouped(job, "b") == (Fence(3, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(3, 0), 2, (0, 1), 4)
    assert job.persisted[-1].restarts_used == 0


def test_remaining_whole_replicas_continue_at_once():
    job = two_replicas()
    lost(job, "a", "d")
    assert regrouped(job, "b") == (Fence(2, 0), 0, (0, 1), 4)
    assert regrouped(job, "c") == (Fence(2, 0), 2, (0, 1), 4)


@pytest.mark.parametrize(("drained", "stay"), [("abcd", "ab"), ("bcd", "bc"), ("", "abcd")])
def test_surplus_nodes_leave_and_nodes_at_the_boundary_stay(drained, stay):
    """A node that was late may lack the last step; if all were late, any may be ahead."""
    job = two_replicas()
    job.handle(Resized(min_nodes=2, max_nodes=2))
    job.passes(6.0, alive="abcd")
    assert job.phase == "draining"
    for node_id in "abcd":
        job.marks(node_id, 7)
    for node_id in drained:
        job.drains(node_id)
    job.passes(31.0, alive="abcd")
    there = [member.node_id for member in job.persisted[-1].world.members]
    assert there == [*stay]
    job.passes(2.0, alive="abcd")
    assert job.phase == "running", "it is tried again later"


def test_some_nodes_start_afresh_if_slices_prevent_enough_replicas():
    """Of the four required nodes one holds the first slice, and three the second."""
    job = in_place(low=4, high=6, nodes="abcdef")
    for part, node_id in enumerate("abcdef"):
        says(job, node_id, part % 2)
    job.inbox.clear()
    for node_id in "ac":
        job.breaks(node_id)
    job.passes(0.2, alive="bdef")
    level = job.assigned["b"].fence
    assert [regrouped(job, each)[3] for each in "bdef"] == [8] * 4
    job.inbox.clear()
    says(job, "b", 1), says(job, "d", 1), says(job, "e", 0, level=level)
    assert [kinds(job, each) for each in "bdef"] == [[Interrupt]] * 3 + [[Interrupt, Stop]]
    job.stops("f"), job.warms("f")
    assert kinds(job, "f")[-1] is Prepare
    job.assigned["f"] = job.got("f", Prepare)[-1].assignment
    says(job, "f", NO_SLICE)
    assert [regrouped(job, each)[3] for each in "bdef"] == [8] * 4
    assert job.persisted[-1].restarts_used == 0


def test_too_few_nodes_wait_and_keep_their_state():
    job = in_place(low=4, high=6, nodes="abcd")
    for part, node_id in enumerate("abcd"):
        says(job, node_id, part % 2)
    job.inbox.clear()
    lost(job, "a")
    assert [kinds(job, each) for each in "bcd"] == [[Interrupt]] * 3
    job.join("e"), job.warms("e")
    job.assigned["e"] = job.got("e", Prepare)[-1].assignment
    says(job, "e", NO_SLICE)
    assert [regrouped(job, each)[3] for each in "bcde"] == [8] * 4


def left_with_one():
    """Return a world of b and c; d waits, since it was surplus."""
    job = two_replicas()
    lost(job, "a")
    says(job, "b", 1), says(job, "d", 1), says(job, "c", 0, level=job.assigned["c"].fence)
    fence = job.assigned["b"].fence
    for part, node_id in ((1, "b"), (0, "c")):
        says(job, node_id, part)
        job.says(node_id, Heartbeat(fence=fence, progress=9, met=fence.round))
    job.inbox.clear()
    return job


def test_a_waiting_node_continues_once_its_replica_is_complete():
    job = left_with_one()
    job.join("e"), job.warms("e")
    assert kinds(job, "e")[-1] is Prepare
    states = {node.node_id: node.state for node in job.machine.report().nodes}
    assert states == {"b": "running", "c": "running", "d": "spare", "e": "warming up"}
    says(job, "e", -1)
    job.passes(2.5, alive="bcde")
    assert kinds(job, "b") == kinds(job, "c") == [Drain]
    for node_id in "bc":
        job.marks(node_id, 7)
    for node_id in "bc":
        job.drains(node_id)
    assert [regrouped(job, each)[1] for each in "bcde"] == [0, 2, 4, 6]
    assert job.assigned["e"].world_size == 8


def test_an_arrival_that_completes_no_replica_waits():
    job = in_place(low=2, high=4, nodes="ab")
    says(job, "a", 0), says(job, "b", 1)
    job.inbox.clear()
    job.join("c"), job.warms("c")
    says(job, "c", -1)
    job.passes(30.0, alive="abc")
    assert Drain not in kinds(job, "a") + kinds(job, "b")


def test_spares_with_useless_slices_start_afresh():
    job = left_with_one()
    job.join("e"), job.warms("e")
    says(job, "e", 1)  # It has waited since an older world, as d has.
    assert kinds(job, "d") + kinds(job, "e") == [Welcome, Prepare, Stop]


def test_losing_a_slice_restarts_from_checkpoint():
    job = two_replicas()
    lost(job, "a", "c")
    assert kinds(job, "b") == kinds(job, "d") == [Stop]


def test_losing_the_only_holder_of_a_shard_restarts_from_checkpoint():
    job = left_with_one()
    dies(job, "c", local_rank=1)
    assert kinds(job, "b")[-1] is Stop


@pytest.mark.parametrize("in_time", [True, False])
def test_a_replica_larger_than_the_job_ends_it_at_once(in_time):
    job = in_place(low=2, high=2, nodes="ab") if in_time else Driver(job_spec())
    if in_time:
        able(job, "a", "b", sharding=Sharding(span=4))
        dies(job, "a")
    else:
        job.join("a"), job.join("b")
        able(job, "a", sharding=Sharding(span=4))
        dies(job, "b")
        job.passes(1.0, alive="ab")
        job.stops("a", "b")
    assert job.persisted[-1].outcome.slug == "job-mesh"
    assert "of 4 nodes, and the job has 2 at most" in job.persisted[-1].outcome.reason


def test_a_job_starts_with_whole_replicas_and_leaves_the_rest_as_spares():
    job = in_place(low=1, high=3, nodes="abc")
    able(job, "a", "b", "c", sharding=Sharding(span=2))
    job.inbox.clear()
    dies(job, "c")  # anything that ends the world in which they could not meet
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)
    assert kinds(job, "c")[-1] is not Assign


def test_a_new_coordinator_learns_the_nodes_per_replica():
    before = two_replicas()
    after = Driver(before.spec, before.persisted[-1], store_backed=True)
    after.assigned |= before.assigned
    for part, node_id in enumerate("abcd"):
        holding = before.holding(
            node_id, able=(0, 1), in_place=True, sharding=Sharding(span=2, part=part % 2)
        )
        after.join(node_id, holding=holding)
    after.join("e"), after.warms("e")
    after.passes(30.0, alive="abcde")
    assert after.phase == "running" and len(after.persisted[-1].world.members) == 4


def test_a_restart_allows_a_mesh_of_another_size():
    job = two_replicas(low=1)
    lost(job, "a", "c")
    job.stops("b", "d")
    job.passes(6.0, alive="bd")
    job.breaks("d")
    job.passes(0.2, alive="b")
    job.stops("b")
    assert [member.node_id for member in job.persisted[-1].world.members] == ["b"]


@pytest.mark.parametrize("part", [0, 1])
def test_a_new_coordinator_continues_levelling_a_world(part):
    before = two_replicas()
    lost(before, "a")
    after = Driver(before.spec, before.persisted[-1], store_backed=True)
    after.assigned |= before.assigned
    fence = before.assigned["b"].fence
    for node_id, held in (("b", 1), ("c", 0), ("d", 1)):
        level = fence if held == part else None
        sharding = Sharding(span=2, part=held, level=level)
        holding = before.holding(node_id, able=(0, 1), in_place=True, sharding=sharding)
        after.join(node_id, holding=holding)
    assert regrouped(after, "b") == (Fence(3, 0), 0, (0, 1), 4)


def test_level_workers_are_not_interrupted_before_all_of_their_world_can_be_regrouped():
    """A node whose workers are of an older world holds a slice while they stop."""
    before = two_replicas()
    job = Driver(job_spec(2, 4, 1))
    for node_id in "bcd":
        job.join(node_id)
    job.passes(4.0, alive="bcd")
    job.fails("b"), job.stops("b", "c", "d")
    sharding = Sharding(span=2, part=0)
    job.join("a", holding=before.holding("a", able=(0, 1), in_place=True, sharding=sharding))
    assert Stop in kinds(job, "a"), kinds(job, "a")
    job.inbox.clear()
    says(job, "b", NO_SLICE, level=job.assigned["b"].fence)
    job.passes(1.0, alive="abcd")
    assert not any(kinds(job, each) for each in "bcd")
    says(job, "c", NO_SLICE), says(job, "d", NO_SLICE)
    assert [kinds(job, each)[:2] for each in "bc"] == [[Interrupt, Assign]] * 2


def test_a_first_world_without_whole_replicas_begins_again_once_enough_nodes_are_there():
    """Its workers have no state yet. One of the two has not reported that it can recover."""
    job = Driver(job_spec(1, 2, 0))
    job.join("a")
    job.passes(4.0, alive="a")
    says(job, "a", NO_SLICE, level=job.assigned["a"].fence, workers=(0,))
    assert kinds(job, "a")[-1] is Stop
    job.stops("a"), job.passes(30.0, alive="a")
    assert job.phase == "forming", "one node is too few now"
    job.join("b")
    assert [regrouped(job, each)[3] for each in "ab"] == [4, 4]
    assert not job.assigned["a"].in_place
    assert job.persisted[-1].restarts_used == 0
