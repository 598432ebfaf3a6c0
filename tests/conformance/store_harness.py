"""The stores of the conformance suite. A new store adds one Harness to HARNESSES.

A harness makes clients of one server or folder. With `specification`, another process can make one
too (see `store_connect`); it is None for a store of this process alone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from etcd_server import shared_cluster
from kube_bed import shared_control_plane
from memory_store import MemoryBackend, MemoryStore
from redis_server import shared_redis
from registers import MemoryRegister
from store_connect import connect

from elastane.stores.file import FileStore
from elastane.stores.protocol import Store
from elastane.stores.register import RegisterStore
from elastane.stores.registry import backend

DEADLINE_S = 90.0


class Harness:
    specification: str | None = None
    # Whether the store removes an entry after its ttl; only a server does.
    forgets = True
    # Seconds after its expiry in which a lease may still be refused to others.
    late_s = 0.3

    def client(self) -> Store:
        raise NotImplementedError

    def describe_as(self, name: str) -> None:
        """Take the expectations from the description of a backend."""
        described = backend(name)
        self.forgets, self.late_s = described.forgets, described.late_s


class MemoryHarness(Harness):
    def __init__(self, folder: Path) -> None:
        self.backend = MemoryBackend()

    def client(self) -> Store:
        return MemoryStore(self.backend)


class FileHarness(Harness):
    def __init__(self, folder: Path) -> None:
        self.describe_as("file")
        self.folder = folder / "store"
        self.specification = f"file:{self.folder}"

    def client(self) -> Store:
        return FileStore(self.folder, poll_s=0.02)


class RegisterHarness(Harness):
    forgets = False

    def __init__(self, folder: Path) -> None:
        self.register = MemoryRegister()

    def client(self) -> Store:
        return RegisterStore(self.register, "memory", poll_s=0.02)


class FileRegisterHarness(Harness):
    forgets = False

    def __init__(self, folder: Path) -> None:
        self.specification = f"register:{folder / 'register'}"

    def client(self) -> Store:
        return connect(self.specification)


class EtcdHarness(Harness):
    """A real server for all tests of this process, with a prefix for each test."""

    def __init__(self, folder: Path, kind: str, members: int) -> None:
        self.describe_as(kind)
        extra = ("--enable-v2",) if kind == "etcd-v2" else ()
        self.cluster = shared_cluster(members, extra)
        prefix = f"test-{secrets.token_hex(6)}"
        self.specification = f"{kind}:{self.cluster.endpoint}#{prefix}"

    def client(self) -> Store:
        return connect(self.specification)


class KubernetesHarness(Harness):
    """A real API server for all tests of this process, with a namespace for each test."""

    def __init__(self, folder: Path) -> None:
        self.describe_as("kubernetes")
        plane = shared_control_plane()
        self.specification = f"kubernetes:{plane.admin}#{plane.namespace()}"

    def client(self) -> Store:
        return connect(self.specification)


class RedisHarness(Harness):
    """A real server for all tests of this process, with a prefix for each test."""

    def __init__(self, folder: Path) -> None:
        self.describe_as("redis")
        prefix = f"test-{secrets.token_hex(6)}"
        self.specification = f"redis:{shared_redis().endpoint}#{prefix}"

    def client(self) -> Store:
        return connect(self.specification)


class GivenHarness(Harness):
    """A store of another package, from ELASTANE_TEST_STORES, whose server runs already."""

    def __init__(self, folder: Path, kind: str, endpoint: str) -> None:
        self.describe_as(kind)
        self.specification = f"given:{kind}={endpoint}#test-{secrets.token_hex(6)}"

    def client(self) -> Store:
        return connect(self.specification)


def given() -> dict[str, Callable[[Path], Harness]]:
    """Return the stores of ELASTANE_TEST_STORES: NAME=ENDPOINT, separated by spaces."""
    pairs = (one.partition("=") for one in os.environ.get("ELASTANE_TEST_STORES", "").split())
    return {
        name: functools.partial(GivenHarness, kind=name, endpoint=endpoint)
        for name, _, endpoint in pairs
    }


HARNESSES: dict[str, Callable[[Path], Harness]] = {
    "register": RegisterHarness,
    "file register": FileRegisterHarness,
    "memory": MemoryHarness,
    "file": FileHarness,
    "etcd": functools.partial(EtcdHarness, kind="etcd", members=1),
    "etcd of three": functools.partial(EtcdHarness, kind="etcd", members=3),
    "kubernetes": KubernetesHarness,
    "etcd-v2": functools.partial(EtcdHarness, kind="etcd-v2", members=1),
    "redis": RedisHarness,
    **given(),
}


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], Awaitable[object]], what: str) -> object:
    """Poll `condition` until its result is true; return that result."""
    deadline = time.monotonic() + DEADLINE_S / 2
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)
    return found
