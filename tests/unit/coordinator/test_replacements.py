"""Lost workers are replaced, even if a report or the request for a replacement was lost."""

import msgspec
import pytest
from coordinator_driver import Driver, job_spec
from test_in_place_crossings import NEXT, Agent, failure, holding
from test_in_place_recovery import able, dies, in_place, kinds, regrouped

from elastane.protocol.effects import RegroupWorkers, StartWorkers
from elastane.protocol.events import MessageReceived
from elastane.protocol.messages import Assign, Failed, Holding, Prepare
from elastane.protocol.model import Fence

# Without the worker of local rank 1, whose successor is not ready.
WITHOUT = msgspec.structs.replace(NEXT, workers=(0,))


@pytest.mark.parametrize("ends", [True, False])
def test_a_replacement_that_ends_during_a_commit_is_reported_in_the_new_world(ends):
    agent = Agent()
    agent.fails(1)
    agent.does(MessageReceived(Prepare(assignment=NEXT, successors=True)))
    assert [e for e in agent.effects if isinstance(e, StartWorkers)]
    if ends:
        agent.fails(1, pid=51)
    agent.effects.clear()
    agent.does(MessageReceived(Assign(WITHOUT)))
    told = [(m.fence, [f.pid for f in m.failures]) for m in agent.sent(Failed)]
    assert told == ([(Fence(2, 0), [51])] if ends else [])
    assert agent.holding().state == "running"


def test_a_replacement_gets_no_place_in_a_world_that_counts_its_predecessor():
    """It becomes able later, and would train in a world that is about to be replaced."""
    agent = Agent()
    agent.fails(1)
    agent.does(MessageReceived(Prepare(assignment=NEXT, successors=True)))
    agent.effects.clear()
    agent.does(MessageReceived(Assign(NEXT)))
    (given,) = [e for e in agent.effects if isinstance(e, RegroupWorkers)]
    assert given.able == (0,) and given.assignment.workers == (0, 1)
    assert [f.local_rank for f in agent.sent(Failed)[-1].failures] == [1]


def test_a_replacement_without_a_place_is_replaced():
    job = in_place(nodes="ab", min_workers=1)
    dies(job, "a", local_rank=1)
    assert regrouped(job, "a") == (Fence(2, 0), 0, (0,), 3)
    job.inbox.clear()
    job.says("a", Failed(fence=Fence(1, 0), failures=(failure(1, 51),)))
    assert not kinds(job, "a"), "it is of a world before this one"
    job.says("a", Failed(fence=Fence(2, 0), failures=(failure(1, 51),)))
    assert kinds(job, "a") == [Prepare]
    assert job.persisted[-1].restarts_used == 2


def test_a_lost_request_for_a_replacement_is_repeated():
    """The request was lost with the session, and the node had departed before it came back."""
    job = Driver(job_spec(1, 1, 3), store_backed=True)
    job.join("a")
    job.passes(4.0, alive="a")
    able(job, "a")
    dies(job, "a", local_rank=1)
    job.breaks("a")
    job.passes(0.5)
    assert "a" not in job.machine._state.roster.nodes and job.machine.phase == "forming"
    job.inbox.clear()
    lost = {"failures": (failure(1, 4242),), "state": "failed", "able": (0,)}
    job.join("a", holding=holding(job, "a", **lost))
    assert kinds(job, "a").count(Prepare) == 1
    assert job.persisted[-1].restarts_used == 1, "it was paid for"
    able(job, "a")
    assert job.assigned["a"].fence == Fence(2, 0) and job.assigned["a"].workers == (0, 1)


def test_the_request_is_repeated_if_the_node_missed_its_assignment_too():
    job = Driver(job_spec(1, 2, 3, min_workers=1), store_backed=True)
    job.join("a"), job.join("b")
    job.passes(4.0, alive="ab")
    able(job, "a", "b")
    first = job.assigned["a"]
    dies(job, "b", local_rank=1)
    assert job.assigned["b"].fence == Fence(2, 0)
    after = Driver(job.spec, job.persisted[-1], store_backed=True)
    after.assigned = dict(job.assigned)
    # It had told of this end before it departed.
    after.machine._state.roster.departed_lost_pids["a"] = ("1", {1: 77})
    lost = {"failures": (failure(1, 77),), "state": "failed", "able": (0,)}
    after.join("a", holding=Holding(assignment=first, **lost))
    after.join("b", holding=holding(after, "b", able=(0,)))
    assert kinds(after, "a").count(Prepare) == 1


def test_the_request_is_repeated_once_the_world_is_known_to_recover_in_place():
    before = in_place()
    before.join("c"), before.warms("c")
    beside = before.got("c", Prepare)[-1].assignment
    job = Driver(job_spec(1, 3, 3))
    job.join("a")
    job.passes(4.0, alive="a")
    job.machine._state.roster.departed_lost_pids["c"] = ("1", {1: 77})
    lost = {"failures": (failure(1, 77),), "state": "failed", "able": (0,), "in_place": True}
    job.join("c", holding=Holding(assignment=beside, **lost))
    assert not kinds(job, "c").count(Prepare)
    able(job, "a")
    assert kinds(job, "c").count(Prepare) == 1


def test_a_standby_gets_the_size_of_the_world_with_the_workers_of_its_node():
    job = in_place(min_workers=1, nodes="ab", high=3)
    job.join("c")
    job.passes(0.1, alive="abc")
    assert job.got("c", Prepare)[-1].assignment.world_size == 4 + 2
    dies(job, "a", local_rank=0)
    assert job.got("a", Prepare)[-1].assignment.world_size == 4 + 1


def test_replacements_may_take_longer_to_start_than_a_lost_node_is_waited_for():
    timing = {"join_timeout_s": 30.0, "rejoin_timeout_s": 5.0}
    job = in_place(low=2, high=2, nodes="ab", timing=timing)
    dies(job, "b", 0)
    job.passes(20.0, alive="ab")
    assert job.phase == "regrouping" and "30 s at most" in job.machine.report().reason
    job.breaks("b")
    job.passes(6.0, alive="a")
    outcome = job.persisted[-1].outcome
    assert outcome.slug == "rdzv-timeout"
    assert outcome.reason.startswith(
        "rendezvous: 2 of at least 4 workers were ready within 5 s (present: a; before: worker of"
    )
    assert outcome.next_step.startswith("start the missing nodes with the same command")
    assert "rejoin_timeout" in outcome.next_step


def test_replacements_that_do_not_start_are_named_as_what_is_missing():
    timing = {"join_timeout_s": 30.0, "rejoin_timeout_s": 5.0}
    job = in_place(low=2, high=2, nodes="ab", timing=timing)
    dies(job, "b", 0)
    job.passes(31.0, alive="ab")
    outcome = job.persisted[-1].outcome
    assert (
        "3 of at least 4 workers were ready within 30 s (present: a, b; before:" in outcome.reason
    )
    assert outcome.next_step.startswith("find in the logs why the replacements did not start")
    assert "join_timeout=SECONDS" in outcome.next_step and "rejoin" not in outcome.next_step
