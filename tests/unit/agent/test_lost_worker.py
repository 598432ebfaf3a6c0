"""A worker that no signal ends is given up after a set time, and its node leaves."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
from worker_group_support import Posted, Unkillable, group_of

from elastane.agent import shell, workers
from elastane.agent.hang_monitor import Waits
from elastane.agent.process_group_store import OfferedPort
from elastane.agent.shell import AgentShell, Outlets
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.process.unanswered import UnansweredWatch
from elastane.protocol.effects import Exit
from elastane.protocol.events import Signalled
from elastane.protocol.model import Outcome


def without_bound(until_ns):
    """Accept a deadline, which these tests do not check."""


DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(workers, "_KILL_WAIT_S", 0.02)


def test_an_unkillable_worker_is_given_up_after_the_set_time_and_the_node_leaves(caplog):
    process, posted = Unkillable(), Posted()

    async def scenario():
        group = group_of(process, posted, stuck_s=0.05)
        group.begin()
        group.stop(0)
        async with asyncio.timeout(DEADLINE_S):
            await posted.ended.wait()
        return group

    group = asyncio.run(scenario())
    assert process.signals[-1] == signal.SIGKILL
    assert str(process.pid) in group.lost
    assert "[worker-unkillable]" in caplog.text
    (left,) = [event for event in posted if isinstance(event, Signalled)]
    assert "unfit" in left.name


def test_an_unkillable_worker_is_awaited_without_a_set_time(caplog):
    process, posted = Unkillable(), Posted()

    async def scenario():
        group = group_of(process, posted, stuck_s=0.0)
        group.begin()
        group.stop(0)
        async with asyncio.timeout(DEADLINE_S):
            while "for as long as it takes" not in caplog.text:  # noqa: ASYNC110 - a line is no event
                await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await posted.ended.wait()
        for task in group._tasks:
            task.cancel()
        return group

    group = asyncio.run(scenario())
    assert not group.lost


@pytest.mark.parametrize(
    ("lost", "outcome", "code"),
    [
        ("workers [3] cannot be killed", None, 69),
        ("", None, 143),
        ("workers [3] cannot be killed", Outcome(ok=True, reason="done"), 143),
    ],
)
def test_an_agent_with_an_unkillable_worker_exits_as_unfit(lost, outcome, code):
    class Core:
        wake_s = 0.0
        train_until_s = None

        def handle(self, event, now_s, readings):
            return [Exit(143, "left", outcome)]

    async def scenario():
        setup = SimpleNamespace(spawner=SimpleNamespace(warm=asyncio.Event()))
        outlets = Outlets(None, lambda note: None, without_bound, lambda: None, lambda: None)
        agent = AgentShell(Core(), setup, OfferedPort(listening=False), asyncio.Queue(), outlets)
        drain = SimpleNamespace(progress=lambda: None, met=lambda: 0)
        minder = SimpleNamespace(waits=Waits(), paces=(), unanswered=UnansweredWatch())
        agent._group = SimpleNamespace(
            lost=lost, drain=drain, hang_monitor=minder, allow_until=without_bound
        )
        return await agent.run()

    assert asyncio.run(scenario()).code == code


def test_the_rules_get_progress_and_suspension_with_each_event(monkeypatch):
    monkeypatch.setattr(shell, "suspended_s", lambda: 7.5)
    group = group_of(Unkillable(), Posted(), stuck_s=0.0)

    class Core:
        wake_s = 0.0
        train_until_s = 12.5

        def handle(self, event, now_s, readings):
            told.append((readings.progress, readings.met, readings.all_wait, readings.slept_s))
            return [Exit(0, "left", None)]

    async def scenario():
        setup = SimpleNamespace(spawner=SimpleNamespace(warm=asyncio.Event()))
        outlets = Outlets(None, lambda note: None, bounds.append, lambda: None, lambda: None)
        agent = AgentShell(Core(), setup, OfferedPort(listening=False), asyncio.Queue(), outlets)
        agent._group = group
        await agent.run()

    told, bounds, page = [], [], StatusPage.create()
    theirs = WorkerPage.open(os.dup(page.fd))
    worker = SimpleNamespace(page=page, local_rank=0, is_standby=False, is_alive=True)
    group._workers = [worker]
    asyncio.run(scenario())
    theirs.meet(12, 3)
    asyncio.run(scenario())
    worker.is_alive = False
    asyncio.run(scenario())
    theirs.close()
    until_ns = page._words[19]
    page.close()
    assert bounds == [12_500_000_000] * 3 and until_ns == bounds[0]
    assert told == [(None, 0, False, 7.5), (12, 3, False, 7.5), (None, 0, False, 7.5)]
