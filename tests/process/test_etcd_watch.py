"""A watch over etcd v3 continues after a compaction, and starts again after a restart."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, etcd

from elastane.errors import StoreError
from elastane.stores.etcd.v3 import EtcdV3Store
from elastane.stores.protocol import Entry
from elastane.stores.registry import make_store

Scenario = Callable[[EtcdV3Store, EtcdV3Store], Awaitable[None]]


def run(folder: Path, scenario: Callable[[EtcdV3Store, EtcdV3Store, EtcdCluster], Awaitable[None]]):
    """Play a scenario of a watcher and a writer, over a separate server."""
    with etcd(folder / "etcd") as cluster:

        async def play() -> None:
            stores = [make_store("etcd", cluster.endpoint, {}) for _ in range(2)]
            try:
                async with asyncio.timeout(60):
                    await scenario(*stores, cluster)
            finally:
                for store in stores:
                    await store.close()

        asyncio.run(play())


def compact(cluster: EtcdCluster, revision: int) -> None:
    """Let the server drop all versions before `revision`."""
    content = json.dumps({"revision": str(revision), "physical": True}).encode()
    url = cluster.members[0].url + "/v3/kv/compaction"
    with urllib.request.urlopen(urllib.request.Request(url, content, method="POST")) as answer:
        assert answer.status == 200


async def write(store: EtcdV3Store, key: str, values: list[bytes], after: Entry | None = None):
    for value in values:
        after = await store.compare_and_set(key, value, after.version if after else 0)
    assert after is not None
    return after


async def soon(watch: AsyncIterator[Entry | None]) -> Entry | None:
    async with asyncio.timeout(90):
        return await anext(watch)


async def first_of(store: EtcdV3Store, key: str, after_version: int) -> Entry | None:
    async with aclosing(store.watch(key, after_version)) as watch:
        return await soon(watch)


def test_a_watch_from_a_version_that_the_server_has_forgotten_gives_the_last_one(tmp_path):
    async def scenario(reader, writer, cluster):
        first = await write(writer, "k", [b"1"])
        last = await write(writer, "k", [b"2", b"3", b"4"], first)
        compact(cluster, last.version)
        assert await first_of(reader, "k", first.version) == last

    run(tmp_path, scenario)


def test_a_version_compacted_between_read_and_watch_is_read_again(tmp_path, monkeypatch):
    async def scenario(reader, writer, cluster):
        first = await write(writer, "k", [b"1"])
        look, meanwhile = reader._read, [b"2", b"3"]

        async def look_and_forget(key: str):
            found = await look(key)
            if meanwhile:
                last = await write(writer, key, [meanwhile.pop(0), meanwhile.pop(0)], first)
                await writer.delete(key, last.version)
                await write(writer, "other", [b"x"])
                _, revision = await look("other")
                compact(cluster, revision)
            return found

        monkeypatch.setattr(reader, "_read", look_and_forget)
        async with aclosing(reader.watch("k", first.version)) as watch:
            assert await soon(watch) is None, "the key is gone, and its versions are forgotten"
            monkeypatch.undo()
            made = asyncio.ensure_future(write(writer, "k", [b"new"]))
            assert await soon(watch) == await made

    run(tmp_path, scenario)


def test_a_watch_of_a_server_that_restarts_begins_again_and_misses_nothing(tmp_path):
    async def scenario(reader, writer, cluster):
        first = await write(writer, "k", [b"1"])
        waiting = asyncio.ensure_future(first_of(reader, "k", first.version))
        await asyncio.sleep(0)
        await reader.get("k")  # the watch has had its turn before this answer
        (server,) = cluster.members
        server.kill()
        with pytest.raises(StoreError):
            await waiting
        server.start(cluster.cluster)
        await asyncio.to_thread(cluster.wait_ready, server)
        second = await write(writer, "k", [b"2"], first)
        assert await first_of(reader, "k", first.version) == second

    run(tmp_path, scenario)
