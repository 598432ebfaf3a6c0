"""Edges of the agent's rules: messages that it sends once, and facts that it registers with."""

from test_agent_rules import FENCE, Agent

from elastane.protocol.culprits import ProcessFacts, StandstillEvidence
from elastane.protocol.effects import (
    AimGroup,
    EndGroupWorker,
    Exit,
    InterruptGroup,
    MarkGroup,
    ReleaseGroup,
    ShowGroupStacks,
    Transmit,
)
from elastane.protocol.events import (
    CulpritFound,
    GroupAble,
    GroupCalls,
    GroupDrained,
    GroupMarked,
    GroupStandstill,
    GroupWroteCheckpoint,
    Linked,
    Signalled,
    Unlinked,
    Warm,
    WorkerStacks,
)
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import (
    Able,
    AwaitedWorker,
    CallOff,
    Checkpointed,
    Drain,
    Drained,
    DrainTarget,
    EndWorker,
    Interrupt,
    Join,
    LastCalls,
    Marked,
    Ready,
    Report,
    ShowStacks,
    StandstillReport,
)
from elastane.protocol.model import Fence, Joining, PortOffer, Sharding
from elastane.protocol.ring import WorkerCalls
from elastane.protocol.verdicts import Kind, Verdict

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


def test_an_agent_reports_the_sharding_of_its_workers_and_registers_with_it():
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
    agent.does(GroupWroteCheckpoint(FENCE, "run/2.pt", resumed=True))
    assert agent.sent(Checkpointed) == [Checkpointed(FENCE, "run/2.pt", resumed=True)]
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
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="growth"))
    agent.does(GroupMarked(FENCE, 1, 7))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=8, stops=True))
    assert agent.told(CallOff(fence=FENCE, drain=1)) == [ReleaseGroup(FENCE)]
    agent.does(GroupDrained(FENCE, 1, True))  # crossed with it
    assert not agent.sent(Drained)
    assert MarkGroup(FENCE, 2) in agent.told(
        Drain(fence=FENCE, drain=2, timeout_s=30.0, reason="again")
    )


def test_a_late_report_of_a_drain_that_was_called_off_is_not_one_of_the_next_drain():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="growth"))
    agent.told(CallOff(fence=FENCE, drain=1))
    agent.told(Drain(fence=FENCE, drain=2, timeout_s=30.0, reason="b to leave"))
    agent.does(GroupMarked(FENCE, 1, 7))
    assert not agent.sent(Marked)
    agent.told(DrainTarget(fence=FENCE, drain=2, calls=9))
    agent.does(GroupDrained(FENCE, 1))
    assert not agent.sent(Drained)
    assert agent.told(CallOff(fence=FENCE, drain=1)) == []
    agent.does(GroupDrained(FENCE, 2))
    assert agent.sent(Drained) == [Drained(fence=FENCE, drain=2)]


def test_a_newer_drain_ends_one_whose_end_was_not_heard_of():
    agent = Agent().running()
    agent.told(Drain(fence=FENCE, drain=1, timeout_s=30.0, reason="growth"))
    agent.told(DrainTarget(fence=FENCE, drain=1, calls=8))
    agent.does(Unlinked("EOF"))
    agent.does(GroupDrained(FENCE, 1))
    agent.does(Linked())
    holding = agent.sent(Join)[0].holding
    assert holding.draining and holding.last_drain == 1
    request = Drain(fence=FENCE, drain=2, timeout_s=30.0, reason="b to leave")
    assert [e for e in agent.told(request) if isinstance(e, ReleaseGroup | MarkGroup)] == [
        ReleaseGroup(FENCE),
        MarkGroup(FENCE, 2),
    ]
    agent.told(DrainTarget(fence=FENCE, drain=2, calls=12))
    assert agent.effect(AimGroup).calls == 12


def test_workers_that_stand_still_are_reported_in_their_own_world_only():
    agent = Agent().running()
    standing = StandstillEvidence(rank=0, node_id="a", facts=ProcessFacts())
    agent.does(GroupStandstill(FENCE, FENCE, (standing,), 21.0, early=True))
    assert agent.sent(StandstillReport) == [
        StandstillReport(fence=FENCE, still_s=21.0, evidence=(standing,), early=True)
    ]
    agent.does(GroupStandstill(FENCE, Fence(9, 9), (), 0.0))
    assert not agent.sent(StandstillReport)


def test_interrupted_workers_show_their_last_calls_if_the_coordinator_asks():
    agent = Agent().running()
    agent.told(Interrupt(fence=FENCE, reason="rank 1 crashed", asks_calls=True))
    assert agent.effect(InterruptGroup).asks_calls
    calls = (WorkerCalls(rank=0, pid=50),)
    agent.does(GroupCalls(FENCE, FENCE, calls))
    assert agent.sent(LastCalls) == [LastCalls(fence=FENCE, calls=calls)]


def test_a_worker_is_ended_by_order_in_its_own_world_only():
    agent = Agent().running()
    ends = agent.told(EndWorker(fence=FENCE, rank=1, reason="it is stopped"))
    assert ends == [EndGroupWorker(FENCE, 1, "it is stopped")]
    assert not agent.told(EndWorker(fence=Fence(9, 9), rank=1, reason="late"))
    shown = agent.told(ShowStacks(fence=FENCE, ranks=(1,)))
    assert shown == [ShowGroupStacks(FENCE, (1,))]
    assert not agent.told(ShowStacks(fence=Fence(9, 9), ranks=(1,)))


def test_a_culprit_is_logged_with_its_class_and_reported_to_the_coordinator():
    agent = Agent().running()
    found = Verdict(kind=Kind.DISK, ranks=(1, 2), sentence="ranks 1-2 wait", group="0", sequence=7)
    effect, _ = agent.does(CulpritFound(FENCE, found, 21.04))
    assert agent.sent(AwaitedWorker) == [AwaitedWorker(fence=FENCE, sentence="ranks 1-2 wait")]
    assert (effect.event.kind, effect.event.reason) == (EventKind.CULPRIT, "ranks 1-2 wait")
    assert effect.event.data == {
        "class": "disk", "ranks": "1,2", "outlook": "may-pass", "certain": False,
        "group": "0", "sequence": 7, "still_s": 21.0,
    }  # fmt: skip


def test_stacks_from_outside_are_logged_with_their_source():
    agent = Agent().running()
    stacks = WorkerStacks(
        fence=FENCE, rank=1, local_rank=1, pid=51, source="py-spy", text="hold (train.py:3)"
    )
    [effect] = agent.does(stacks)
    assert (effect.event.kind, effect.event.data["source"]) == (EventKind.STACKS, "py-spy")
    assert effect.event.reason == "stacks of rank 1 (pid 51), by py-spy"
    assert effect.event.data["stacks"] == "hold (train.py:3)"
