"""compare_and_set, get, delete and watch of every store."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from store_harness import Harness, asynchronous, until

from elastane.errors import ConfigurationError
from elastane.stores.protocol import STORE_VALUE_BYTES_MAX, ConflictError, Entry, Store

# A watch that was not closed, or not completely.
pytestmark = pytest.mark.filterwarnings(
    "error:coroutine .* was never awaited:RuntimeWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
)


@asynchronous
async def test_a_key_is_absent_until_it_is_written(harness: Harness) -> None:
    one, other = harness.client(), harness.client()
    assert await one.get("job/record") is None
    written = await one.compare_and_set("job/record", b"\x00 value \n\xff", 0)
    assert written.version > 0
    assert await other.get("job/record") == written == Entry(b"\x00 value \n\xff", written.version)


@asynchronous
async def test_a_write_that_expects_another_version_conflicts_and_returns_the_current_entry(
    harness: Harness,
) -> None:
    store = harness.client()
    with pytest.raises(ConflictError) as absent:
        await store.compare_and_set("k", b"x", 7)
    assert absent.value.current is None
    first = await store.compare_and_set("k", b"1", 0)
    second = await store.compare_and_set("k", b"2", first.version)
    assert second.version > first.version
    for expected in (0, first.version, second.version + 1):
        with pytest.raises(ConflictError) as conflict:
            await store.compare_and_set("k", b"3", expected)
        assert conflict.value.current == second
    assert await store.get("k") == second


@asynchronous
async def test_versions_grow_over_deletions_and_a_stale_write_conflicts(harness: Harness) -> None:
    store = harness.client()
    first = await store.compare_and_set("k", b"1", 0)
    with pytest.raises(ConflictError):
        await store.delete("k", first.version + 1)
    await store.delete("k", first.version)
    assert await store.get("k") is None
    with pytest.raises(ConflictError) as gone:
        await store.delete("k", first.version)
    assert gone.value.current is None
    with pytest.raises(ConflictError):
        await store.compare_and_set("k", b"stale", first.version)
    again = await store.compare_and_set("k", b"2", 0)
    assert again.version > first.version


@asynchronous
async def test_deleting_an_absent_key_conflicts(harness: Harness) -> None:
    store = harness.client()
    with pytest.raises(ConflictError):
        await store.delete("k", 0)
    with pytest.raises(ConflictError):
        await store.delete("k", 3)


@asynchronous
async def test_a_conflict_never_reports_the_expected_version(harness: Harness) -> None:
    turns, draw = 40, random.Random(1)

    async def come_and_go(store: Store) -> int:
        conflicts = 0
        for _ in range(turns):
            try:
                written = await store.compare_and_set("k", b"x", 0)
                # Without it the requests alternate, and one client meets every deletion.
                await asyncio.sleep(draw.uniform(0, 0.01))
                await store.delete("k", written.version)
            except ConflictError as conflict:
                assert conflict.current is not None, "the creation of an absent key was refused"
                conflicts += 1
        return conflicts

    conflicts = await asyncio.gather(*(come_and_go(harness.client()) for _ in range(3)))
    assert sum(conflicts) < 3 * turns


@asynchronous
async def test_a_key_and_a_key_below_it_are_independent(harness: Harness) -> None:
    store = harness.client()
    await store.compare_and_set("a/b", b"below", 0)
    await store.compare_and_set("a", b"above", 0)
    found = [await store.get("a"), await store.get("a/b"), await store.get("a/b/c")]
    assert [entry and entry.value for entry in found] == [b"above", b"below", None]


@asynchronous
async def test_a_value_of_the_maximal_size_is_stored_and_a_larger_one_refused(
    harness: Harness,
) -> None:
    store = harness.client()
    big = bytes(range(256)) * (STORE_VALUE_BYTES_MAX // 256)
    written = await store.compare_and_set("k", big, 0)
    assert await store.get("k") == written
    with pytest.raises(ConfigurationError, match="store-value"):
        await store.compare_and_set("k", big + b"x", written.version)
    assert await store.get("k") == written
    assert await store.compare_and_set("empty", b"", 0) == await store.get("empty")


BAD_KEYS = ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a/.b", "a b", "a\0", "ä", "a" * 201]
BAD_KEYS += ["@entry", "a/@lease", "/".join(["abcdefghi"] * 60)]


@pytest.mark.parametrize("key", BAD_KEYS)
@asynchronous
async def test_every_operation_refuses_an_invalid_key(harness: Harness, key: str) -> None:
    store = harness.client()
    calls = [
        store.get(key),
        store.compare_and_set(key, b"", 0),
        store.delete(key, 1),
        store.lease(key, b"", 1.0),
        store.holder(key),
        anext(store.watch(key, 0)),
        store.purge(key),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="store-key"):
            await call


@asynchronous
async def test_a_watch_yields_the_current_entry_and_then_the_latest_changes(
    harness: Harness,
) -> None:
    store, writer = harness.client(), harness.client()
    entry = await writer.compare_and_set("k", b"0", 0)
    async with aclosing(store.watch("k", 0)) as watch:
        assert await anext(watch) == entry
        for number in range(1, 30):
            entry = await writer.compare_and_set("k", str(number).encode(), entry.version)
        seen = [await anext(watch)]
        while seen[-1] != entry:
            seen.append(await anext(watch))
    versions = [found.version for found in seen if found]
    assert versions == sorted(set(versions))


@asynchronous
async def test_a_watch_from_the_current_version_waits_for_the_next_one(harness: Harness) -> None:
    store, writer = harness.client(), harness.client()
    first = await writer.compare_and_set("k", b"1", 0)
    async with aclosing(store.watch("k", first.version)) as watch:
        following = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait({following}, timeout=0.1)
        assert not done
        second = await writer.compare_and_set("k", b"2", first.version)
        assert await following == second


@asynchronous
async def test_a_watch_continues_over_deletion_and_creation(harness: Harness) -> None:
    store, writer = harness.client(), harness.client()
    async with aclosing(store.watch("k", 0)) as watch:
        await _continues(watch, writer)


async def _continues(watch: AsyncGenerator[Entry | None, None], writer: Store) -> None:
    waiting = asyncio.ensure_future(anext(watch))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done, "the watch reported an absent key without a known version"
    first = await writer.compare_and_set("k", b"1", 0)
    assert await waiting == first
    await writer.delete("k", first.version)
    assert await anext(watch) is None
    second = await writer.compare_and_set("k", b"2", 0)
    assert await anext(watch) == second


@asynchronous
async def test_a_watch_from_a_known_version_reports_an_earlier_deletion(
    harness: Harness,
) -> None:
    store = harness.client()
    first = await store.compare_and_set("k", b"1", 0)
    await store.delete("k", first.version)
    async with aclosing(store.watch("k", first.version)) as watch:
        assert await anext(watch) is None


@asynchronous
async def test_of_concurrent_writes_that_expect_one_version_one_succeeds(harness: Harness) -> None:
    clients = [harness.client() for _ in range(6)]

    async def attempt(store: Store, number: int) -> Entry | None:
        try:
            return await store.compare_and_set("k", str(number).encode(), 0)
        except ConflictError:
            return None

    results = await asyncio.gather(*(attempt(store, i) for i, store in enumerate(clients)))
    winners = [entry for entry in results if entry]
    assert len(winners) == 1
    assert await clients[0].get("k") == winners[0]


@asynchronous
async def test_purge_removes_only_keys_below_the_prefix(harness: Harness) -> None:
    store = harness.client()
    for key in ("job/a", "job/b/c", "job2/a"):
        await store.compare_and_set(key, b"x", 0)
    assert await store.lease("job/leadership", b"n", 5.0)
    await store.purge("job")
    await store.purge("job")
    assert await store.get("job/a") is None
    assert await store.get("job/b/c") is None
    assert await store.holder("job/leadership") is None
    assert await store.get("job2/a") is not None


@pytest.mark.soak
def test_writers_in_several_processes_are_linearisable(harness: Harness) -> None:
    if harness.specification is None:
        pytest.skip("this store lives in one process")
    writers, count = 4, 25
    script = Path(__file__).with_name("cas_writer.py")
    command = [sys.executable, str(script), harness.specification, "job/counter", str(count)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(writers)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * writers
    writes = [json.loads(line) for output in outputs for line in output.splitlines()]
    writes.sort(key=lambda write: write["version"])
    assert [write["value"] for write in writes] == list(range(1, writers * count + 1))
    chain = [0, *(write["version"] for write in writes)]
    assert [write["saw"] for write in writes] == chain[:-1]
    for before in writes:
        for after in writes:
            if before["ended"] < after["begun"]:
                assert before["version"] <= after["saw"], "a read missed a completed write"


@asynchronous
async def test_a_server_removes_an_entry_after_its_ttl(harness: Harness) -> None:
    store = harness.client()
    # A busy host has this long to write the entry again.
    again = await store.compare_and_set("again", b"1", 0, ttl_s=1.5)
    short = await store.compare_and_set("short", b"1", 0, ttl_s=1.5)
    again = await store.compare_and_set("again", b"2", again.version)
    if harness.forgets:
        await until(lambda: _is_absent(store, "short"), "the entry goes")
        with pytest.raises(ConflictError):
            await store.compare_and_set("short", b"2", short.version)
    assert await store.get("again") == again


async def _is_absent(store: Store, key: str) -> bool:
    return await store.get(key) is None
