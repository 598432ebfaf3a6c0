"""Rare cases of the rules."""

import msgspec
from coordinator_driver import Driver, job_spec
from test_in_place_crossings import FIRST, NEXT, Agent
from test_in_place_recovery import in_place

from elastane.protocol.diagnosis import (
    OUTCOME_FAILURE_CHARS_MAX,
    OUTCOME_FAILURES_WHOLE,
    Sighting,
    failures_in_order,
)
from elastane.protocol.effects import Decline, InterruptGroup, StartGroup, StartWorkers
from elastane.protocol.events import GroupGone, MessageReceived, Signalled, Tick
from elastane.protocol.messages import (
    Assign,
    Drain,
    Drained,
    DrainTarget,
    Holding,
    Interrupt,
    Marked,
    Prepare,
    Stop,
)
from elastane.protocol.model import Failure, Fence, PortOffer


def test_the_first_failures_are_reported_whole_and_further_ones_shortened():
    seen = [
        Sighting(
            node_id=f"n{i}",
            at_s=float(i),
            failure=Failure(local_rank=0, rank=i, pid=i, exit_code=1, message="x" * 2000 + str(i)),
        )
        for i in range(OUTCOME_FAILURES_WHOLE + 2)
    ]
    lengths = [len(one.failure.message) for one in failures_in_order(seen, 100.0)]
    assert lengths == [2001] * OUTCOME_FAILURES_WHOLE + [OUTCOME_FAILURE_CHARS_MAX] * 2


def aims(job, node_id):
    return [(m.calls, m.stops) for m in job.got(node_id, DrainTarget)]


def test_workers_in_place_checkpoint_where_the_last_of_them_leave():
    job = in_place(nodes="a")
    job.leaves("a"), job.marks("a", 4)
    assert aims(job, "a") == [(5, True)]
    job.drains("a")
    assert job.got("a", Stop) and not job.got("a", Interrupt)


def test_a_drain_with_survivors_needs_no_checkpoint():
    job = in_place(nodes="ab")
    job.leaves("b"), job.marks("a", 4), job.marks("b", 4)
    assert aims(job, "a") == aims(job, "b") == [(5, False)]


def test_if_the_others_leave_too_all_checkpoint_where_they_wait():
    job = in_place(nodes="ab")
    job.leaves("b"), job.marks("a", 4), job.marks("b", 4)
    job.drains("b"), job.leaves("a"), job.drains("a")
    assert aims(job, "a") == aims(job, "b") == [(5, False), (5, True)]
    assert not job.got("a", Stop)
    job.drains("a")
    assert not job.got("a", Stop)
    job.drains("b")
    assert job.got("a", Stop) and job.got("b", Stop)


def test_workers_that_have_begun_no_step_are_not_asked_twice():
    job = in_place(nodes="ab")
    job.leaves("b"), job.marks("a", None), job.marks("b", None)
    job.leaves("a"), job.drains("a")
    assert aims(job, "a") == [(None, False)]


def gone():
    agent = Agent()
    agent.does(GroupGone(Fence(1, 0), PortOffer(7100, True)))
    return agent


def did(agent, *kinds):
    return [type(effect) for effect in agent.effects if isinstance(effect, kinds)]


def test_a_place_for_ended_workers_is_declined():
    agent = gone()
    agent.does(MessageReceived(Assign(NEXT)))
    assert did(agent, Decline, StartGroup) == [Decline]


def test_an_agent_that_ends_starts_nothing_and_declines_nothing():
    agent = Agent()
    agent.does(Signalled("SIGTERM"))
    agent.does(Signalled("SIGTERM"))
    agent.does(MessageReceived(Prepare(assignment=NEXT)))
    assert did(agent, StartGroup, StartWorkers) == []
    agent.does(GroupGone(Fence(1, 0), PortOffer(7100, True)))
    for message in (Prepare(assignment=NEXT), Assign(NEXT)):
        agent.does(MessageReceived(message))
        assert did(agent, StartGroup, StartWorkers, Decline) == []


def test_a_drain_of_workers_that_are_gone_or_of_another_world_is_not_answered():
    for agent, fence in ((gone(), FIRST.fence), (Agent(), Fence(9, 0))):
        agent.does(MessageReceived(Drain(fence=fence, drain=1, timeout_s=1.0, reason="x")))
        assert not agent.sent(Marked)


def test_a_drain_of_workers_of_whom_one_has_failed_is_answered_at_once():
    agent = Agent()
    agent.fails(0)
    agent.does(MessageReceived(Drain(fence=FIRST.fence, drain=1, timeout_s=1.0, reason="x")))
    assert [m.calls for m in agent.sent(Marked)] == [None] and agent.sent(Drained)


def test_an_interrupt_of_another_world_or_of_stopping_workers_is_ignored():
    agent = Agent()
    agent.does(MessageReceived(Interrupt(fence=Fence(9, 0), reason="x")))
    agent.does(MessageReceived(Stop(fence=FIRST.fence, grace_s=1.0, reason="x")))
    agent.does(MessageReceived(Interrupt(fence=FIRST.fence, reason="x")))
    assert did(agent, InterruptGroup) == []


def test_how_long_a_job_has_been_short_of_nodes_counts_after_its_first_world_alone():
    job = Driver(job_spec(2, 2))
    job.join("a")
    job.passes(5.0, alive="a")
    assert job.machine.short_of_nodes_s == 0.0
    job.join("b")
    assert job.machine.short_of_nodes_s == 0.0
    job.breaks("b")
    job.passes(0.2, alive="a")
    job.stops("a")
    job.passes(3.0, alive="a")
    assert 2.5 < job.machine.short_of_nodes_s < 3.5


def test_a_coordinator_whose_job_is_over_does_nothing_more():
    job = Driver(job_spec(1, 1))
    job.join("a")
    job.passes(0.1, alive="a")
    job.succeeds("a")
    job.breaks("a")
    job.passes(10.0)
    assert job.phase == "closed" and job.finished is not None
    job.join("b")
    job.now_s += 1.0
    assert job.handle(Tick()) == []


def test_a_job_is_elastic_where_its_number_of_nodes_may_change():
    assert job_spec(1, 2).is_elastic and not job_spec(2, 2).is_elastic


def test_workers_that_wait_for_a_place_are_no_survivors():
    node = Driver(job_spec(1, 1))
    node.join("a")
    node.passes(0.1, alive="a")
    found = node.machine._state.roster.nodes["a"]
    found.workers.recover({0, 1})
    assert found.survivors == (0, 1)
    found.become_standby()
    assert found.survivors == ()


def test_a_world_that_was_not_the_last_is_forgotten_though_its_holder_is_gone():
    job = Driver(job_spec(1, 3))
    later = msgspec.structs.replace(FIRST, fence=Fence(2, 0))
    job.join("x", holding=Holding(assignment=FIRST, state="running"))
    job.breaks("x")
    job.passes(0.3)
    job.join("y", holding=Holding(assignment=later, state="running"))
    assert job.machine._state.worlds.unrecorded.fence == Fence(2, 0)


def test_workers_that_were_all_stopped_are_not_replaced():
    """The coordinator does not know that yet; it will soon, and then starts all workers again."""
    agent, beside = gone(), msgspec.structs.replace(NEXT, waiting=True)
    agent.does(MessageReceived(Prepare(assignment=beside, successors=True)))
    agent.does(MessageReceived(Assign(msgspec.structs.replace(NEXT, in_place=False))))
    (started,) = [e.assignment for e in agent.effects if isinstance(e, StartGroup)]
    assert not started.waiting
