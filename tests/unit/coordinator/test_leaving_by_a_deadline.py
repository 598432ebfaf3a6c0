"""A node has to leave by a deadline, which also bounds the drain of the others."""

import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_recovery import able, regrouped

from elastane.protocol.limits import LEAVE_MARGIN_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Drain, Interrupt, Leave


def running():
    """Two nodes that recover in place, with the usual 30 s for a drain."""
    job = Driver(job_spec(1, 2))
    for node_id in "ab":
        job.join(node_id)
    job.passes(4.0, alive="ab")
    able(job, "a", "b")
    job.inbox.clear()
    return job


def leaves(job, within_s):
    job.says("b", Leave("notice of aws", within_s))
    assert job.phase == "draining" and job.got("b", Drain)


def ends_after(job, most_s):
    begun_s = job.now_s
    while job.phase == "draining" and job.now_s < begun_s + most_s:
        job.passes(0.1, alive="ab")
    return job.now_s - begun_s


@pytest.mark.parametrize(("within_s", "takes_s"), [(10.0, 10.0 - LEAVE_MARGIN_S), (2.0, 1.5)])
def test_a_drain_ends_before_the_deadline_of_the_node_that_leaves(within_s, takes_s):
    job = running()
    leaves(job, within_s)
    assert ends_after(job, 40.0) == pytest.approx(takes_s, abs=0.25)
    assert (
        "did not checkpoint"
        in [e for e in job.events if e.kind == EventKind.DRAIN_ENDED][-1].reason
    )
    assert job.got("a", Interrupt)


@pytest.mark.parametrize("within_s", [None, 1000.0])
def test_without_a_near_deadline_a_drain_takes_its_usual_time(within_s):
    job = running()
    leaves(job, within_s)
    assert ends_after(job, 40.0) == pytest.approx(30.0, abs=0.25)


def test_a_deadline_that_is_sooner_ends_a_drain_that_has_begun():
    job = running()
    leaves(job, None)
    job.passes(5.0, alive="ab")
    job.says("b", Leave("notice of aws", 4.0))
    assert ends_after(job, 40.0) == pytest.approx(3.0, abs=0.25)


def test_a_drain_that_reaches_its_boundary_does_not_wait_for_the_deadline():
    job = running()
    leaves(job, 10.0)
    for node_id in "ab":
        job.marks(node_id, 7)
    for node_id in "ab":
        job.drains(node_id)
    assert regrouped(job, "a") and job.phase != "draining"
