"""What a keeper tells, as notes for the event log: pure."""

from __future__ import annotations

from elastane.protocol.log_events import EventKind, Note
from elastane.snapshots.events import News, PersistFailed, RestoredEvent, Saved


def note_of(news: News, node_id: str) -> Note:
    """Return the note that says it."""
    data: dict[str, str | int | float | bool] = {"step": news.key.step, "place": news.place}
    match news:
        case Saved():
            kind = EventKind.CHECKPOINT_SAVED
            data |= {"bytes": news.size_bytes, "seconds": round(news.seconds, 3)}
            data |= {"why": news.reason, "saves": news.saves}
            reason = f"step {news.key.step} is durable"
        case PersistFailed():
            kind = EventKind.CHECKPOINT_FAILED
            data |= {"slug": news.slug}
            reason = f"step {news.key.step}: {news.reason}"
        case RestoredEvent():
            kind, reason = EventKind.RESTORED, f"step {news.key.step} from {news.place}"
            reason += f": {news.why}" if news.why else ""
    return Note(kind=kind, reason=reason, node_id=node_id, data=data)
