"""Leaves out events of a coordinator that was cut off after another one was elected.

A coordinator that is cut off from its store and from the other nodes hears none of them, and logs
that they departed. Once another node leads, that was no decision: the other nodes train. Until that
is known, these events are held back for a short time.

Pure: events in, events out. Clocks of hosts that differ by more than a coordinator led lead to a
wrong choice. The files of the log keep everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from elastane.observe.events import LoggedEvent
from elastane.protocol.log_events import EventKind

T = TypeVar("T")
_Writer = tuple[str, int]
# Another node leads after the lease of 2 s, at which a silence of 3 s has shown, or not at all.
HELD_S = 10.0
HELD_MAX = 4096
_TURNS = frozenset(
    {
        EventKind.COORDINATOR_STARTED,
        EventKind.COORDINATOR_STOPPED,
        EventKind.AUTHORITY_LOST,
        EventKind.AUTHORITY_REGAINED,
    }
)
_CLAIMS = frozenset({EventKind.NODE_DEPARTED, EventKind.INCIDENT})


class Decided(Generic[T]):
    """Filters the items of a log, in their order; `event_of` returns the event of an item."""

    def __init__(self, event_of: Callable[[T], LoggedEvent]) -> None:
        self._event_of = event_of
        self._leader: _Writer | None = None
        # Coordinators without authority: whether another one has led since.
        self._deposed: dict[_Writer, bool] = {}
        self._held: deque[T] = deque()

    def take(self, item: T) -> list[T]:
        """Return the items to show by now: this one, and those that were held back."""
        event = self._event_of(item)
        if not self._deposed and event.kind not in _TURNS:
            return [item]
        due = self.due(event.time_s)
        if event.source != "coordinator":
            return [*due, item]
        writer = event.host, event.pid
        if event.kind in _TURNS:
            due += self._turn(event, writer)
        if self._deposed.get(writer, False):
            return due
        if writer in self._deposed and event.kind in _CLAIMS and len(self._held) < HELD_MAX:
            self._held.append(item)
            return due
        return [*due, item]

    def due(self, now_s: float = math.inf) -> list[T]:
        """Return the items that were held back for HELD_S at `now_s`, by default all."""
        found = []
        while self._held and self._event_of(self._held[0]).time_s + HELD_S <= now_s:
            found.append(self._held.popleft())
        return found

    def _turn(self, event: LoggedEvent, writer: _Writer) -> list[T]:
        """Record which coordinator leads; return the held items of one that leads again."""
        if event.kind == EventKind.AUTHORITY_LOST:
            self._deposed[writer] = self._leader not in (None, writer)
            return []
        self._deposed.pop(writer, None)
        if event.kind == EventKind.COORDINATOR_STOPPED:
            return []
        self._leader = writer
        own = [item for item in self._held if self._writer(item) == writer]
        if event.kind == EventKind.COORDINATOR_STARTED:
            self._held.clear()
            self._deposed = dict.fromkeys(self._deposed, True)
            return []
        self._held = deque(item for item in self._held if self._writer(item) != writer)
        return own

    def _writer(self, item: T) -> _Writer:
        event = self._event_of(item)
        return event.host, event.pid


def decided(events: Iterable[LoggedEvent]) -> Iterator[LoggedEvent]:
    """Yield the events of a whole log, without those of deposed coordinators."""
    choice: Decided[LoggedEvent] = Decided(lambda event: event)
    for event in events:
        yield from choice.take(event)
    yield from choice.due()
