"""Fixtures of the tests of coordinator and agent rules."""

import pytest
from coordinator_driver import Driver, job_spec


@pytest.fixture
def driver():
    """Make a Driver: driver(spec=..., record=...)."""
    return Driver


@pytest.fixture
def pair():
    """Two nodes of a fixed-size job of two, in training."""
    running = Driver()
    running.join("a")
    running.join("b")
    assert running.phase == "running"
    return running


@pytest.fixture
def elastic():
    """Two nodes, a and b, in training, in a job of one to four."""
    running = Driver(job_spec(1, 4))
    running.join("a")
    running.join("b")
    running.passes(3.1, alive="ab")
    assert running.phase == "running"
    return running
