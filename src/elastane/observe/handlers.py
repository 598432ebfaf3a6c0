"""The handlers of --event-log-handler: discard events, or print them in torch's form on stderr.

torch's events are JSON objects with name, source, timestamp and metadata. An event of elastane that
means the same as one of torch's has its name; the others keep their own. The event log under
--log-dir is written in any case. This module owns no file; a stuck console loses lines and blocks
no caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from elastane.observe.records import EventOrigin
from elastane.process.streams.console import process_console
from elastane.protocol.log_events import EventKind, Note

# The names that torch 2.13 knows; its dynamic_rendezvous writes nothing either.
HANDLERS = ("null", "console", "dynamic_rendezvous")
NoteHandler = Callable[[Note, str], None]
_STATUS = "torchelastic.worker.status."
_STDERR = 2


def event_handler(name: str, origin: EventOrigin) -> NoteHandler:
    """Return the named handler; it is called with each note and its source.

    The source is agent or coordinator.
    """
    assert name in HANDLERS, name
    if name != "console":
        return discard
    console = process_console(_STDERR)

    def handle(note: Note, source: str) -> None:
        console.put(event_line(note, source, origin, time.time()))

    return handle


def discard(note: Note, source: str) -> None:
    """Discard the note."""


def event_line(note: Note, source: str, origin: EventOrigin, now_s: float) -> bytes:
    """Return a note as one line in the form of torch's events."""
    state = _state(note)
    event = {
        "name": _STATUS + state if state else f"elastane.{note.kind}",
        "source": "WORKER" if note.kind is EventKind.WORKER_EXITED else "AGENT",
        "timestamp": int(now_s),
        "metadata": {
            "run_id": origin.job,
            "hostname": origin.host,
            "state": state or str(note.kind),
            "global_rank": note.data.get("rank"),
            "worker_id": note.data.get("pid"),
            "raw_error": note.reason if state == "FAILED" else None,
            "told_by": source,
            "reason": note.reason,
            "node": note.node_id or origin.node,
            "round": note.fence.round if note.fence else None,
            "attempt": note.fence.attempt if note.fence else None,
            **{f"data_{key}": value for key, value in note.data.items()},
        },
    }
    return msgspec.json.encode(event) + b"\n"


def _state(note: Note) -> str:
    """Return torch's name for the event, or an empty string."""
    if note.kind is EventKind.WORKER_EXITED:
        return "FAILED" if note.data.get("exit_code", 0) else "SUCCEEDED"
    if note.kind is EventKind.JOB_ENDED:
        return "SUCCEEDED" if note.data.get("ok", True) else "FAILED"
    return _STATES.get(note.kind, "")


_STATES = {EventKind.ROUND_SETTLED: "RENDEZVOUS", EventKind.WORKERS_STARTING: "START"}
