"""The agent's rules at their edges: what it says once, and what it brings along."""

from test_agent_rules import FENCE, Agent

from elastane.protocol.effects import Exit, MarkGroup, ReleaseGroup, Transmit
from elastane.protocol.events import (
    GroupAble,
    GroupDrained,
    GroupMarked,
    GroupWroteCheckpoint,
    Linked,
    Signalled,
    Unlinked,
    Warm,
)
from elastane.protocol.messages import (
    Able,
    CallOff,
    Checkpointed,
    Drain,
    Drained,
    DrainTarget,
    Join,
    Ready,
    Report,
)
from elastane.protocol.model import Fence, Joining, PortOffer, Sharding

WHOLE, SOLE = Sharding(), Sharding(sole=True)


def test_an_agent_is_warm_once_and_says_so_once():
    agent = Agent()
    agent.does(Warm())
    assert agent.sent(Ready)
    agent.does(Warm())
    assert not agent.sent(Ready)


def test_a_status_report_that_an_agent_did_not_ask_for_is_passed_over():
    agent = Agent().running()
    report = Report(
        job="j", phase="running", reason="", fence=None, min_nodes=1, max_nodes=1, world_size=1,
        restarts_used=0, max_restarts=0, uptime_s=1.0, nodes=(),
    )  # fmt: skip
    assert not [e for e in agent.told(report) if isinstance(e, Transmit | Exit)]


def test_an_agent_leaves_once():
    agent = Agent(linked=False)
    agent.does(Signalled("SIGTERM"))
    ends = [e for e in agent.effects if isinstance(e, Exit)]
    again = [e for e in agent.does(Unlinked("still away")) if isinstance(e, Exit)]
    assert len(ends) == 1 and not again


def test_an_agent_says_it_and_brings_it_along():
    agent = Agent().running()
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(7200, True), sharding=WHOLE))
    assert agent.sent(Able)[0].sharding == WHOLE
    agent.does(GroupAble(FENCE, (0,), PortOffer(7200, True)))
    assert agent.sent(Able)[0].sharding == WHOLE
    agent.does(Unlinked("EOF"))
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.sharding == WHOLE


def test_an_agent_says_when_others_can_join_its_workers_as_they_last_reported():
    agent = Agent().running()
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(7200, True), joining=Joining.NEVER))
    assert agent.sent(Able)[0].joining is Joining.NEVER
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(7200, True), joining=Joining.PLANNED))
    assert agent.sent(Able)[0].joining is Joining.PLANNED
    agent.does(Unlinked("EOF"))
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.joining is Joining.PLANNED


def test_an_agent_reports_a_checkpoint_under_the_fence_of_the_world():
    agent = Agent().running()
    agent.does(GroupWroteCheckpoint(FENCE, "run/last.pt"))
    assert agent.sent(Checkpointed) == [Checkpointed(FENCE, "run/last.pt")]
    agent.does(GroupWroteCheckpoint(Fence(0, 7)))  # of a group that no longer exists
    assert not agent.sent(Checkpointed)


def test_an_agent_updates_whether_its_workers_are_sole_holders():
    agent = Agent().running()
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(7200, True), SOLE))
    assert agent.sent(Able)[0].sharding.sole
    agent.does(Unlinked("EOF"))
    agent.does(Linked())
    assert agent.sent(Join)[0].holding.sharding.sole
    agent.does(GroupAble(FENCE, (0, 1), PortOffer(7200, True), WHOLE))
    assert not agent.sent(Able)[0].sharding.sole


def test_a_drain_that_is_called_off_opens_the_gates_and_another_may_follow():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, timeout_s=30.0, reason="growth"))
    agent.does(GroupMarked(FENCE, 7))
    agent.told(DrainTarget(fence=FENCE, calls=8, stops=True))
    assert agent.told(CallOff(FENCE)) == [ReleaseGroup(FENCE)]
    agent.does(GroupDrained(FENCE, True))  # crossed with it
    assert not agent.sent(Drained)
    assert MarkGroup(FENCE) in agent.told(Drain(fence=FENCE, timeout_s=30.0, reason="again"))
