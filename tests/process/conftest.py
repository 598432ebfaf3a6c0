"""One event loop and one warm zygote for all tests of processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
import warm_start
from process_harness import DEADLINE_S, Told, worker_environment

from elastane.process.kernel import become_subreaper
from elastane.process.zygote import DEFAULT_PRELOAD
from elastane.process.zygote.client import ZygoteSpawner
from elastane.testing import processes

processes.start = warm_start.start


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    become_subreaper()
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="session")
def told() -> Told:
    return Told()


@pytest.fixture(scope="session")
def zygote(runner: asyncio.Runner, told: Told) -> Iterator[ZygoteSpawner]:
    spawner = ZygoteSpawner(DEFAULT_PRELOAD, worker_environment(), sys.executable, told)

    async def start() -> None:
        await spawner.start()
        await asyncio.wait_for(spawner.warm.wait(), DEADLINE_S)

    runner.run(start())
    assert told.of("problem") == []
    yield spawner
    runner.run(spawner.close())
