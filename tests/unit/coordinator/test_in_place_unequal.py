"""Recovery in place with unequal nodes, and with nodes that missed the end of a world."""

import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_crossings import holding
from test_in_place_recovery import able, dies, kinds, regrouped

from elastane.protocol.messages import Interrupt
from elastane.protocol.model import Fence


def unequal(low, high=3, **sizes):
    """Return a running world of nodes with these numbers of workers, all able in place."""
    job = Driver(job_spec(low, high, 3))
    for node_id, size in sizes.items():
        job.join(node_id, size=size)
    job.passes(4.0, alive=sizes)
    for node_id, size in sizes.items():
        able(job, node_id, workers=tuple(range(size)))
    job.inbox.clear()
    return job


def test_a_job_without_spare_nodes_continues_with_all_workers_of_unequal_nodes():
    job = unequal(2, 2, a=1, b=2)
    dies(job, "b", local_rank=1)
    assert kinds(job, "a") == [Interrupt]
    able(job, "b", workers=(0, 1))
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0,), 3)
    assert regrouped(job, "b") == (Fence(2, 0), 1, (0, 1), 3)


@pytest.mark.parametrize(("lost", "settles"), [("", True), ("b", False)])
def test_the_least_number_of_workers_is_that_of_the_smallest_sufficient_nodes(lost, settles):
    job = unequal(2, a=1, b=2, c=3)
    if lost:
        job.breaks(lost)
    dies(job, "c")
    job.passes(1.0, alive={*"abc"} - {lost})
    # Five of six workers are left, and the smaller two nodes have three; then three, of four.
    assert (job.assigned["c"].fence.round > 1 + bool(lost)) is settles


@pytest.mark.parametrize("halted", ["", "b departed"])
def test_a_node_that_returns_while_others_wait_learns_that_the_world_has_ended(halted):
    """Otherwise its workers might continue, since the message was lost with its session."""
    job = unequal(2, 2, a=2, b=2)
    job.breaks("b")
    job.passes(0.2, alive="a")
    assert job.machine.phase == "regrouping"
    job.join("a", holding=holding(job, "a", halted=halted))
    told = [m for m in job.inbox["a"] if isinstance(m, Interrupt)]
    assert len(told) == (2 if not halted else 1)
    assert {m.fence for m in told} == {Fence(1, 0)} and "b departed" in told[-1].reason
