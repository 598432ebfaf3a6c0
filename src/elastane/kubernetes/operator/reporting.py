"""Events on objects, as `kubectl describe` shows them: each once, counted, at a bounded rate.

Owns the core/v1 Events of this operator. The name of an event is derived from its text. So a new
operator continues the count of an event that an earlier operator made. An event that cannot be
written is dropped and counted, and no caller waits for a write.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from elastane.kubernetes.client import Api, ApiConflictError, ApiError, ApiNotFoundError
from elastane.kubernetes.client.resource import EVENTS
from elastane.kubernetes.model import ReportedEvent
from elastane.kubernetes.operator.bounds import (
    EVENT_COUNT_S,
    EVENT_KEPT_S,
    EVENT_MESSAGE_CHARS_MAX,
    EVENTS_BURST,
    EVENTS_REFILL_S,
    EVENTS_REMEMBERED_MAX,
    EVENTS_WAITING_MAX,
)
from elastane.kubernetes.operator.queue import KeyedQueue

_log = logging.getLogger(__name__)
COMPONENT = "elastane-operator"
_JOB_CHARS_MAX = 200  # of a job's name in an event's, which has 253


class EventSubject(msgspec.Struct, frozen=True):
    """The object that events are about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class EventCount(msgspec.Struct):
    """The fields that are read of an existing event."""

    count: int = 0


@dataclass
class _Entry:
    about: EventSubject
    type: str
    reason: str
    message: str
    first_s: float
    last_s: float
    count: int = 0
    written: int = 0  # the count that was written last; 0: the event does not exist yet
    lasts: bool = False  # `count` includes the counts of earlier operators


@dataclass
class _Bucket:
    """One job's allowance of events."""

    tokens: float
    at_s: float

    def take(self, now_s: float) -> bool:
        """Take one event from the allowance; return False if it is used up."""
        self.tokens = min(EVENTS_BURST, self.tokens + (now_s - self.at_s) / EVENTS_REFILL_S)
        self.at_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class EventPublisher:
    """Takes events at any rate, and writes them at a bounded one; repetitions are counted.

    `count(outcome)` is called with `written` or `dropped` for each.
    """

    def __init__(self, api: Api, instance: str, count: Callable[[str], None]) -> None:
        self._api = api
        self._instance = instance
        self._count = count
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._queue = KeyedQueue()

    def record(self, about: EventSubject, event: ReportedEvent) -> None:
        """Publish an event, or count it if it exists; see ReportedEvent for its count."""
        message = event.message[:EVENT_MESSAGE_CHARS_MAX]
        key = _key(about, event.type, event.reason, message)
        now_s = time.time()
        entry = self._entries.get(key)
        if entry is not None and now_s - entry.last_s > EVENT_KEPT_S:
            entry = None  # The server has dropped the event by now, so a new one is made.
        if entry is None:
            if len(self._queue) >= EVENTS_WAITING_MAX or not self._allowed(about.uid):
                self._count("dropped")
                return
            lasts = event.count is not None
            entry = _Entry(about, event.type, event.reason, message, now_s, now_s, lasts=lasts)
            self._entries[key] = entry
            self._queue.add(key)
        entry.count = entry.count + 1 if event.count is None else max(entry.count, event.count)
        entry.last_s = now_s
        if entry.count > entry.written:
            self._queue.add_in(key, EVENT_COUNT_S)  # A new entry is in the queue already.
        self._entries.move_to_end(key)
        if len(self._entries) > EVENTS_REMEMBERED_MAX:
            oldest, _ = self._entries.popitem(last=False)
            self._queue.forget(oldest)

    async def run(self) -> None:
        """Write the recorded events, until cancelled."""
        while True:
            key = await self._queue.take()
            entry = self._entries.get(key)
            try:
                if entry is not None and entry.count > entry.written:
                    await self._write(key, entry)
                    self._count("written")
            except ApiError as error:
                self._count("dropped")
                _log.info("event %s of %s: %s", entry and entry.reason, key, error.what)
            finally:
                self._queue.done(key)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued events are written, `timeout_s` at most."""
        await self._queue.wait_returned(timeout_s, all_ready=True)

    async def _write(self, key: str, entry: _Entry) -> None:
        name, count = key.partition("/")[2], entry.count
        namespace = entry.about.namespace
        if entry.written == 0:
            try:
                body = self._manifest(name, entry)
                await self._api.create(EVENTS, namespace, body, EventCount)
            except ApiConflictError:
                there = await self._api.find(EVENTS, namespace, name, EventCount)
                before = there.count if there else 0
                entry.count = count = max(count, before) if entry.lasts else count + before
                if count == before:
                    entry.written = count
                    return
            else:
                entry.written = count
                return
        patch = {"count": count, "lastTimestamp": _stamp(entry.last_s)}
        try:
            await self._api.patch(EVENTS, namespace, name, patch, EventCount)
        except ApiNotFoundError:  # the server keeps events for an hour
            entry.first_s = entry.last_s
            entry.count = max(1, count - entry.written)
            await self._api.create(EVENTS, namespace, self._manifest(name, entry), EventCount)
            count = entry.count
        entry.written = count

    def _allowed(self, uid: str) -> bool:
        """Take an event from the job's allowance; return False if it is used up."""
        now_s = time.monotonic()
        bucket = self._buckets.setdefault(uid, _Bucket(EVENTS_BURST, now_s))
        self._buckets.move_to_end(uid)
        if len(self._buckets) > EVENTS_REMEMBERED_MAX:
            self._buckets.popitem(last=False)
        return bucket.take(now_s)

    def _manifest(self, name: str, entry: _Entry) -> dict[str, Any]:
        about = entry.about
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
            "type": entry.type,
            "reason": entry.reason,
            "message": entry.message,
            "count": entry.count,
            "firstTimestamp": _stamp(entry.first_s),
            "lastTimestamp": _stamp(entry.last_s),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
        }


def _key(about: EventSubject, kind: str, reason: str, message: str) -> str:
    text = "\0".join((about.uid, kind, reason, message))
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"{about.namespace}/{about.name[:_JOB_CHARS_MAX].rstrip('.-')}.{digest}"


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
