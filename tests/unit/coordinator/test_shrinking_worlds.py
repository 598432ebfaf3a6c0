"""Worlds that only shrink in place: survivors alone follow, and none is replaced."""

from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, dies, kinds, regrouped

from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Assign, Interrupt, Prepare, Stop
from elastane.protocol.model import Fence


def shrinking(low=1, high=3, nodes="ab", restarts=3, **more):
    """A running world of nodes with two workers each, of an unmodified script."""
    job = Driver(job_spec(low, high, restarts, **more))
    for node_id in nodes:
        job.join(node_id)
    job.passes(4.0, alive=nodes)
    able(job, *nodes, shrinks_only=True)
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
    waiting = [event.reason for event in job.events if event.kind == EventKind.WAITING]
    assert any(reason.startswith("continues with 3 of 4 workers") for reason in waiting), waiting


def test_a_worker_that_was_left_out_does_not_come_back_in_place():
    job = shrinking(min_workers=1)
    dies(job, "a", local_rank=0)
    able(job, "a", workers=(0, 1), shrinks_only=True), able(job, "b", shrinks_only=True)
    dies(job, "b", local_rank=1)
    assert regrouped(job, "a")[1:] == (0, (1,), 2) and regrouped(job, "b")[1:] == (1, (0,), 2)


def test_a_node_that_arrives_gets_no_standby():
    job = shrinking(min_workers=1)
    job.join("c")
    job.passes(5.0, alive="abc")
    assert Prepare not in kinds(job, "c") and job.machine.phase == "running"


def test_too_few_survivors_restart_at_once():
    job = shrinking(low=2, high=2)
    dies(job, "a", local_rank=1)
    assert Stop in kinds(job, "a") and Stop in kinds(job, "b")
    assert Prepare not in kinds(job, "a")
