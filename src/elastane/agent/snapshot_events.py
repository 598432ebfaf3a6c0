"""Converts reports of a snapshot server into events of the log: pure."""

from __future__ import annotations

from elastane.protocol.log_events import EventKind, Note
from elastane.snapshots.events import PersistFailed, RestoredEvent, Saved, SnapshotEvent


def snapshot_event(event: SnapshotEvent, node_id: str) -> Note:
    """Return the event for the log."""
    data: dict[str, str | int | float | bool] = {"step": event.key.step, "place": event.place}
    match event:
        case Saved():
            kind = EventKind.CHECKPOINT_SAVED
            data |= {"bytes": event.size_bytes, "seconds": round(event.seconds, 3)}
            data |= {"why": event.reason, "saves": event.saves}
            reason = f"step {event.key.step} is durable"
        case PersistFailed():
            kind = EventKind.CHECKPOINT_FAILED
            data |= {"slug": event.slug}
            reason = f"step {event.key.step}: {event.reason}"
        case RestoredEvent():
            kind, reason = EventKind.RESTORED, f"step {event.key.step} from {event.place}"
            reason += f": {event.why}" if event.why else ""
    return Note(kind=kind, reason=reason, node_id=node_id, data=data)
