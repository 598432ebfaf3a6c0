"""Support for tests of the file store."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from elastane.coordinator.election import Election
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobSpec
from elastane.stores.file import FileStore
from elastane.stores.jobs import JobKeys

DEADLINE_S = 90.0
QUICK = Timing(lease_ttl_s=0.5, lease_renew_s=0.1)


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def poll(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)


async def take(store: FileStore, ttl_s: float = 60.0):
    while True:
        lease = await store.lease("leadership", b"parent", ttl_s)
        if lease:
            return lease
        await asyncio.sleep(0.02)


def elect(store: FileStore, job: str, timing: Timing) -> Election:
    spec = JobSpec(job=job, min_nodes=1, max_nodes=2, max_restarts=3, timing=timing)
    return Election(JobKeys(store, job), "parent", spec, on_authority=lambda event: None)
