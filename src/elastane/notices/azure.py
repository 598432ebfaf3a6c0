"""Scheduled events, as Azure's metadata server reports them for its machine.

Pure. The format is that of "Scheduled Events for Linux VMs" in Azure's documentation, version
2020-07-01. A document has the events of a whole scale set or availability set, so the dialogue
first asks for the name of this machine. Events are never acknowledged: that would start them, for
every machine that they name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastane.notices.dialogue import ANSWER_S, Ask, Dialogue, MetadataAnswer
from elastane.protocol.events import Notice
from elastane.protocol.unreadable import UNREADABLE

# The first request enables the service for the machine, which may take two minutes.
FIRST_ANSWER_S = 150.0
NAME_CHARS_MAX = 256
_HEADERS = {"Metadata": "true"}
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
# Freeze pauses the machine for seconds, and keeps its memory. Types of later versions are unknown.
_TAKES_THE_MACHINE = frozenset(("Preempt", "Terminate", "Reboot", "Redeploy"))


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str]
    not_before: str | None = None
    description: str | None = None


class _ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[_Event]


class AzureMetadata:
    """The metadata server of a machine; it keeps the machine's name."""

    # The shortest notice, of a preemption, is 30 s.
    pause_s = 2.0

    def __init__(self) -> None:
        self._name = ""
        self._limit_s = FIRST_ANSWER_S

    def ask(self) -> Dialogue:
        """Ask for the scheduled events of this machine."""
        if not self._name:
            answer = yield Ask(_NAME, _HEADERS)
            if answer.status != 200 or not 0 < len(answer.text) <= NAME_CHARS_MAX:
                raise answer.unreadable(_NAME)
            self._name = answer.text
        answer = yield Ask(_EVENTS, _HEADERS, limit_s=self._limit_s)
        if answer.status != 200:
            raise answer.unreadable(_EVENTS)
        try:
            found = msgspec.json.decode(answer.body, type=_ScheduledEvents)
        except UNREADABLE:
            raise answer.unreadable(_EVENTS) from None
        self._limit_s = ANSWER_S
        return [_notice(event, answer) for event in found.events if self._is_about(event.resources)]

    def _is_about(self, resources: Sequence[str]) -> bool:
        return self._name.casefold() in (each.casefold() for each in resources)


def _notice(event: _Event, answer: MetadataAnswer) -> Notice:
    about = f": {event.description[:100]}" if event.description else ""
    at = f" at {event.not_before[:40]}" if event.not_before else ""
    return Notice(
        "azure",
        f"scheduled event {event.event_type[:40]}{at}{about}",
        drains=event.event_type in _TAKES_THE_MACHINE,
        within_s=answer.until_s(event.not_before or ""),
    )
