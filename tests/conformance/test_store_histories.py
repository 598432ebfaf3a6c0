"""Every store keeps its promises under faults, in histories of clients from seeds.

A history that breaks a promise is kept in build/store-histories. The failure names the command that
replays its seed. Add the seed to kept_seeds.txt then. ELASTANE_STORE_SEEDS=FIRST:COUNT
selects the seeds of the soak, ELASTANE_STORE_RUN_S the seconds of each.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from linearizability import NotLinearizableError
from memory_store import MemoryBackend, MemoryLease, MemoryStore
from store_beds import (
    Bed,
    etcd_bed,
    file_bed,
    kubernetes_bed,
    redis_bed,
    register_bed,
    small_disk_bed,
    small_etcd_bed,
)
from store_client import BRIEF, Client
from store_faults import CLIENTS, FaultRun, Seen, add_life, check_seen, read_run
from store_harness import until
from store_promises import BrokenPromiseError

from elastane.errors import StoreError
from elastane.stores.protocol import ConflictError, Entry

BEDS: dict[str, Callable[[Path, int], AbstractContextManager[Bed]]] = {
    "file": file_bed,
    "file-on-a-small-disk": small_disk_bed,
    "register": register_bed,
    "etcd": functools.partial(etcd_bed, members=1),
    "etcd-of-three": etcd_bed,
    "etcd-of-three-on-a-small-disk": small_etcd_bed,
    "etcd-v2-of-three": functools.partial(etcd_bed, kind="etcd-v2"),
    "redis": redis_bed,
    "redis-on-a-small-disk": functools.partial(redis_bed, is_small=True),
    "kubernetes": kubernetes_bed,
}
SHORT_S = 1.2
RUN_S = float(os.environ.get("ELASTANE_STORE_RUN_S", "15"))
FIRST, COUNT = map(int, os.environ.get("ELASTANE_STORE_SEEDS", "0:5").split(":"))
KEPT = [
    line.partition("#")[0].split()
    for line in Path(__file__).with_name("kept_seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]
HISTORIES = Path(__file__).parents[2] / "build" / "store-histories"


def play(name: str, seed: int, folder: Path, duration_s: float) -> dict[str, int]:
    """Run a seed on a store and check its history; keep a history that fails."""
    history = folder / "history"
    with BEDS[name](folder, CLIENTS) as bed:
        try:
            FaultRun(bed, history, seed, duration_s * bed.pace).run()
            return check_seen(read_run(history))
        except AssertionError as error:
            why = str(error)
    kept = HISTORIES / f"{name}-{seed}"
    shutil.copytree(history, kept, dirs_exist_ok=True)
    again = f"ELASTANE_STORE_SEEDS={seed}:1 ELASTANE_STORE_RUN_S={duration_s:g}"
    test = f"{Path(__file__).relative_to(HISTORIES.parents[1])}::{_SOAK.__name__}[{name}]"
    pytest.fail(
        f"{why}\n\nseed {seed} of {name}; its history is in {kept}\nagain: {again} python -m pytest"
        f" -m soak '{test}'",
        pytrace=False,
    )


@pytest.mark.parametrize("name", ["file", "etcd-of-three", "redis"])
def test_a_store_keeps_its_promises_under_faults(name, tmp_path):
    play(name, 1, tmp_path, SHORT_S)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("name", BEDS)
def test_many_seeds_of_faults_break_no_promise_of_a_store(name, tmp_path):
    for seed in range(FIRST, FIRST + COUNT):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts = play(name, seed, folder, RUN_S)
        print(f"{name} seed {seed}: {counts}", flush=True)
        shutil.rmtree(folder)


_SOAK = test_many_seeds_of_faults_break_no_promise_of_a_store


@pytest.mark.soak
@pytest.mark.parametrize(("name", "seed", "duration_s"), KEPT)
def test_a_seed_that_once_failed_holds_on_its_store(name, seed, duration_s, tmp_path):
    play(name, int(seed), tmp_path, float(duration_s))


# ---- Planted bugs that the checks must find


class IgnoresTheVersionOnce(MemoryStore):
    """Planted bug: one of 20 calls of compare_and_set does not compare."""

    calls = 0

    def _expect(self, key: str, expected_version: int) -> None:
        type(self).calls += 1
        if self.calls % 20:
            super()._expect(key, expected_version)


class ReadsFromACache(MemoryStore):
    """Planted bug: every second get returns the answer of the previous one."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.cache: dict[str, Entry | None] = {}

    async def get(self, key: str) -> Entry | None:
        found = await super().get(key)
        return self.cache.pop(key) if key in self.cache else self.cache.setdefault(key, found)


class CallsAnUnsureWriteRefused(MemoryStore):
    """Planted bug: a write whose answer was lost is reported as not done."""

    calls = 0

    def _reply(self) -> None:
        type(self).calls += 1
        if self.calls % 20 == 0:
            raise StoreError("no server has it", slug="store-unreachable")


class SendsAWriteTwice(MemoryStore):
    """Planted bug: a write whose answer was lost is sent again and conflicts with itself."""

    calls = 0

    async def compare_and_set(self, key, value, expected_version, ttl_s=None) -> Entry:
        type(self).calls += 1
        if self.calls % 20 == 0:
            await super().compare_and_set(key, value, expected_version)
        return await super().compare_and_set(key, value, expected_version)


class BeginsVersionsAgain(MemoryStore):
    """Planted bug: versions start again after a deletion."""

    async def delete(self, key: str, expected_version: int) -> None:
        await super().delete(key, expected_version)
        self.backend._versions = iter(range(1, 1 << 30))


class ConflictsWithWhatNeverWas(MemoryStore):
    """Planted bug: a conflict has a version that never existed."""

    async def compare_and_set(self, key, value, expected_version, ttl_s=None) -> Entry:
        try:
            return await super().compare_and_set(key, value, expected_version)
        except ConflictError as conflict:
            if conflict.current is not None:
                conflict.current = Entry(conflict.current.value, conflict.current.version + 1)
            raise


class RemovesAnEntryTooEarly(MemoryStore):
    """Planted bug: an entry with a ttl goes almost at once."""

    async def compare_and_set(self, key, value, expected_version, ttl_s=None) -> Entry:
        ttl_s = ttl_s and 0.0001
        return await super().compare_and_set(key, value, expected_version, ttl_s)


class GivesTheLeaseToAll(MemoryStore):
    """Planted bug: a lease can be taken while another client holds it."""

    async def lease(self, key: str, value: bytes, ttl_s: float) -> MemoryLease | None:
        self.backend.holding(key).until = 0.0
        return await super().lease(key, value, ttl_s)


class WatchesAnOldCopy(MemoryStore):
    """Planted bug: a watch yields each version twice."""

    async def watch(self, key: str, after_version: int):
        async for entry in super().watch(key, after_version):
            yield entry
            yield entry


async def _played(make: Callable[[MemoryBackend], MemoryStore]) -> Seen:
    """Let three clients use one memory backend, until each has done 200 operations."""
    backend, lives = MemoryBackend(), []
    for index in range(3):
        lines: list[dict] = []
        client = Client(make(backend), f"c{index}", f"{index}", lines.append)
        client.pause_s = 0.0
        lives.append((client, lines))

    async def use(client: Client, lines: list[dict]) -> None:
        watch = asyncio.ensure_future(client.watch("k"))
        working = asyncio.gather(client.hold(), client.write(["k", BRIEF]))
        await until(lambda: _is_enough(lines), "200 operations, and a look at the lease")
        client.quiet.set()
        await working
        watch.cancel()

    await asyncio.gather(*(use(client, lines) for client, lines in lives))
    seen = Seen()
    for client, lines in lives:
        add_life(seen, client.name, lines)
    return seen


async def _is_enough(lines: list[dict]) -> bool:
    seen = {line["what"] for line in lines}
    return sum(line["what"] == "end" for line in lines) >= 200 and bool(seen & {"holds", "holder"})


def test_a_correct_store_in_memory_passes_the_checks():
    counts = check_seen(asyncio.run(_played(MemoryStore)))
    assert counts["compare_and_set ok"] > 100 and counts["compare_and_set conflict"] > 10, counts


@pytest.mark.parametrize(
    "planted",
    [
        IgnoresTheVersionOnce,
        ReadsFromACache,
        CallsAnUnsureWriteRefused,
        SendsAWriteTwice,
        BeginsVersionsAgain,
        ConflictsWithWhatNeverWas,
        RemovesAnEntryTooEarly,
    ],
)
def test_a_planted_bug_of_entries_is_found(planted):
    with pytest.raises(NotLinearizableError) as found:
        check_seen(asyncio.run(_played(planted)))
    assert 1 <= len(found.value.piece) <= 6, found.value


@pytest.mark.parametrize("planted", [GivesTheLeaseToAll, WatchesAnOldCopy])
def test_a_planted_bug_of_leases_or_watches_is_found(planted):
    with pytest.raises(BrokenPromiseError):
        check_seen(asyncio.run(_played(planted)))
