"""--event-log-handler: lines that torch's own reader accepts."""

import pytest

from elastane.observe.events import EventOrigin
from elastane.observe.logging import HANDLERS, discard, event_handler, event_line
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Fence

TELLER = EventOrigin(job="digits", node="host-a", host="a.example", pid=3)


@pytest.mark.parametrize(
    ("kind", "data", "name", "source"),
    [
        (EventKind.WORKER_EXITED, {"local_rank": 1},
         "torchelastic.worker.status.SUCCEEDED", "WORKER"),
        (EventKind.WORKER_EXITED, {"rank": 5, "exit_code": 3, "pid": 9},
         "torchelastic.worker.status.FAILED", "WORKER"),
        (EventKind.JOB_ENDED, {"ok": False}, "torchelastic.worker.status.FAILED", "AGENT"),
        (EventKind.NODE_DEPARTED, {}, "elastane.node-departed", "AGENT"),
    ],
)  # fmt: skip
def test_a_line_is_an_event_as_torch_reads_it(kind, data, name, source):
    events = pytest.importorskip("torch.distributed.elastic.events")
    note = LogEvent(kind=kind, reason="why", fence=Fence(2, 1), data=data)
    event = events.Event.deserialize(event_line(note, "agent", TELLER, 12.7).decode())
    assert (event.name, event.source, event.timestamp) == (name, events.EventSource[source], 12)
    assert event.metadata["run_id"] == "digits"
    assert event.metadata["reason"] == "why"
    assert event.metadata["global_rank"] == data.get("rank")
    assert (event.metadata["round"], event.metadata["attempt"]) == (2, 1)


def test_torchs_handlers_are_known_and_only_one_of_them_writes():
    handlers = pytest.importorskip("torch.distributed.elastic.events.handlers")
    assert set(HANDLERS) == set(handlers._log_handlers)
    for name in HANDLERS:
        assert (event_handler(name, TELLER) is discard) == (name != "console")
