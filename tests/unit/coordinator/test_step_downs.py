"""When a coordinator that too few nodes reach steps down, and what its waits add up to."""

import pytest
from coordinator_driver import Driver, job_spec

from elastane.coordinator.rules.step_downs import StepDowns
from elastane.protocol.limits import Timing
from elastane.protocol.model import Fence

WORLD = Fence(4, 0)


def step_downs(join_timeout_s=600.0):
    return StepDowns(Timing(join_timeout_s=join_timeout_s))


def due_s(steps, world=WORLD):
    """Return after how many whole seconds a coordinator steps down."""
    return next(s for s in range(1000) if steps.is_due(world, float(s)))


def test_a_coordinator_that_leads_again_waits_twice_as_long_up_to_a_tenth_of_join_timeout():
    steps, waits = step_downs(), []
    for _ in range(6):
        waits.append(due_s(steps))
        steps.note(WORLD, float(waits[-1]), 1000.0)
    assert waits == [5, 10, 20, 40, 60, 60]


def test_a_short_join_timeout_leaves_the_first_wait():
    steps = step_downs(join_timeout_s=20.0)
    assert due_s(steps) == 5
    steps.note(WORLD, 5.0, 100.0)
    assert due_s(steps) == 5


def test_another_world_and_another_coordinator_begin_anew():
    steps = step_downs()
    steps.note(WORLD, 5.0, 100.0)
    assert steps.stands_later and due_s(steps) == 10
    assert due_s(steps, Fence(5, 0)) == 5
    assert steps.waited_s(Fence(5, 0), 120.0) == 0.0
    steps.note(Fence(5, 0), 5.0, 200.0)
    assert steps.waited_s(Fence(5, 0), 210.0) == 15.0
    steps.forget()
    assert not steps.stands_later and due_s(steps, Fence(5, 0)) == 5
    assert steps.waited_s(Fence(5, 0), 220.0) == 0.0


def test_the_waits_of_all_terms_of_a_shortage_are_counted():
    steps = step_downs()
    assert steps.waited_s(WORLD, 90.0) == 0.0
    steps.note(WORLD, 5.0, 100.0)
    assert steps.waited_s(WORLD, 102.0) == 7.0
    steps.note(WORLD, 10.0, 112.0)
    assert steps.waited_s(WORLD, 114.0) == 19.0


@pytest.mark.parametrize(("waited_s", "left_s"), [(0.0, 600.0), (500.0, 100.0)])
def test_what_former_terms_waited_counts_against_join_timeout(waited_s, left_s):
    first = Driver(job_spec(2, 2))
    first.join("a")
    first.join("b")
    job = Driver(job_spec(2, 2), first.persisted[-1], store_backed=True, waited_s=waited_s)
    job.join("a")
    job.passes(5.0, alive="a")
    assert job.events[-1].reason.endswith(f"waits for 1 more, {left_s:g} s at most")
    job.passes(left_s - 10.0, alive="a")
    assert job.finished is None and job.phase == "forming"
    job.passes(10.0, alive="a")
    assert job.phase == "closing"


def test_a_world_ends_the_waits_of_former_terms():
    first = Driver(job_spec(2, 2))
    first.join("a")
    first.join("b")
    job = Driver(job_spec(2, 2), first.persisted[-1], store_backed=True, waited_s=599.0)
    job.join("a")
    job.join("b")
    job.passes(2.0, alive="ab")
    job.breaks("b")
    job.passes(1.0, alive="a")
    job.stops("a")
    job.passes(5.0, alive="a")
    assert job.events[-1].reason.endswith("waits for 1 more, 600 s at most")
