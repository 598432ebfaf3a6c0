"""A worker whose replica differed is only reported by its agent."""

import pytest
from test_agent_rules import FENCE, Agent

from elastane.protocol.effects import Transmit, WriteEvent
from elastane.protocol.events import ReplicaDiffered
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import Fence

REASON = "rank 5 after 40 steps: net.weight"


def differed(fence):
    return ReplicaDiffered(fence=fence, rank=5, local_rank=1, steps=40, reason=REASON)


def test_a_differing_replica_is_logged_with_its_rank_and_step():
    agent = Agent().running()
    agent.does(differed(FENCE))
    event = agent.effect(WriteEvent).event
    assert (event.kind, event.reason, event.fence) == (EventKind.REPLICA_DIFFERED, REASON, FENCE)
    assert event.data == {"rank": 5, "local_rank": 1, "steps": 40}
    assert not agent.effect(Transmit)


@pytest.mark.parametrize("fence", [Fence(2, 0), Fence(9, 0)])
def test_a_differing_replica_of_an_ended_group_is_not_logged(fence):
    agent = Agent().running()
    assert agent.does(differed(fence)) == []
