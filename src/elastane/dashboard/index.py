"""Finds the events of a job again: where each one stands in which file, in a few bytes each.

A week of a thousand nodes is some hundred thousand events, so their texts stay on disk. An event
whose file is gone is left out of an answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.observe.events import LoggedEvent, PlacedEvent, described, read_placed
from elastane.protocol.log_events import MEASURED

PAGE_EVENTS_MAX = 200
# A search reads lines from disk: some ten microseconds each.
SEARCHED_MAX = 50_000
EVENTS_MAX = 4_000_000
# The kinds of events, by the beginnings of their names, that two of the page's filters mean.
_WORLD = ("round-", "node-", "drain-", "growth", "resized", "workers-", "in-place")
_SAVED = ("checkpoint-", "restored", "snapshot-")


@dataclass(frozen=True, kw_only=True)
class EventFilter:
    """The filter of a request for events; `before`: only those with a lower number."""

    before: int | None = None
    group: str = ""
    node: str = ""
    text: str = ""
    incident: int = 0


class EventRow(msgspec.Struct, kw_only=True):
    """One event on the page. `number`: its place among all events of the job."""

    number: int
    time_s: float
    kind: str
    node: str
    reason: str
    tone: str
    incident: int
    round: int | None
    attempt: int | None
    data: dict[str, str | int | float | bool]


class EventPage(msgspec.Struct, kw_only=True):
    """Events, newest first. `more_before`: where the next page begins, if there is one."""

    total: int
    rows: list[EventRow]
    more_before: int | None


class _Names:
    """Gives each name a small number."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name."""
        if name not in self._numbers:
            self._numbers[name] = len(self.listed)
            self.listed.append(name)
        return self._numbers[name]

    def known(self, name: str) -> int:
        """Return the number of a name, or -1 if it has none."""
        return self._numbers.get(name, -1)


class EventIndex:
    """All events of a job, by number from 0."""

    def __init__(self) -> None:
        self._kinds, self._nodes, self._files = _Names(), _Names(), _Names()
        self._tones = _Names()
        self._kind, self._tone = array("H"), array("B")
        self._node, self._file, self._incident = array("I"), array("I"), array("I")
        self._offset = array("Q")

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, placed: PlacedEvent, tone: str, incident: int) -> None:
        """Add the next event; those beyond EVENTS_MAX are not found again."""
        if len(self) >= EVENTS_MAX:
            return
        self._kind.append(min(self._kinds.number(placed.event.kind), 0xFFFF))
        self._tone.append(self._tones.number(tone))
        self._node.append(self._nodes.number(placed.event.node))
        self._file.append(self._files.number(str(placed.path)))
        self._incident.append(incident)
        self._offset.append(placed.offset)

    def page(self, wanted: EventFilter) -> EventPage:
        """Return the newest events that are wanted; reads files."""
        node = self._nodes.known(wanted.node) if wanted.node else None
        number = len(self) if wanted.before is None else min(max(wanted.before, 0), len(self))
        rows: list[EventRow] = []
        searched = 0
        while number > 0 and len(rows) < PAGE_EVENTS_MAX and searched < SEARCHED_MAX:
            number -= 1
            if not self._fits(number, wanted, node):
                continue
            searched += 1
            row = self._row(number)
            if row is not None and _has_text(row, wanted.text):
                rows.append(row)
        return EventPage(total=len(self), rows=rows, more_before=number or None)

    def _fits(self, number: int, wanted: EventFilter, node: int | None) -> bool:
        if wanted.incident and self._incident[number] != wanted.incident:
            return False
        if node is not None and self._node[number] != node:
            return False
        kind = self._kinds.listed[self._kind[number]]
        match wanted.group:
            case "trouble":
                return self._tones.listed[self._tone[number]] == "bad" or kind in (
                    "stall",
                    "restart",
                )
            case "world":
                return kind.startswith(_WORLD)
            case "saved":
                return kind.startswith(_SAVED)
            case _:
                return kind not in MEASURED or bool(wanted.text)

    def _row(self, number: int) -> EventRow | None:
        path = Path(self._files.listed[self._file[number]])
        event = read_placed(path, self._offset[number])
        if event is None:
            return None
        tone = self._tones.listed[self._tone[number]]
        return _event_row(number, event, tone, self._incident[number])


def _event_row(number: int, event: LoggedEvent, tone: str, incident: int) -> EventRow:
    return EventRow(
        number=number,
        time_s=event.time_s,
        kind=event.kind,
        node=event.node,
        reason=described(event),
        tone=tone,
        incident=incident,
        round=event.round,
        attempt=event.attempt,
        data=event.data,
    )


def _has_text(row: EventRow, text: str) -> bool:
    wanted = text.lower()
    return not wanted or any(wanted in word.lower() for word in (row.kind, row.node, row.reason))
