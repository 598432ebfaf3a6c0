"""The needs of a job, worst first, from its view.

Pure. A need is something that a person can act on, or has to know before it becomes a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from elastane.observe.incidents import IncidentHistory
from elastane.observe.view import JobView, StragglerView
from elastane.protocol.verdicts import Kind

NEEDS_MAX = 3
# Two failures of one node may be chance; the third is a reason to look at the node.
REPEATED = 3
_RECENT = 20
# Classes of a culprit that no agent ends and that a signal does.
_LASTING = frozenset({Kind.BUSY, Kind.SLEEPS, Kind.LOCK_HELD, Kind.DATA_LOADER, Kind.DISK})


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """One need. `severity`: act, watch, or next (what a person does then)."""

    severity: str
    text: str
    hint: str = ""
    incident: int = 0


def needs_of(view: JobView) -> list[Need]:
    """Return the needs, at most NEEDS_MAX."""
    found = _after_the_end(view) if view.end is not None else _while_it_runs(view)
    order = ("act", "watch", "next")
    return sorted(found, key=lambda need: order.index(need.severity))[:NEEDS_MAX]


def _after_the_end(view: JobView) -> list[Need]:
    assert view.end is not None
    if view.end.ok:
        return []
    found = []
    fatal = view.incidents.fatal()
    if fatal is not None:
        text = f"Find out why: {fatal.title}"
        found.append(Need(severity="act", text=text, hint=fatal.cause, incident=fatal.id))
    if view.end.next_step:
        text = view.end.next_step
        found.append(Need(severity="next", text=f"{text[:1].upper()}{text[1:]}"))
    saved = [made for made in view.checkpoints if not made.slug]
    if saved:
        text = f"Start it again: step {saved[-1].step:,} is saved"
        found.append(Need(severity="next", text=text, hint=saved[-1].location))
    return found


def _while_it_runs(view: JobView) -> list[Need]:
    if view.all_left:
        text = "Start it again with the same command"
        return [Need(severity="next", text=text, hint=_from_where(view))]
    found = [*_open_incidents(view.incidents), *_standstill(view.incidents)]
    found += [*_budget(view), *_repeated(view)]
    found += [*_checkpoints(view), *_stragglers(view.stragglers)]
    if view.waiting:
        found.append(Need(severity="act", text="The job waits", hint=view.waiting))
    elif view.lacking:
        text = "The job trains with fewer workers than it could"
        found.append(Need(severity="watch", text=text, hint=view.lacking))
    if view.events_lost:
        text = f"{view.events_lost:,} events could not be written"
        hint = "The disk of the log folder was full or unreachable: this page has gaps."
        found.append(Need(severity="watch", text=text, hint=hint))
    return found


def _from_where(view: JobView) -> str:
    saved = [made for made in view.checkpoints if not made.slug]
    step = f" Step {saved[-1].step:,} is saved." if saved else ""
    return f"All nodes left before the job's end.{step}"


def troubles_of(incidents: IncidentHistory, stragglers: Mapping[int, StragglerView]) -> list[Need]:
    """Return the needs that follow from open incidents and slow ranks, worst first."""
    found = [*_open_incidents(incidents), *_stragglers(stragglers), *_standstill(incidents)]
    return found[:NEEDS_MAX]


def _open_incidents(incidents: IncidentHistory) -> list[Need]:
    return [
        Need(severity="act", text=one.title, hint=one.cause, incident=one.id)
        for one in incidents.listed[-_RECENT:]
        if one.state == "open" and one.kind != "change"
    ]


def _standstill(incidents: IncidentHistory) -> list[Need]:
    """Return how a person ends the worker for which the others wait, if no agent does that soon."""
    stall = incidents.beside("stall")
    if stall is None or stall.pid is None or stall.standstill not in (*_LASTING, Kind.RAISED):
        return []
    kill = f"kill -9 {stall.pid} on {stall.node}"
    text = f"If rank {stall.rank} does not continue by itself: {kill}"
    hint = "the others wait until the timeout of the script's process group; it costs one restart"
    if stall.standstill == Kind.RAISED:
        text = f"To end rank {stall.rank} now: {kill}"
        hint = "it may be saving or uploading in an exit handler; the others wait for its end"
    return [Need(severity="next", text=text, hint=hint, incident=stall.id)]


def _budget(view: JobView) -> list[Need]:
    used, allowed = view.restarts
    if allowed is None or not used or allowed - used > 1:
        return []
    left = allowed - used
    text = f"{'One restart is' if left else 'No restart is'} left of {allowed}"
    hint = "One failure more than that ends the job (--max-restarts)."
    return [Need(severity="watch" if left else "act", text=text, hint=hint)]


def _repeated(view: JobView) -> list[Need]:
    failures = [
        one
        for one in view.incidents.listed[-_RECENT:]
        if one.kind in ("worker", "node") or one.standstill
    ]
    nodes = Counter(one.node for one in failures)
    if len(view.nodes) < 2 or not nodes:
        return []
    node, count = nodes.most_common(1)[0]
    if count < REPEATED:
        return []
    last = next(one for one in reversed(failures) if one.node == node)
    text = f"{node} failed {count} times in the last {len(failures)} failures"
    return [Need(severity="watch", text=text, hint=last.cause, incident=last.id)]


def _stragglers(stragglers: Mapping[int, StragglerView]) -> list[Need]:
    found = list(stragglers.values())
    if not found:
        return []
    if len(found) == 1:
        return [Need(severity="watch", text=f"Rank {found[0].rank} is slow", hint=found[0].text)]
    ranks = ", ".join(str(rank) for rank in sorted(stragglers))
    return [Need(severity="watch", text=f"Ranks {ranks} are slow", hint=found[0].text)]


def _checkpoints(view: JobView) -> list[Need]:
    last = view.checkpoints[-1] if view.checkpoints else None
    if last is None or not last.slug:
        return []
    hint = f"{last.location} on {last.node} [{last.slug}]"
    return [Need(severity="act", text=f"The save of step {last.step:,} failed", hint=hint)]
