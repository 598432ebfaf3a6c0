"""What a job did as spans of time, for tools that show traces: from its view and its account.

Pure. One run of a job is one trace. Its spans are the job, its worlds, its incidents with the
causes of the time that each cost, other lost time, and saves. A span that is over does not change
any more, and has the same key each time, so that it can be sent once while the job runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from elastane.observe.account import Account, Interval, TimeCause
from elastane.observe.incidents import IncidentView
from elastane.observe.view import CheckpointView, JobView
from elastane.protocol.words import counted

# The account of the last seconds may change: step counts, which say what was retried, are logged
# every ten seconds.
SETTLE_S = 60.0
_JOB = "job"

Value = str | int | float | bool


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time, in wall clock seconds. `parent`: the key of the span it is part of.

    `error`: why it counts as one, in words. `is_over`: it does not change any more.
    """

    key: str
    parent: str
    name: str
    from_s: float
    to_s: float
    attributes: dict[str, Value]
    error: str = ""
    is_over: bool = True


def spans_of(view: JobView, account: Account | None) -> list[Span]:
    """Return the spans of a job's current run; those that are open end with its last event."""
    if view.started_s is None or view.last_s is None:
        return []
    parts = (_worlds(view), _incidents(view), _times(view, account), _saves(view))
    return [_job(view, account), *(span for part in parts for span in part)]


def trace_key(view: JobView) -> str:
    """Return what tells the trace of this run from any other."""
    return f"{view.job}/{view.run}/{view.started_s}"


def _end_s(view: JobView) -> float:
    return view.end.time_s if view.end is not None else view.last_s or 0.0


def _job(view: JobView, account: Account | None) -> Span:
    used, _ = view.restarts
    attributes: dict[str, Value] = {"job": view.job, "run": view.run, "restarts": used}
    if account is not None:
        attributes["goodput"] = round(account.goodput, 4)
    if view.steps and view.steps[-1].steps is not None:
        attributes["steps"] = view.step
    if view.end is not None:
        attributes["reason"] = view.end.reason
        if view.end.exit_code is not None:
            attributes["exit_code"] = view.end.exit_code
    return Span(
        key=_JOB,
        parent="",
        name=f"job {view.job}",
        from_s=view.started_s or 0.0,
        to_s=_end_s(view),
        attributes=attributes,
        error=view.end.reason if view.end is not None and not view.end.ok else "",
        is_over=view.end is not None,
    )


def _worlds(view: JobView) -> Iterator[Span]:
    ends = [*(point.time_s for point in view.worlds[1:]), _end_s(view)]
    for world, to_s in zip(view.worlds, ends, strict=False):
        made = sum(one.made for one in view.steps if world.time_s < one.time_s <= to_s)
        yield Span(
            key=f"world/{world.time_s}",
            parent=_JOB,
            name=f"world of {counted(world.size, 'worker')}",
            from_s=world.time_s,
            to_s=max(world.time_s, to_s),
            attributes={"world_size": world.size, "steps": made},
            is_over=world is not view.worlds[-1] or view.end is not None,
        )


def _incidents(view: JobView) -> Iterator[Span]:
    for one in view.incidents.listed:
        to_s = _end_s(view) if one.to_s is None else one.to_s
        yield Span(
            key=_of_incident(one.id),
            parent=_JOB,
            name=f"incident #{one.id}: {one.title}",
            from_s=one.from_s,
            to_s=max(one.from_s, to_s, one.whole_s or 0.0),
            attributes=_facts(one),
            error="" if one.kind == "change" else one.cause or one.title,
            is_over=one.is_over or view.end is not None,
        )


def _of_incident(number: int) -> str:
    return f"incident/{number}"


def _facts(one: IncidentView) -> dict[str, Value]:
    found: dict[str, Value | None] = {
        "kind": one.kind,
        "state": one.state,
        "node": one.node or None,
        "rank": one.rank,
        "world_before": one.world_before or None,
        "world_after": one.world_after or None,
        "cause": one.cause or None,
        "detected_s": one.detected_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _times(view: JobView, account: Account | None) -> Iterator[Span]:
    """Return the time that was not productive, by its causes."""
    settled_s = _end_s(view) if view.end is not None else _end_s(view) - SETTLE_S
    known = {one.id for one in view.incidents.listed}
    for one in _joined(account):
        if one.cause is not TimeCause.PRODUCTIVE:
            yield Span(
                key=f"time/{one.from_s}",
                parent=_of_incident(one.incident) if one.incident in known else _JOB,
                name=str(one.cause),
                from_s=one.from_s,
                to_s=one.to_s,
                attributes={"cause": str(one.cause), "seconds": round(one.seconds, 3)},
                is_over=one.to_s <= settled_s,
            )


def _joined(account: Account | None) -> Iterator[Interval]:
    """Return the intervals, those that follow each other for one cause as one."""
    joined: Interval | None = None
    for one in account.intervals if account is not None else ():
        if joined is None or (one.cause, one.incident) != (joined.cause, joined.incident):
            if joined is not None:
                yield joined
            joined = one
        else:
            joined = msgspec.structs.replace(joined, to_s=one.to_s)
    if joined is not None:
        yield joined


def _saves(view: JobView) -> Iterator[Span]:
    for made in view.checkpoints:
        yield _save(made)


def _save(made: CheckpointView) -> Span:
    return Span(
        key=f"save/{made.node}/{made.step}/{made.time_s}",
        parent=_JOB,
        name=f"save of step {made.step}",
        from_s=made.begun_s,
        to_s=max(made.begun_s, made.begun_s + made.seconds),
        attributes={
            "step": made.step,
            "location": made.location,
            "node": made.node,
            "bytes": made.stored_bytes,
        },
        error=made.slug,
    )
