"""What the conformance suite needs of a store; a new store adds one Harness to HARNESSES.

A harness makes clients of one and the same server or folder. `specification` lets another
process make one too (see `connect`); None where only this process can.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from elastane.stores.file import FileStore
from elastane.stores.memory import MemoryBackend, MemoryStore
from elastane.stores.protocol import Store

DEADLINE_S = 20.0


class Harness:
    specification: str | None = None

    def client(self) -> Store:
        raise NotImplementedError


class MemoryHarness(Harness):
    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()

    def client(self) -> Store:
        return MemoryStore(self.backend)


class FileHarness(Harness):
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.specification = f"file:{self.folder}"

    def client(self) -> Store:
        return FileStore(self.folder, poll_s=0.02)


HARNESSES: dict[str, Callable[[Path], Harness]] = {"memory": MemoryHarness, "file": FileHarness}


def connect(specification: str) -> Store:
    kind, _, rest = specification.partition(":")
    assert kind == "file", kind
    return FileStore(Path(rest), poll_s=0.02)


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], Awaitable[object]], what: str) -> object:
    """Ask until `condition` gives something true, and return that."""
    deadline = time.monotonic() + DEADLINE_S / 2
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)
    return found
