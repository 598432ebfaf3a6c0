"""Workers of sharded state take part by whole nodes: none is left out, and none comes alone."""

from core_driver import Driver, job_spec
from test_core_agent import FENCE, Agent
from test_core_regroup import able, dies, in_place, kinds, regrouped

from elastane.core.events import GroupAble, Linked, Unlinked
from elastane.core.messages import Able, Assign, Drain, Interrupt, Join, Prepare
from elastane.core.model import Fence, Offer
from elastane.core.notes import EventKind


def whole_nodes(**more):
    job = in_place(**more)
    able(job, *more.get("nodes", "ab"), whole=True)
    job.inbox.clear()
    return job


def test_others_wait_for_the_successor_of_a_lost_worker_whatever_the_minimum():
    job = whole_nodes(low=1, min_workers=1)
    dies(job, "a", local_rank=1)
    assert kinds(job, "b") == [Interrupt] and kinds(job, "a") == [Interrupt, Prepare]
    (waiting,) = [note.reason for note in job.notes if note.kind is EventKind.WAITING]
    assert waiting.startswith("3 of at least 4 workers are left")
    able(job, "a", workers=(0,), whole=True)
    assert kinds(job, "b") == [Interrupt]
    able(job, "a", whole=True)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 4)


def test_they_do_not_wait_for_a_node_that_is_lost_meanwhile():
    job = whole_nodes(low=1)
    dies(job, "a", local_rank=1)
    job.breaks("a")
    job.passes(0.2, alive="b")
    assert regrouped(job, "b") == (Fence(2, 0), 0, (0, 1), 2)


def test_a_node_that_arrives_is_taken_in_once_all_its_workers_are_there():
    job = whole_nodes(nodes="a", high=2)
    job.join("b")
    job.passes(6.0, alive="ab")
    able(job, "b", workers=(0,), whole=True)
    job.passes(6.0, alive="ab")
    assert Drain not in kinds(job, "a")
    able(job, "b", whole=True)
    job.passes(6.0, alive="ab")
    assert kinds(job, "a")[-1] is Drain


def test_nobody_waits_for_the_rest_of_a_node_that_arrives():
    job = whole_nodes(nodes="ab")
    job.join("c")
    job.passes(6.0, alive="abc")
    able(job, "c", workers=(0,), whole=True)
    job.breaks("b")
    job.passes(0.2, alive="ac")
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0, 1), 2)


def test_another_coordinator_learns_it_from_the_agents():
    before = whole_nodes(low=1)
    after = Driver(job_spec(1, 3, 3), record=before.persisted[-1])
    for node_id in "ab":
        holding = before.holding(node_id, able=(0, 1), in_place=True, whole=True)
        after.assigned[node_id] = before.assigned[node_id]
        after.join(node_id, holding=holding)
    after.inbox.clear()
    dies(after, "a", local_rank=1)
    assert Assign not in kinds(after, "b")


def test_an_agent_says_it_and_brings_it_along():
    agent = Agent().running()
    agent.does(GroupAble(FENCE, (0, 1), Offer(7200, True), whole=True))
    assert agent.sent(Able)[0].whole
    agent.does(GroupAble(FENCE, (0,), Offer(7200, True)))
    assert agent.sent(Able)[0].whole
    agent.does(Unlinked("EOF"))
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.whole
