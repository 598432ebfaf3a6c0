"""Which copies of the state survive the loss of a worker, of a node, of all nodes."""

import pytest
from coordinator_driver import Driver, job_spec

from elastane.protocol.events import Tick
from elastane.protocol.messages import Heartbeat, NodeCopies, StateCopy


def copy(step, age_s):
    return StateCopy(step=step, age_s=age_s, took_s=0.1)


def reported(*copies):
    """Return a coordinator with these copies, reported by nodes a, b, ..."""
    job, names = Driver(job_spec(low=len(copies), high=len(copies))), "abc"[: len(copies)]
    for node_id in names:
        job.join(node_id)
    for node_id, each in zip(names, copies, strict=True):
        job.says(node_id, Heartbeat(copies=each))
    return job


def steps(safe):
    return [each and each.step for each in (safe.worker, safe.node, safe.job)]


def test_replicated_state_on_two_nodes_survives_the_loss_of_one():
    newer, older = NodeCopies(memory=copy(9, 1.0)), NodeCopies(memory=copy(8, 3.0))
    assert steps(reported(older, newer).machine.report().safe) == [9, 8, None]
    assert steps(reported(newer).machine.report().safe) == [9, None, None]
    assert steps(reported(newer, NodeCopies()).machine.report().safe) == [9, None, None]


def test_the_oldest_part_of_sharded_state_counts_and_no_part_may_be_missing():
    def part(step, age_s, replica=None):
        return NodeCopies(memory=copy(step, age_s), replica=replica, replicated=False)

    whole = reported(part(9, 1.0, copy(7, 5.0)), part(8, 3.0, copy(6, 8.0)))
    assert steps(whole.machine.report().safe) == [8, 6, None]
    lacks = reported(part(9, 1.0, copy(7, 5.0)), part(8, 3.0))
    assert steps(lacks.machine.report().safe) == [8, None, None]
    assert steps(reported(part(9, 1.0), None).machine.report().safe) == [None, None, None]


def test_any_node_may_know_the_newest_checkpoint():
    first = NodeCopies(storage=copy(4, 20.0))
    assert steps(reported(first, NodeCopies(storage=copy(5, 9.0))).machine.report().safe)[2] == 5


def test_a_copy_grows_older_while_its_node_is_not_heard():
    job = reported(NodeCopies(memory=copy(9, 1.5)))
    job.now_s += 0.25
    job.handle(Tick())
    assert job.machine.report().safe.worker.age_s == pytest.approx(1.75)
