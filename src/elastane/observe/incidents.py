"""The incidents of a job, from its event log: what ended a world, why, and when training continued.

Pure: an event in, the next history out. The root cause is the coordinator's finding. An incident is
open from the failure until the workers of the next world have started. The job is whole again once
as many workers as before train. A planned change is an incident of kind `change`, without a cause.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from elastane.observe.events import LoggedEvent
from elastane.protocol.diagnosis import TO_RESTART, headline, says_restart, says_why, without_noise
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import NO_RANK
from elastane.protocol.words import counted

# Incidents of a history, since a page lists some hundred, and lines of evidence of one incident.
INCIDENTS_MAX = 4096
EVIDENCE_MAX = 8
# Lines of one incident: if not all workers come back, each later world adds one.
DID_MAX = 32
TITLE_CHARS_MAX = 120
# States of a node that asked to leave, so that its departure is no incident.
GOING = frozenset({"leaving", "left", "done", "stopping", "draining"})
# Kinds that do not end a world, unless a worker fails in a stall. While one is open, incidents of
# other kinds may begin and end.
BESIDE = frozenset({"authority", "stall", "difference"})
# Events that belong to an incident if it is open when they are logged.
_FOLLOWING = frozenset(
    {
        EventKind.WORKERS_INTERRUPTED,
        EventKind.WORKERS_REGROUPED,
        EventKind.WORKERS_STARTING,
        EventKind.WORKERS_STOPPING,
        EventKind.WORKERS_STOPPED,
        EventKind.WORKERS_DRAINING,
        EventKind.NODE_LEAVING,
        EventKind.NODE_RELEASED,
        EventKind.RESTORED,
        EventKind.WAITING,
        EventKind.DRAIN_ENDED,
    }
)


class ShownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What an incident shows of the worker that is its cause.

    `is_output`: the message is only the end of its output.
    """

    title: str
    node: str
    rank: int | None
    local_rank: int | None
    pid: int | None
    message: str
    log_file: str
    is_output: bool = False


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `state`: open, recovered or fatal; times are wall clock seconds.

    `to_s`: when the next world's workers had started. `whole_s`: when as many workers as before
    trained again. `detected_s`: the age of the failure when its agent logged it. `standstill`: the
    class of the finding at a standstill, such as `busy`; empty for all other incidents.
    `is_output`: the message is only the end of the worker's output.
    `others`: failed workers after the first one, until the coordinator has found the cause.
    `ended_world`: this stall ended its world. `also_ended`: the newest of the next worlds that
    ended because of it. `trained_s`: when the nodes of the next world had made its first step.
    """

    id: int
    kind: str
    from_s: float
    round: int | None
    attempt: int | None
    title: str
    state: str = "open"
    to_s: float | None = None
    whole_s: float | None = None
    detected_s: float | None = None
    node: str = ""
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    cause: str = ""
    evidence: tuple[str, ...] = ()
    did: tuple[str, ...] = ()
    message: str = ""
    is_output: bool = False
    log_file: str = ""
    consequences: int = 0
    others: tuple[ShownFailure, ...] = ()
    standstill: str = ""
    ended_world: bool = False
    also_ended: tuple[int | None, int | None] | None = None
    trained_s: float | None = None
    world_before: int = 0
    world_after: int = 0
    # The world that follows it, and the one whose start ended it.
    next_fence: tuple[int | None, int | None] | None = None
    to_fence: tuple[int | None, int | None] | None = None

    @property
    def fence(self) -> tuple[int | None, int | None]:
        """The world that it ended."""
        return self.round, self.attempt

    @property
    def is_beside(self) -> bool:
        """Whether it ended no world, so that others may begin and end while it is open."""
        return self.kind in BESIDE and not self.ended_world

    @property
    def is_over(self) -> bool:
        """Whether no later event can belong to it."""
        return self.state == "fatal" or (self.state == "recovered" and self.whole_s is not None)

    @property
    def went_on_s(self) -> float | None:
        """When training went on, or its workers had started if they report no step."""
        return self.to_s if self.trained_s is None else self.trained_s


class IncidentHistory(msgspec.Struct, frozen=True, kw_only=True):
    """All incidents, oldest first; their numbers follow each other.

    `belongs_to`: the incident of the last event, or 0. `newest`: the number of the newest one of
    each kind in BESIDE, and under "" of the newest that ended a world.
    """

    listed: tuple[IncidentView, ...] = ()
    world_size: int = 0
    belongs_to: int = 0
    newest: dict[str, int] = {}

    def by_number(self, number: int) -> IncidentView | None:
        """Return an incident by its number; None if it does not exist or is no longer kept."""
        index = number - self.listed[0].id if self.listed else -1
        return self.listed[index] if 0 <= index < len(self.listed) else None

    def last(self) -> IncidentView | None:
        """Return the incident that was reported last.

        Its failure may be older than that of an incident that was reported before.
        """
        return self.listed[-1] if self.listed else None

    def of_world(self) -> IncidentView | None:
        """Return the newest incident that ended a world, or planned its end."""
        return self.by_number(self.newest.get("", 0))

    def current(self) -> IncidentView | None:
        """Return the incident to which later events may belong: a world's, or else the last."""
        of_world = self.of_world()
        if of_world is not None and not of_world.is_over:
            return of_world
        last = self.last()
        return last if last is not None and not last.is_over else None

    def beside(self, kind: str) -> IncidentView | None:
        """Return the newest incident of a kind in BESIDE, if it is not over."""
        newest = self.by_number(self.newest.get(kind, 0))
        return newest if newest is not None and newest.is_beside and not newest.is_over else None

    def fatal(self) -> IncidentView | None:
        """Return the incident that ended the job."""
        return next((one for one in reversed(self.listed) if one.state == "fatal"), None)

    def by_time(self, count: int) -> list[IncidentView]:
        """Return at most `count` incidents, the one that began last first."""
        return sorted(self.listed[-count:], key=lambda one: (-one.from_s, -one.id))


def after_incident_event(
    history: IncidentHistory, event: LoggedEvent, node_state: str
) -> IncidentHistory:
    """Return the history after one event.

    `node_state`: the state of the event's node before the event.
    """
    if event.kind == EventKind.NODE_DEPARTED and node_state in GOING:
        return _noted(history)
    rule = _RULES.get(event.kind)
    if rule is not None:
        return rule(history, event)
    return _noted(history) if event.kind in _FOLLOWING else history


def _noted(history: IncidentHistory) -> IncidentHistory:
    """Let the last event belong to the current incident."""
    current = history.current()
    return msgspec.structs.replace(history, belongs_to=current.id if current else 0)


def _changed(
    history: IncidentHistory, incident: IncidentView, /, **changes: object
) -> IncidentHistory:
    """Return the history with one incident changed, to which the last event belongs."""
    replaced = msgspec.structs.replace(incident, **changes)
    listed = history.listed
    index = incident.id - listed[0].id
    return msgspec.structs.replace(
        history,
        listed=(*listed[:index], replaced, *listed[index + 1 :]),
        belongs_to=incident.id,
    )


def _opened(
    history: IncidentHistory, event: LoggedEvent, kind: str, /, title: str = "", **more: object
) -> IncidentHistory:
    """Return the history with a new incident, to which the last event belongs.

    An open incident is closed if it ended a world and the new one ended the next world.
    """
    replaced = history.of_world()
    if replaced is not None and replaced.state == "open" and kind not in BESIDE:
        did = _with_did(replaced, "another incident came before its workers had started")
        history = _changed(history, replaced, state="recovered", to_s=event.time_s, did=did)
    stall = history.beside("stall")
    if stall is not None and kind not in BESIDE:
        history = _ended(history, stall, event)  # Its world is over.
    last = history.last()
    opened = IncidentView(
        id=last.id + 1 if last else 1,
        kind=kind,
        from_s=event.time_s,
        round=event.round,
        attempt=event.attempt,
        title=title[:TITLE_CHARS_MAX],
        node=event.node,
        world_before=history.world_size,
        world_after=history.world_size,
    )
    opened = msgspec.structs.replace(opened, **more)
    listed = (*history.listed, opened)[-INCIDENTS_MAX:]
    newest = {**history.newest, kind if kind in BESIDE else "": opened.id}
    return msgspec.structs.replace(history, listed=listed, belongs_to=opened.id, newest=newest)


def _of_world(history: IncidentHistory, event: LoggedEvent) -> IncidentView | None:
    """Return the current incident if it ended the world that the event is about."""
    current = history.current()
    if current is None or current.is_beside:
        return None
    is_its = (event.round, event.attempt) in (current.fence, current.also_ended)
    return current if is_its else None


def _worker_exited(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    code = event.number("exit_code")
    if code is None or code == 0 or event.data.get("stopped"):
        return _noted(history)
    rank = event.number("rank")
    rank = None if rank in (None, NO_RANK) else rank
    who = f"worker of local rank {event.number('local_rank')}" if rank is None else f"rank {rank}"
    text = f"{who} on {event.node}: {event.reason}"
    incident = _of_world(history, event)
    failed = _shown_failure(event, rank, who)
    if incident is not None:
        evidence = (*incident.evidence, text)[:EVIDENCE_MAX]
        others = (*incident.others, failed)[:EVIDENCE_MAX]
        changes: dict[str, object] = {"evidence": evidence, "others": others}
        if incident.standstill and rank is not None and rank == incident.rank:
            changes |= _said(failed)
        return _changed(history, incident, **changes)
    restarted = _cause_of_restart(history, event)
    said = event.text("message")
    if restarted is not None and says_restart(code, said):
        return _ends_next_world(history, restarted, event, f"{text}: {headline(said)}")
    standstill = _standstill(history, event)
    if standstill is not None:
        return _ends_world(history, standstill, event, text, failed)
    age_s = event.measure("age_s")
    return _opened(
        history,
        event,
        "worker",
        from_s=event.time_s - age_s,
        detected_s=age_s,
        cause=_cause(event),
        evidence=(text,),
        **msgspec.structs.asdict(failed),
    )


def _cause(event: LoggedEvent) -> str:
    """Return why a worker ended, until the coordinator has found that."""
    said = headline(event.text("message"))
    return f"{event.reason}: {said}" if says_why(said) else event.reason


def _shown_failure(event: LoggedEvent, rank: int | None, who: str) -> ShownFailure:
    """Return what an incident shows of a worker that ended; `who`: its rank in words."""
    said = without_noise(headline(event.text("message")))
    if event.data.get("output") and not says_why(said):
        said = ""
    how = event.reason.partition(" (")[0]
    title = f"{who[0].upper()}{who[1:]} on {event.node}: {f'{how}: {said}' if said else how}"
    return ShownFailure(
        title=title[:TITLE_CHARS_MAX],
        node=event.node,
        rank=rank,
        local_rank=event.number("local_rank"),
        pid=event.number("pid"),
        message=event.text("message"),
        log_file=event.text("log_file"),
        is_output=bool(event.data.get("output")),
    )


def _said(failed: ShownFailure | None) -> dict[str, object]:
    """Return the fields of an incident about what a worker said; None: its worker lives."""
    if failed is None:
        return {"message": "", "log_file": "", "is_output": False}
    return {
        "message": failed.message, "log_file": failed.log_file, "is_output": failed.is_output
    }  # fmt: skip


def _standstill(history: IncidentHistory, event: LoggedEvent) -> IncidentView | None:
    """Return the open standstill of the event's world whose culprit was named."""
    stall = _open_stall(history, event)
    return stall if stall is not None and stall.standstill and stall.rank is not None else None


def _open_stall(history: IncidentHistory, event: LoggedEvent) -> IncidentView | None:
    """Return the open standstill of the event's world."""
    stall = history.beside("stall")
    return stall if stall and stall.fence == (event.round, event.attempt) else None


def _ends_world(
    history: IncidentHistory,
    stall: IncidentView,
    event: LoggedEvent,
    text: str,
    failed: ShownFailure,
) -> IncidentHistory:
    """Let a standstill be the incident that ends its world, since a worker of it has failed.

    Most often the failure follows from the standstill: its agent ended the worker, or a worker that
    waited gave up. So the cause remains what was found, until the coordinator has found another.
    """
    changes: dict[str, object] = {
        "evidence": (*stall.evidence, text)[:EVIDENCE_MAX],
        "others": (*stall.others, failed)[:EVIDENCE_MAX],
    }
    if event.number("rank") == stall.rank:
        changes["local_rank"], changes["pid"] = event.number("local_rank"), event.number("pid")
        changes |= _said(failed)
    history = _changed(history, stall, ended_world=True, **changes)
    return msgspec.structs.replace(history, newest={**history.newest, "": stall.id})


def _cause_of_restart(history: IncidentHistory, event: LoggedEvent) -> IncidentView | None:
    """Return the failure after which the event's world was built, if that made no step.

    Workers of such a world that end for all to restart do so because of that failure.
    """
    last = history.of_world()
    if last is None or last.kind == "change" or last.state == "fatal" or last.trained_s:
        return None
    return last if last.next_fence == (event.round, event.attempt) else None


def _ends_next_world(
    history: IncidentHistory, incident: IncidentView, event: LoggedEvent, text: str
) -> IncidentHistory:
    """Let an incident end the next world too, so that it lasts until the one after that."""
    return _changed(
        history,
        incident,
        state="open",
        to_s=None,
        whole_s=None,
        also_ended=(event.round, event.attempt),
        evidence=(*incident.evidence, text)[:EVIDENCE_MAX],
    )


def _node_departed(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    incident = _of_world(history, event)
    if incident is None and event.data.get("spare"):
        return history  # No world ends with it, so that no later one would close an incident.
    if incident is None:
        age_s = event.measure("age_s")
        return _opened(
            history,
            event,
            "node",
            f"Node {event.node} was lost",
            cause=event.reason,
            from_s=event.time_s - age_s,
            detected_s=age_s or None,
        )
    text = f"node {event.node}: {event.reason}"
    return _changed(history, incident, evidence=(*incident.evidence, text)[:EVIDENCE_MAX])


def _incident(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    incident = _of_world(history, event)
    if incident is not None:
        return _changed(history, incident, cause=incident.cause or event.reason)
    restarted = _cause_of_restart(history, event)
    if restarted is not None and event.reason.endswith(TO_RESTART):
        return _ends_next_world(history, restarted, event, event.reason)
    stall, is_lost = _open_stall(history, event), bool(event.number("departed"))
    if stall is None or is_lost:
        kind = "node" if is_lost else "failure"
        return _opened(history, event, kind, _sentence(event.reason), cause=event.reason, node="")
    history = _changed(history, stall, ended_world=True)
    return msgspec.structs.replace(history, newest={**history.newest, "": stall.id})


def _charged(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """Add the coordinator's finding, at a restart or a replacement."""
    incident = _of_world(history, event)
    if incident is None:
        history = _opened(history, event, "worker", _sentence(event.text("cause") or event.reason))
        incident = history.listed[-1]
    return _changed(
        history,
        incident,
        consequences=event.number("consequences") or 0,
        did=_with_did(incident, event.reason),
        **_finding(incident, event),
    )


def _finding(incident: IncidentView, event: LoggedEvent) -> dict[str, object]:
    """Return the cause as the coordinator found it.

    What ended a later world only follows from the cause.
    """
    if incident.also_ended == (event.round, event.attempt):
        return {}
    rank = event.number("cause_rank")
    rank = incident.rank if rank is None else rank
    node = event.text("cause_node") or incident.node
    said = event.text("cause")
    if incident.standstill and incident.cause in said:
        return {"cause": said, "others": ()}
    if incident.standstill and (rank, node) == (incident.rank, incident.node):
        return {"others": ()}  # An agent that ended its own worker said more than its end does.
    found: dict[str, object] = {"node": node, "rank": rank, "others": ()}
    if (rank, node) != (incident.rank, incident.node):
        # The log had the failure of another worker first, whose output is of no use here.
        named = (one for one in incident.others if (one.rank, one.node) == (rank, node))
        if (cause := next(named, None) or _named_worker(event, node, rank)) is not None:
            found |= msgspec.structs.asdict(cause)
    return {**found, "cause": said or incident.cause}


def _named_worker(event: LoggedEvent, node: str, rank: int | None) -> ShownFailure | None:
    """Return the cause's worker as the coordinator names it; None if its event does not.

    Its end is no failure in the log if its program returned, or was logged on another host only.
    """
    end = event.text("cause_exit")
    if not end or rank is None:
        return None
    return ShownFailure(
        title=f"Rank {rank} on {node}: {end}"[:TITLE_CHARS_MAX],
        node=node,
        rank=rank,
        local_rank=event.number("cause_local_rank"),
        pid=event.number("cause_pid"),
        message="",
        log_file=event.text("cause_log"),
    )


def _round_settled(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    size = event.number("world_size") or 0
    before, first = history.world_size, not history.world_size
    history = msgspec.structs.replace(history, world_size=size)
    incident = history.current()
    if incident is None or incident.is_beside:
        if first or size == before:
            return history
        sign = "joined" if size > before else "left"
        title = f"{counted(abs(size - before), 'worker')} {sign}"
        history = _opened(history, event, "change", title, world_before=before, cause=event.reason)
        incident = history.listed[-1]
    is_whole = incident.kind == "change" or size >= incident.world_before
    return _changed(
        history,
        incident,
        world_after=size,
        next_fence=(event.round, event.attempt),
        whole_s=event.time_s if is_whole else None,
        did=_with_did(incident, f"world of {counted(size, 'worker')} (round {event.round})"),
    )


def _workers_started(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """End the incident when the workers of the next world have started on all nodes."""
    last, fence = history.of_world(), (event.round, event.attempt)
    if last is None or last.state == "fatal" or fence not in (last.next_fence, last.to_fence):
        return history
    if last.to_s is not None and fence != last.to_fence:
        return _noted(history)
    to_s = max(event.time_s, last.to_s or event.time_s)
    return _changed(history, last, state="recovered", to_s=to_s, to_fence=fence)


def _drain_started(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    current = history.current()
    if current is not None and not current.is_beside:
        return _noted(history)
    return _opened(history, event, "change", _clause(event.reason), cause=event.reason)


def _first_step(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """Record when a node of the world after an incident has made its first step."""
    last, fence = history.of_world(), (event.round, event.attempt)
    if last is None:
        return history
    is_first = last.trained_s is None and fence == last.next_fence
    if not is_first and (fence != last.to_fence or last.trained_s is None):
        return history
    made_s = event.time_s - event.measure("age_s")
    return _changed(history, last, trained_s=max(made_s, last.trained_s or made_s))


def _stall(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """Open an incident, unless one says already for whom the workers of this world wait."""
    stall = _open_stall(history, event)
    if stall is not None:
        return _changed(history, stall, evidence=(*stall.evidence, event.reason)[:EVIDENCE_MAX])
    return _opened(history, event, "stall", "All workers wait for one another", cause=event.reason)


def _culprit(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """Open an incident for a standstill, or replace what an open one says of it.

    A culprit that is found after a failure is the cause of the incident that this failure opened.
    """
    still_s, ranks = event.measure("still_s"), event.text("ranks")
    first = ranks.partition(",")[0]
    found: dict[str, object] = {
        "cause": event.reason,
        "title": _sentence(event.reason)[:TITLE_CHARS_MAX],
        "node": event.text("culprit_node") or event.node,
        "rank": int(first) if first.isdecimal() else None,
        "local_rank": event.number("culprit_local_rank"),
        "pid": event.number("culprit_pid"),
        "standstill": event.text("class") or "unknown",
    }
    stall = _open_stall(history, event)
    if stall is not None:
        return _changed(history, stall, **found)
    incident = _of_world(history, event)
    if incident is not None:
        if found["rank"] != incident.rank:
            # The incident shows a worker that failed for it.
            own = next((one for one in incident.others if one.rank == found["rank"]), None)
            found |= _said(own)
        return _changed(history, incident, **found)
    history = _opened(history, event, "stall", str(found["title"]))
    from_s = event.time_s - still_s
    return _changed(history, history.listed[-1], from_s=from_s, detected_s=still_s, **found)


def _culprit_ended(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """End a standstill: its workers make progress again."""
    stall = _open_stall(history, event)
    return history if stall is None else _ended(history, stall, event)


def _progress(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    """End a stall at the next step; the log may count steps late that were made before it."""
    stall = history.beside("stall")
    if stall is None:
        return history
    found_s, moved_s = (
        stall.from_s + (stall.detected_s or 0.0),
        event.time_s - event.measure("age_s"),
    )
    return _ended(history, stall, event) if moved_s > found_s else history


def _authority_lost(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    title = "The store does not accept decisions"
    return _opened(history, event, "authority", title, cause=event.reason)


def _authority_regained(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    authority = history.beside("authority")
    return history if authority is None else _ended(history, authority, event)


def _ended(history: IncidentHistory, incident: IncidentView, event: LoggedEvent) -> IncidentHistory:
    """End an incident that did not end a world, so that no worker is missing after it."""
    return _changed(history, incident, state="recovered", to_s=event.time_s, whole_s=event.time_s)


def _replica_differed(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    return _opened(
        history,
        event,
        "difference",
        f"A worker on {event.node} differed and was healed",
        cause=event.reason,
        rank=event.number("rank"),
        local_rank=event.number("local_rank"),
        state="recovered",
        to_s=event.time_s,
        whole_s=event.time_s,
    )


def _job_ended(history: IncidentHistory, event: LoggedEvent) -> IncidentHistory:
    current = history.current()
    is_ok = bool(event.data.get("ok"))
    for kind in BESIDE:
        beside = history.beside(kind)
        if beside is not None and (is_ok or beside is not current):
            history = _ended(history, beside, event)
    if is_ok:
        current = history.current()
        if current is None:
            return history
        to_s = event.time_s if current.to_s is None else current.to_s
        return _changed(history, current, state="recovered", to_s=to_s, whole_s=event.time_s)
    if current is None or current.state == "recovered":
        history = _opened(history, event, "end", _sentence(event.reason), cause=event.reason)
        current = history.listed[-1]
    return _changed(
        history,
        current,
        state="fatal",
        to_s=event.time_s,
        did=_with_did(current, f"the job ended: {_without_cause(event)}"),
        **_finding(current, event),
    )


def _with_did(incident: IncidentView, text: str) -> tuple[str, ...]:
    """Append a line to what was done about an incident; the oldest lines are dropped."""
    return (*incident.did, text)[-DID_MAX:]


def _without_cause(event: LoggedEvent) -> str:
    """Return the reason of the job's end after the words for the failure."""
    found = event.reason.rpartition("; ")[2]
    return found or event.reason


def _sentence(text: str) -> str:
    """Return the first clause of a reason as a title; the reason must not begin with a name."""
    clause = _clause(text)
    return clause[:1].upper() + clause[1:]


def _clause(text: str) -> str:
    """Return the first clause of a reason."""
    return text.partition(" (")[0].partition("; ")[0]


_RULES: dict[str, Callable[[IncidentHistory, LoggedEvent], IncidentHistory]] = {
    EventKind.WORKER_EXITED: _worker_exited,
    EventKind.NODE_DEPARTED: _node_departed,
    EventKind.INCIDENT: _incident,
    EventKind.RESTART: _charged,
    EventKind.REPLACEMENT: _charged,
    EventKind.ROUND_SETTLED: _round_settled,
    EventKind.WORKERS_STARTED: _workers_started,
    EventKind.WORKERS_TRAINING: _first_step,
    EventKind.DRAIN_STARTED: _drain_started,
    EventKind.GROWTH: _drain_started,
    EventKind.STALL: _stall,
    EventKind.CULPRIT: _culprit,
    EventKind.CULPRIT_ENDED: _culprit_ended,
    EventKind.PROGRESS: _progress,
    EventKind.PACE: _progress,
    EventKind.AUTHORITY_LOST: _authority_lost,
    EventKind.AUTHORITY_REGAINED: _authority_regained,
    EventKind.COORDINATOR_STARTED: _authority_regained,
    EventKind.REPLICA_DIFFERED: _replica_differed,
    EventKind.JOB_ENDED: _job_ended,
}
