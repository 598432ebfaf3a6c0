"""Where --event-log-handler sends events: nowhere, or to stderr as lines of torch's form.

torch's events are JSON objects of name, source, timestamp and metadata; those of elastane's that
mean the same as one of torch's have its name, the others their own. The event log under --log-dir
is written in any case. It owns no file; a stuck console costs lines, never time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from elastane.observe.records import Teller
from elastane.process.streams.console import process_console
from elastane.protocol.log_events import EventKind, Note

# The names that torch 2.13 knows; its dynamic_rendezvous writes nothing either.
HANDLERS = ("null", "console", "dynamic_rendezvous")
Hear = Callable[[Note, str], None]
_STATUS = "torchelastic.worker.status."
_STDERR = 2


def event_handler(name: str, teller: Teller) -> Hear:
    """Return what hears each note and who told it (agent or coordinator)."""
    assert name in HANDLERS, name
    if name != "console":
        return hear_nothing
    console = process_console(_STDERR)

    def hear(note: Note, source: str) -> None:
        console.put(event_line(note, source, teller, time.time()))

    return hear


def hear_nothing(note: Note, source: str) -> None:
    """Take no notice."""


def event_line(note: Note, source: str, teller: Teller, now_s: float) -> bytes:
    """Return a note as one line in the form of torch's events."""
    state = _state(note)
    event = {
        "name": _STATUS + state if state else f"elastane.{note.kind}",
        "source": "WORKER" if note.kind is EventKind.WORKER_EXITED else "AGENT",
        "timestamp": int(now_s),
        "metadata": {
            "run_id": teller.job,
            "hostname": teller.host,
            "state": state or str(note.kind),
            "global_rank": note.data.get("rank"),
            "worker_id": note.data.get("pid"),
            "raw_error": note.reason if state == "FAILED" else None,
            "told_by": source,
            "reason": note.reason,
            "node": note.node_id or teller.node,
            "round": note.fence.round if note.fence else None,
            "attempt": note.fence.attempt if note.fence else None,
            **{f"data_{key}": value for key, value in note.data.items()},
        },
    }
    return msgspec.json.encode(event) + b"\n"


def _state(note: Note) -> str:
    """Return the name that torch has for what happened, or an empty string."""
    if note.kind is EventKind.WORKER_EXITED:
        return "FAILED" if note.data.get("exit_code", 0) else "SUCCEEDED"
    if note.kind is EventKind.JOB_ENDED:
        return "SUCCEEDED" if note.data.get("ok", True) else "FAILED"
    return _STATES.get(note.kind, "")


_STATES = {EventKind.ROUND_SETTLED: "RENDEZVOUS", EventKind.WORKERS_STARTING: "START"}
