"""The agent's rules for notices: it leaves as after a signal, and keeps the deadline."""

import pytest
from test_agent_rules import FENCE, Agent

from elastane.protocol.effects import Exit, StopGroup, WriteEvent
from elastane.protocol.events import GroupGone, Linked, Notice, Signalled, Unlinked
from elastane.protocol.limits import NOTICE_MARGIN_S
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Leave, Release
from elastane.protocol.model import PortOffer

SPOT = Notice("aws", "terminate", within_s=20.0)


def gone(agent):
    agent.does(GroupGone(FENCE, PortOffer(6, True)))
    return agent.effect(Exit)


def test_a_notice_requests_a_drain_with_the_remaining_time():
    agent = Agent().running()
    agent.does(SPOT)
    (leave,) = agent.sent(Leave)
    assert "aws" in leave.reason and "terminate" in leave.reason
    assert leave.within_s == pytest.approx(20.0 - NOTICE_MARGIN_S)
    assert agent.effect(StopGroup) is None
    (event,) = [e.event for e in agent.effects if isinstance(e, WriteEvent)]
    assert event.kind == EventKind.NOTICE and event.reason == "terminate"
    assert event.data == {"source": "aws", "drains": True, "within_s": 20.0}


def test_workers_that_save_for_longer_than_the_deadline_are_killed_before_it():
    agent = Agent().running()
    agent.does(SPOT)
    agent.passes(20.0, answer=True)
    assert agent.effect(StopGroup).grace_s == 0.0
    assert agent.now_s <= 20.0 - NOTICE_MARGIN_S + 1.0
    exit_ = gone(agent)
    assert exit_.code == 143 and exit_.out_by_s == 20.0


def test_a_deadline_that_is_farther_than_a_drain_may_take_does_not_lengthen_it():
    agent = Agent().running()
    agent.does(Notice("azure", "Redeploy", within_s=900.0))
    agent.passes(69.0, answer=True)
    assert agent.core.group.phase == "running"
    agent.passes(2.0, answer=True)
    assert agent.effect(StopGroup)


def test_half_of_a_very_short_deadline_is_for_the_drain():
    agent = Agent().running()
    agent.does(Notice("file", "now", within_s=1.0))
    assert agent.sent(Leave)[0].within_s == pytest.approx(0.5)
    agent.passes(1.0, answer=True)
    assert agent.effect(StopGroup)


def test_a_notice_that_does_not_drain_is_only_logged():
    agent = Agent().running()
    agent.does(Notice("aws", "rebalance", drains=False))
    assert not agent.sent(Leave) and agent.effect(WriteEvent)
    agent.passes(300.0, answer=True)
    assert agent.core.group.phase == "running"


def test_the_signal_of_the_shutdown_after_a_notice_shortens_no_drain():
    agent = Agent().running()
    agent.does(SPOT)
    agent.does(Signalled("SIGTERM"))
    assert agent.effect(StopGroup) is None
    agent.does(Signalled("SIGTERM"))
    assert agent.effect(StopGroup).grace_s == 0.0


def test_a_notice_after_a_signal_brings_its_deadline():
    agent = Agent().running()
    agent.does(Signalled("SIGTERM"))
    agent.now_s = 5.0
    agent.does(SPOT)
    assert agent.sent(Leave)[0].within_s == pytest.approx(20.0 - NOTICE_MARGIN_S)
    agent.passes(20.0, answer=True)
    assert agent.effect(StopGroup) and agent.now_s < 25.0


def test_only_a_sooner_deadline_changes_that_of_a_notice_before():
    agent = Agent().running()
    agent.does(SPOT)
    for later in (Notice("file", "later", within_s=60.0), Notice("file", "some time")):
        agent.does(later)
        assert not agent.sent(Leave)
    agent.does(Notice("file", "sooner", within_s=8.0))
    assert agent.sent(Leave)[0].within_s == pytest.approx(6.0)
    assert "aws" in agent.sent(Leave)[0].reason, "the first reason counts"


def test_a_new_coordinator_learns_how_much_time_is_left():
    agent = Agent().running()
    agent.does(SPOT)
    agent.does(Unlinked("EOF"))
    agent.now_s = 10.0
    agent.does(Linked())
    assert agent.sent(Leave)[0].within_s == pytest.approx(8.0)


def test_without_a_coordinator_the_workers_are_stopped_within_the_deadline():
    agent = Agent().running()
    agent.does(Unlinked("EOF"))
    agent.does(SPOT)
    assert agent.effect(StopGroup).grace_s > 18.0
    agent.now_s = 18.5
    agent.does(Unlinked("still"))
    assert agent.effect(StopGroup).grace_s == 0.0
    assert gone(agent).code == 143


def test_an_agent_without_workers_is_released_and_knows_its_deadline():
    agent = Agent()
    agent.does(SPOT)
    agent.told(Release("drained"))
    assert agent.effect(Exit).out_by_s == 20.0


def test_a_node_that_leaves_because_it_is_unfit_says_so_by_its_exit_code():
    agent = Agent().running()
    agent.does(Notice("health-check", "ECC errors", unfit=True))
    (leave,) = agent.sent(Leave)
    assert "health-check" in leave.reason and leave.within_s is None
    agent.told(Release("asked to leave"))
    assert gone(agent).code == 69


def test_a_node_that_is_found_unfit_while_it_leaves_says_so_too():
    agent = Agent().running()
    agent.does(SPOT)
    agent.does(Notice("health-check", "ECC errors", unfit=True))
    agent.does(Signalled("SIGTERM"))
    agent.told(Release("asked to leave"))
    assert gone(agent).code == 69
