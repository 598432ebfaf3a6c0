"""When the workers of a node made their first step in a world, from their status pages."""

import os

import pytest
from test_agent_rules import FENCE, Agent

from elastane.agent.first_steps import Beginning
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.protocol.effects import WriteEvent
from elastane.protocol.events import GroupTraining
from elastane.protocol.hangs import Activity
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import Fence


@pytest.fixture
def pages():
    """Return the status pages of two workers, from the agent's side and from theirs."""
    agents = {pid: StatusPage.create() for pid in (1, 2)}
    workers = {pid: WorkerPage.open(os.dup(page.fd)) for pid, page in agents.items()}
    yield agents, workers
    for page in (*agents.values(), *workers.values()):
        page.close()


def test_workers_in_steps_have_begun_once_each_has_made_a_step_in_this_world(pages):
    agents, workers = pages
    workers[1].step_made()  # in the world before
    beginning = Beginning(4)
    assert not beginning.look(agents, 1.0, counts_steps=True)
    assert beginning.built_s is None
    for worker in workers.values():
        worker.be_at(Activity.HEALING)
    assert not beginning.look(agents, 2.0, counts_steps=True)
    for worker in workers.values():
        worker.meet(7, 4)
    assert not beginning.look(agents, 3.0, counts_steps=True)
    workers[1].step_made()
    assert not beginning.look(agents, 4.0, counts_steps=True)
    workers[2].step_made()
    assert beginning.look(agents, 5.0, counts_steps=True)
    assert (beginning.built_s, beginning.healed_s, beginning.trained_s) == (2.0, 3.0, 5.0)


def test_a_script_that_counts_its_calls_has_begun_once_each_worker_has_called(pages):
    agents, workers = pages
    beginning = Beginning(4)
    workers[1].count()
    assert not beginning.look(agents, 1.0, counts_steps=False)
    workers[2].count()
    assert beginning.look(agents, 2.0, counts_steps=False)
    assert beginning.healed_s is None


def test_an_unmodified_script_in_the_world_before_has_not_begun(pages):
    agents, workers = pages
    for worker in workers.values():
        worker.reach(9)
        worker.be_in(3)
    beginning = Beginning(4)
    assert not beginning.look(agents, 1.0, counts_steps=False)
    for worker in workers.values():
        worker.be_in(4)
    assert beginning.look(agents, 2.0, counts_steps=False)


def test_a_group_without_workers_has_not_begun():
    assert not Beginning(1).look({}, 1.0, counts_steps=True)


def test_the_event_log_gets_how_long_ago_each_was():
    agent = Agent().running()
    now_s = agent.now_s
    agent.does(GroupTraining(FENCE, FENCE, now_s, now_s - 0.5, now_s - 0.25))
    event = agent.effect(WriteEvent).event
    assert (event.kind, event.fence) == (EventKind.WORKERS_TRAINING, FENCE)
    assert event.data == {"age_s": 0.0, "built_age_s": 0.5, "healed_age_s": 0.25}


@pytest.mark.parametrize("fence, world", [(Fence(9, 0), FENCE), (FENCE, Fence(9, 0))])
def test_first_steps_of_another_group_or_world_are_not_logged(fence, world):
    assert Agent().running().does(GroupTraining(fence, world, 1.0)) == []
