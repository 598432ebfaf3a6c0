"""Preemption and host maintenance, as Compute Engine's metadata server reports them.

Pure. The formats are those of the Compute Engine documentation: "Preemptible VM instances"
(instance/preempted, 30 s before), "Query the metadata server for maintenance event notices"
(instance/maintenance-event), and "About VM metadata": Metadata-Flavor in request and answer,
wait_for_change with last_etag.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from elastane.notices.dialogue import ANSWER_S, Ask, Dialogue, UnreadableAnswerError
from elastane.protocol.events import Notice

# How long a request waits for a change. A server that is cut off meanwhile is noticed after it,
# which has to leave a part of 30 s.
WAIT_S = 15
PREEMPTED_S = 30.0
# What a VM without GPUs is given; one with GPUs has an hour, but the answer does not say so.
MAINTENANCE_S = 60.0
_PAUSE_S, _PAUSE_WITHOUT_ETAG_S = 1.0, 5.0
_ETAG = re.compile(r"[0-9A-Za-z]{1,64}")
_FLAVOR = "Metadata-Flavor"


class GcpMetadata:
    """One key of the metadata server. `notices_of` says what its value means."""

    def __init__(self, key: str, notices_of: Callable[[str], list[Notice] | None]) -> None:
        self._path = f"/computeMetadata/v1/instance/{key}"
        self._notices_of = notices_of
        self._etag = ""

    @property
    def pause_s(self) -> float:
        """Short where the server waits itself."""
        return _PAUSE_S if self._etag else _PAUSE_WITHOUT_ETAG_S

    def ask(self) -> Dialogue:
        """Ask for the value; from the second time on, once it has changed."""
        path, limit_s, etag = self._path, ANSWER_S, self._etag
        if etag:
            path += f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={etag}"
            limit_s += WAIT_S
        self._etag = ""  # A failure is followed by a request that does not wait.
        answer = yield Ask(path, {_FLAVOR: "Google"}, limit_s=limit_s)
        if answer.headers.get(_FLAVOR.lower()) != "Google":
            raise UnreadableAnswerError(f"{self._path}: the answer is not of Google's server")
        notices = self._notices_of(answer.text) if answer.status == 200 else None
        if notices is None:
            raise answer.unreadable(self._path)
        found = answer.headers.get("etag", "")
        self._etag = found if _ETAG.fullmatch(found) else ""
        return notices


def preemption() -> GcpMetadata:
    """Return the key that says whether the instance is preempted."""
    return GcpMetadata("preempted", _preempted)


def maintenance() -> GcpMetadata:
    """Return the key that says what host maintenance does to the instance."""
    return GcpMetadata("maintenance-event", _maintained)


def _preempted(value: str) -> list[Notice] | None:
    match value:
        case "FALSE":
            return []
        case "TRUE":
            return [Notice("gcp", "the instance is preempted", within_s=PREEMPTED_S)]
    return None


def _maintained(value: str) -> list[Notice] | None:
    match value:
        case "NONE":
            return []
        case "TERMINATE_ON_HOST_MAINTENANCE":
            reason = "the instance is stopped for host maintenance"
            return [Notice("gcp", reason, within_s=MAINTENANCE_S)]
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return [Notice("gcp", "the instance is migrated to another host", drains=False)]
    return None
