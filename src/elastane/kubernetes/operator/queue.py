"""A queue of keys for workers: each key is queued once, and with one worker at most.

Owns order, delay, and a backoff for each key; knows nothing of the jobs behind the keys. It belongs
to one event loop, and only `take` waits. A key that is added while a worker has it is queued once
more after that worker is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable

from elastane.kubernetes.operator.bounds import RETRY_FIRST_S, RETRY_MAX_S


class KeyedQueue:
    """A level-triggered work queue. `clock` gives monotonic seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._working: set[str] = set()
        self._again: set[str] = set()
        self._due_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._failures: dict[str, int] = {}
        self._pause_s: float | None = None  # until the next delayed key is due
        self._wake = asyncio.Event()
        self._returned = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def working(self) -> int:
        """How many keys are with workers."""
        return len(self._working)

    def add(self, key: str) -> None:
        """Queue a key for the next free worker."""
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = None
            self._wake.set()

    def add_in(self, key: str, delay_s: float) -> None:
        """Queue a key after `delay_s`, unless it is due sooner."""
        if delay_s <= 0:
            self.add(key)
            return
        due_s = self._clock() + delay_s
        if due_s < self._due_s.get(key, float("inf")):
            self._due_s[key] = due_s
            heapq.heappush(self._heap, (due_s, key))
            self._wake.set()

    def retry(self, key: str, at_least_s: float = 0.0) -> float:
        """Queue a failed key after its backoff; return the seconds until then."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        doubled_s = RETRY_FIRST_S * float(1 << min(failures, 20))
        wait_s = max(at_least_s, min(RETRY_MAX_S, doubled_s) * self._rng.uniform(0.75, 1.25))
        self.add_in(key, wait_s)
        return wait_s

    def succeeded(self, key: str) -> None:
        """Reset the backoff of a key."""
        self._failures.pop(key, None)

    def forget(self, key: str) -> None:
        """Forget a key whose object is gone."""
        self._failures.pop(key, None)
        self._due_s.pop(key, None)
        self._ready.pop(key, None)
        self._again.discard(key)

    def pop(self) -> str | None:
        """Return the next key, if one is ready; `done` must follow."""
        self._pause_s = self._promote()
        if not self._ready:
            return None
        key, _ = self._ready.popitem(last=False)
        self._working.add(key)
        # The decision that follows sets the next time at which this key is due.
        self._due_s.pop(key, None)
        if self._ready:
            self._wake.set()  # wakes the next waiting worker
        return key

    async def take(self) -> str:
        """Return the next key, once there is one; `done` must follow."""
        while (key := self.pop()) is None:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._wake.wait()
        return key

    def done(self, key: str) -> None:
        """Record that a worker has finished with a key."""
        self._working.remove(key)
        self._returned.set()
        if key in self._again:
            self._again.remove(key)
            self.add(key)

    async def wait_returned(self, timeout_s: float, *, all_ready: bool = False) -> None:
        """Wait until no key is with a worker, and with `all_ready` until none is ready either."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._working or (all_ready and self._ready):
                    self._returned.clear()
                    await self._returned.wait()

    def _promote(self) -> float | None:
        """Make due keys ready; return the seconds until the next one is due, or None."""
        now_s = self._clock()
        while self._heap:
            due_s, key = self._heap[0]
            if self._due_s.get(key) != due_s:  # the key has got another time since
                heapq.heappop(self._heap)
            elif due_s <= now_s:
                heapq.heappop(self._heap)
                del self._due_s[key]
                self.add(key)
            else:
                return due_s - now_s
        return None
