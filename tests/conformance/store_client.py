"""A client process of a store that reads, writes, holds a lease and watches.

    store_client.py SPECIFICATION FILE NAME SEED KEYS [TERM]

It first ends the lease of TERM, whose holder was killed.
Each observation is a line of JSON, appended to FILE: an operation has a line before it is sent and
another after its answer. Times are CLOCK_MONOTONIC. After SIGUSR1 the client releases its
lease and only watches. SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from store_connect import connect

from elastane.errors import ElastaneError, LeaseLostError, StoreError
from elastane.stores.protocol import ConflictError, Entry, Lease, Store

LEASE = "job/lease"
# Candidates poll often, so that a briefly free lease is taken.
POLL_S = 0.05
# Each process draws the ttl of its leases and its longest pause between two operations. With at
# most 200 operations a second, a history is short enough for the search.
TTLS_S = (0.3, 1.0)
PAUSES_S = (0.005, 0.02)
# This key has a ttl in half of its writes; no watch is checked at it, since it goes by itself.
BRIEF = "job/brief"
ENTRY_TTLS_S = (0.2, 0.5)
# The slugs of writes that are not done and never will be.
NOT_DONE = ("store-unreachable", "store-refused", "store-busy", "kube-forbidden")


Note = Callable[[dict[str, object]], None]


class Client:
    def __init__(self, store: Store, name: str, seed: str, note: Note) -> None:
        self.store = store
        self.name = name
        self.random = random.Random(seed)
        self.quiet = asyncio.Event()
        self.ttl_s = self.random.choice(TTLS_S)
        self.pause_s = self.random.choice(PAUSES_S)
        self._note = note
        self._count = 0

    def note(self, what: str, **more: object) -> None:
        self._note({"what": what, **more})

    async def pause(self, longest_s: float) -> None:
        """Wait for a random time, or until the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.quiet.wait(), self.random.uniform(0, longest_s))

    # ---- keys

    async def write(self, keys: list[str]) -> None:
        known: dict[str, list[Entry | None]] = {key: [] for key in keys}
        while not self.quiet.is_set():
            key, draw = self.random.choice(keys), self.random.random()
            seen = known[key]
            answer = await self._next(key, seen, draw)
            if answer is None:
                if self.random.random() < 0.5:
                    seen.clear()
            else:
                seen.extend(answer)
            await self.pause(self.pause_s)

    async def _next(
        self, key: str, seen: list[Entry | None], draw: float
    ) -> tuple[Entry | None] | None:
        """Do the next operation; return the known entry of the key, or None if it is unknown."""
        if not seen or draw < 0.3:
            return await self.operate("get", key)
        last = seen[-1]
        if last is not None and draw < 0.4:
            return await self.operate("delete", key, last.version)
        if draw < 0.45:  # A stale expectation.
            last = self.random.choice(seen)
        return await self.operate("compare_and_set", key, last.version if last else 0)

    async def operate(self, kind: str, key: str, expected: int = 0) -> tuple[Entry | None] | None:
        self._count += 1
        number, value = self._count, f"{self.name}-{self._count}"
        ttl_s = self._ttl_s(kind, key)
        call = {
            "get": lambda: self.store.get(key),
            "delete": lambda: self.store.delete(key, expected),
            "compare_and_set": lambda: self.store.compare_and_set(
                key, value.encode(), expected, ttl_s
            ),
        }[kind]
        asked = {"kind": kind, "key": key, "expected": expected, "value": value, "ttl_s": ttl_s}
        self.note("begin", number=number, at_s=time.monotonic(), **asked)
        outcome, found, why = "ok", None, ""
        try:
            found = await call()
        except ConflictError as conflict:
            outcome, found = "conflict", conflict.current
        except StoreError as error:
            is_known = kind == "get" or error.slug in NOT_DONE
            outcome, why = "unreachable" if is_known else "unsure", f"{error.slug}: {error.what}"
        answer = [found.version, found.value.decode()] if found else None
        ended = {"outcome": outcome, "answer": answer, "why": why}
        self.note("end", number=number, at_s=time.monotonic(), **ended)
        return (found,) if outcome in ("ok", "conflict") else None

    def _ttl_s(self, kind: str, key: str) -> float | None:
        has_ttl = kind == "compare_and_set" and key == BRIEF and self.random.random() < 0.5
        return self.random.choice(ENTRY_TTLS_S) if has_ttl else None

    # ---- the lease

    async def hold(self) -> None:
        while not self.quiet.is_set():
            with contextlib.suppress(StoreError):
                asked_s = time.monotonic()
                lease = await self.store.lease(LEASE, self.name.encode(), self.ttl_s)
                if lease is not None:
                    self.believe(lease, asked_s)
                    await self.keep(lease)
                else:
                    await self.look()
            await self.pause(POLL_S)

    async def keep(self, lease: Lease) -> None:
        while not self.quiet.is_set():
            await self.pause(self.ttl_s / 2)
            if self.random.random() < 0.1:
                self.note("given up", at_s=time.monotonic())
                await lease.release()
                return
            asked_s = time.monotonic()
            try:
                await lease.renew()
            except LeaseLostError:
                self.note("given up", at_s=time.monotonic())
                return
            except StoreError:
                continue
            self.believe(lease, asked_s)

    async def look(self) -> None:
        asked_s = time.monotonic()
        if (holder := await self.store.holder(LEASE)) is not None:
            self.note("holder", term=holder.term, asked_s=asked_s)

    def believe(self, lease: Lease, asked_s: float) -> None:
        # In this order, a process that is stopped in between records too short a holding.
        since_s = time.monotonic()
        until_s = since_s + lease.remaining_s()
        self.note("holds", term=lease.term, asked_s=asked_s, since_s=since_s, until_s=until_s)

    # ---- watches

    async def watch(self, key: str) -> None:
        known = 0
        while True:
            with contextlib.suppress(StoreError):
                async with contextlib.aclosing(self.store.watch(key, known)) as changes:
                    async for entry in changes:
                        known = entry.version if entry else 0
                        value = entry.value.decode() if entry else ""
                        answer = [known, value] if entry else None
                        self.note("watched", key=key, answer=answer, at_s=time.monotonic())
            await asyncio.sleep(POLL_S)

    async def run(self, keys: list[str], dead_term: int) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.quiet.set)
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        self.note("started")
        if dead_term:
            with contextlib.suppress(StoreError):
                await self.store.end_lease(LEASE, dead_term)
        watches = [asyncio.ensure_future(self.watch(key)) for key in keys]
        active = asyncio.gather(self.write([*keys, BRIEF]), self.hold())
        try:
            await active
            self.note("quiet")
            end = asyncio.ensure_future(ended.wait())
            await asyncio.wait([end, *watches], return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                if watch.done():
                    watch.result()
        except ElastaneError as error:
            self.note("error", text=str(error))
            raise
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self.store.close()


async def main(
    specification: str, file: str, name: str, seed: str, keys: str, dead_term: str = "0"
) -> None:
    history = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(line: dict[str, object]) -> None:
        os.write(history, json.dumps(line).encode() + b"\n")

    await Client(connect(specification), name, seed, note).run(keys.split(","), int(dead_term))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
