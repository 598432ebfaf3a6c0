"""The checks of the frameworks' benchmark on a job whose workers it has killed."""

from bench.frameworks import faults
from bench.trainers import Commit


def made(*steps, digests=None):
    """Return the record of one worker: its steps, with digests of its weights after them."""
    return [
        Commit(float(step), step, 4, 0, 0, digest=(digests or {}).get(step, f"after {step}"))
        for step in steps
    ]


def test_equal_steps_of_workers_that_come_and_go_are_no_fault():
    assert faults({1: made(1, 2, 3), 2: made(1, 2), 3: made(3)}, lost={2}) == []


def test_a_step_that_a_survivor_made_twice_or_left_out_is_a_fault():
    assert faults({1: made(1, 2, 2)}, lost=()) == ["process 1 made step 2 after step 2"]
    assert faults({1: made(1, 3)}, lost=()) == ["process 1 made step 3 after step 1"]


def test_weights_that_differ_after_a_step_are_a_fault():
    differs = {1: made(1, 2, 3), 2: made(1, 2, 3, digests={2: "other"})}
    assert faults(differs, lost=()) == ["REPLICAS DIFFER after steps [2]"]


def test_only_the_last_step_of_a_killed_worker_may_differ():
    other = {3: "with the share of the one that is lost"}
    last = {1: made(1, 2, 3), 2: made(1, 2, 3, digests=other)}
    assert faults(last, lost={2}) == []
    assert faults(last, lost=()) == ["REPLICAS DIFFER after steps [3]"]
    earlier = {1: made(1, 2, 3, 4), 2: made(1, 2, 3, 4, digests=other)}
    assert faults(earlier, lost={2}) == ["REPLICAS DIFFER after steps [3]"]
