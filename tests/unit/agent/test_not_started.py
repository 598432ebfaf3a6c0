"""A worker that cannot be started (no descriptors, no memory) is reported, and ends no other."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from dataclasses import replace

import pytest
from worker_group_support import ASSIGNMENT, Posted, Unkillable, group_of

from elastane.agent import spares as spares_room
from elastane.agent.control_sockets import ControlSockets
from elastane.agent.spares import Spares
from elastane.agent.worker import EXIT_NOT_STARTED
from elastane.process.status_page import StatusPage
from elastane.process.streams.group import GroupStreams
from elastane.protocol.events import WorkerFailed

FULL = OSError(errno.EMFILE, "Too many open files")


def refuse(*_, **__):
    raise FULL


async def refuse_soon(*_):
    raise FULL


FAULTS = [(StatusPage, "create", refuse), (GroupStreams, "open_soon", refuse_soon)]


@pytest.fixture(params=FAULTS, ids=["page", "streams"])
def full(request, monkeypatch):
    monkeypatch.setattr(*request.param)


def test_a_worker_whose_files_cannot_be_opened_is_a_failed_worker(full):
    posted = Posted()

    async def scenario():
        group = group_of(Unkillable(), posted, stuck_s=0.0)
        group.begin()
        group.stop(0)
        async with asyncio.timeout(30):
            await posted.ended.wait()

    asyncio.run(scenario())
    [failed] = [event.failure for event in posted if isinstance(event, WorkerFailed)]
    assert failed.exit_code == EXIT_NOT_STARTED
    assert failed.message == f"not started: {FULL}"


def test_a_spare_whose_files_cannot_be_opened_is_skipped(full, monkeypatch, caplog):
    monkeypatch.setattr(spares_room, "BACKOFF_FIRST_S", 0.0)

    async def scenario():
        tasks = []

        def spawn(work):
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        lines = ControlSockets(lambda: None, lambda fence, reason: None)
        group = group_of(Unkillable(), Posted(), stuck_s=0.0)
        setup = replace(group.setup, spares=1)
        gc.collect()  # what other tests have left open
        before = {*os.listdir("/proc/self/fd")}
        held = Spares(setup, lines, spawn)
        held.begin(ASSIGNMENT)
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
        await held.end()
        assert {*os.listdir("/proc/self/fd")} <= before

    asyncio.run(scenario())
    assert caplog.text.count(f"no spare worker could be started: {FULL}") == spares_room._ENDS_MAX
