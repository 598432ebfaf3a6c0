"""The view of a job that is displayed: built from its logged events and its training progress.

The view is pure: each function takes a view and an input, and returns the next view; it uses no
file, clock or screen. An unknown kind of event, such as one of a newer version, becomes a line of
text and changes nothing else. The terminal (`screen`) and the web page show the same view.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from elastane.observe.events import TIME_MAX_S, LoggedEvent, described
from elastane.observe.incidents import IncidentHistory, after_incident_event
from elastane.observe.recent import Recent
from elastane.observe.runs import RunTrack
from elastane.protocol.log_events import MEASURED, EventKind
from elastane.protocol.unreadable import UNREADABLE

# Bounds: a screen shows some tens of lines, and a curve has at most as many points as the screen.
LINES_MAX = 500
HISTORY_MAX = 4096
# A job that saves every five minutes makes 2,016 checkpoints a week.
CHECKPOINTS_MAX = 4096
# Nodes of a view, since hosts may come back with new names: the node that left first is dropped.
NODES_MAX = 4096
# Stragglers of a view: more than a coordinator names at a time, since a newer one may name more.
STRAGGLERS_MAX = 64
# Points of progress. Beyond this number those of the older half are merged; eleven hours fit.
STEP_POINTS_MAX = 8192
# Points of step times. Beyond this number every second one of the older half is dropped; eight
# hours fit.
OWN_PARTS_MAX = 2048
# While steps are made, the log has a count every ten seconds. So the steps of a count were made at
# most twice as long before it: a count that is one heartbeat late leaves no gap.
SPREAD_S = 20.0

NODE_STATES = {
    EventKind.AGENT_STARTED: "starting",
    EventKind.NODE_JOINED: "waiting",
    EventKind.NODE_REGISTERED_AGAIN: "waiting",
    EventKind.WORKERS_STARTING: "starting",
    EventKind.WORKERS_STARTED: "training",
    EventKind.WORKERS_DRAINING: "draining",
    EventKind.WORKERS_STOPPING: "stopping",
    EventKind.WORKERS_STOPPED: "waiting",
    EventKind.NODE_LEAVING: "leaving",
    EventKind.NODE_RELEASED: "left",
    EventKind.NODE_DEPARTED: "gone",
    EventKind.AGENT_STOPPED: "left",
}
# Events whose reasons repeat those of the incident, the round or the job's end that caused them,
# and step counts and times, which have charts of their own.
ECHOES = frozenset(
    {
        EventKind.COORDINATOR_FOUND,
        EventKind.NODE_READY,
        EventKind.WORKERS_STARTING,
        EventKind.WORKERS_STOPPING,
        EventKind.WORKERS_STOPPED,
        EventKind.AGENT_STOPPED,
        EventKind.COORDINATOR_STOPPED,
        *MEASURED,
    }
)
# Final states, which later events of the same agent must not overwrite.
_ENDED = ("gone", "left", "done", "failed", "stopped")
_REVIVING = (
    EventKind.AGENT_STARTED,
    EventKind.NODE_JOINED,
    EventKind.NODE_REGISTERED_AGAIN,
    EventKind.WORKERS_STARTING,
)
TONES = {
    EventKind.INCIDENT: "bad",
    EventKind.NODE_DEPARTED: "bad",
    EventKind.NODE_REFUSED: "bad",
    EventKind.NODE_LEFT_OUT: "bad",
    EventKind.NODE_READMITTED: "good",
    EventKind.AUTHORITY_LOST: "bad",
    EventKind.COORDINATOR_AWAY: "bad",
    EventKind.CHECKPOINT_FAILED: "bad",
    EventKind.ZYGOTE_DIED: "bad",
    EventKind.CULPRIT: "bad",
    EventKind.CULPRIT_ENDED: "good",
    EventKind.STRAGGLER: "bad",
    EventKind.STRAGGLER_ENDED: "good",
    EventKind.ROUND_SETTLED: "good",
    EventKind.NODE_JOINED: "good",
    EventKind.DRAIN_ENDED: "good",
    EventKind.JOB_ENDED: "good",
}


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a training script reported; `time` is its host's clock in seconds.

    A script that recovers in place reports `round`, because one process sees several rounds.
    """

    time: float
    step: int
    total_steps: int
    world_size: int
    pid: int
    round: int = 0
    restart_count: int = 0
    epoch: int = 0
    loss: float | None = None
    accuracy: float | None = None
    final_accuracy: float | None = None
    final_loss: float | None = None


class WorkerView(msgspec.Struct, frozen=True):
    """One worker: its process and its state."""

    pid: int
    state: str = "training"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its state in a word and the reason, and its workers in the order of local rank."""

    name: str
    state: str = "starting"
    workers: tuple[WorkerView, ...] = ()
    coordinates: bool = False
    host: str = ""
    since_s: float = 0.0
    why: str = ""


class StragglerView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that makes the others wait in each step; `why` is a word, `text` a sentence."""

    rank: int
    node: str
    why: str
    text: str
    since_s: float


class ViewLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event in words. `tone` is good, bad, plain, or act (an action by a person).

    `incident`: the number of the incident that the event belongs to, or 0.
    """

    time_s: float
    node: str
    kind: str
    text: str
    tone: str = "plain"
    incident: int = 0


class StepPoint(msgspec.Struct, frozen=True):
    """How many steps the whole world had made at a time; None: its workers only measure them.

    `made`: those of them that are of no earlier point; all were made after `since_s`.
    """

    time_s: float
    steps: int | None
    since_s: float
    made: int = 0


class WorldPoint(msgspec.Struct, frozen=True):
    """The size of the world from a time on."""

    time_s: float
    size: int


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that was saved, or that failed if it has a slug.

    Its save had begun at `begun_s`; the write took `seconds`, and it was reported at `time_s`.
    """

    time_s: float
    begun_s: float
    step: int
    location: str
    node: str
    stored_bytes: int = 0
    seconds: float = 0.0
    why: str = ""
    slug: str = ""


class WorkerName(msgspec.Struct, frozen=True):
    """One worker: by its node and local rank, or by its rank where these are not known."""

    node: str = ""
    local_rank: int | None = None
    rank: int | None = None


class OwnParts(msgspec.Struct, frozen=True):
    """How long the workers' own parts of a step took, as multiples of the median of all.

    `ratios`: one for each of `workers`. `is_whole`: these are all workers, not the slowest.
    `count`: that of all workers.
    """

    time_s: float
    workers: tuple[WorkerName, ...]
    ratios: tuple[float, ...]
    is_whole: bool
    median_ms: float
    count: int


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended."""

    time_s: float
    ok: bool
    reason: str
    exit_code: int | None = None
    next_step: str = ""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is displayed. `run` counts the jobs that ran under this name so far.

    `restarts`: used and allowed ones. `waiting`: what the job waits for, in words; `lacking`: why
    it trains with fewer workers than it could. `stragglers`: those of the current world by rank.
    `saved` and `not_saved` count all checkpoints of the run, also those without an event of their
    own, and those that are no longer kept.
    """

    job: str = ""
    run: int = 1
    runs: RunTrack = RunTrack()
    started_s: float | None = None
    last_s: float | None = None
    nodes: dict[str, NodeView] = {}
    members: tuple[str, ...] = ()
    round: int | None = None
    attempt: int | None = None
    world_size: int = 0
    worlds: Recent[WorldPoint] = Recent(HISTORY_MAX)
    step: int = 0
    total_steps: int = 0
    steps: Recent[StepPoint] = Recent(STEP_POINTS_MAX)
    own_parts: Recent[OwnParts] = Recent(OWN_PARTS_MAX)
    losses: Recent[float] = Recent(HISTORY_MAX)
    accuracies: Recent[float] = Recent(HISTORY_MAX)
    learned: float | None = None
    lines: Recent[ViewLine] = Recent(LINES_MAX)
    incidents: IncidentHistory = IncidentHistory()
    checkpoints: Recent[CheckpointView] = Recent(CHECKPOINTS_MAX)
    saved: int = 0
    not_saved: int = 0
    restarts: tuple[int, int | None] = (0, None)
    waiting: str = ""
    lacking: str = ""
    stragglers: dict[int, StragglerView] = {}
    events_lost: int = 0
    end: JobEnd | None = None

    @property
    def all_left(self) -> bool:
        """Whether all nodes left before the job's end, so that nothing of it runs."""
        states = {node.state for node in self.nodes.values()}
        return self.end is None and states <= {"left", "gone"} and "left" in states

    def node(self, name: str) -> NodeView | None:
        """Return a node by its name."""
        return self.nodes.get(name)

    def first_ranks(self) -> dict[str, int]:
        """Return the rank of the first worker of each known node of the world."""
        ranks: dict[str, int] = {}
        rank = 0
        for member in self.members:
            node = self.node(member)
            if node is None:
                break  # the ranks of later nodes depend on the number of this node's workers
            ranks[member] = rank
            rank += len(node.workers)
        return ranks


def after_event(view: JobView, event: LoggedEvent) -> JobView:
    """Return the view after one logged event; an event in ECHOES adds no line."""
    if not 0.0 <= event.time_s <= TIME_MAX_S:
        return view
    kind = _KINDS.get(event.kind)
    runs, begins = view.runs.after(event, is_over=view.end is not None)
    if begins:
        view = _next_run(view, event)
    node = view.node(event.node)
    incidents = view.incidents
    if incidents.belongs_to:
        incidents = msgspec.structs.replace(incidents, belongs_to=0)
    if view.end is None:
        incidents = after_incident_event(incidents, event, node.state if node else "")
    view = msgspec.structs.replace(
        view,
        job=event.job or view.job,
        runs=runs,
        started_s=event.time_s if view.started_s is None else view.started_s,
        last_s=max(event.time_s, view.last_s or 0.0),
        incidents=incidents,
    )
    if kind not in ECHOES:
        view = _with_line(view, line_of(event, node, incidents.belongs_to))
    if kind is None:
        return view
    rule = _RULES.get(kind)
    if rule is not None:
        return rule(view, event)
    return _with_node(view, _next_node(node, kind, event, is_over=view.end is not None))


class IncidentTrack:
    """Follows only the runs, incidents and stragglers of a job, as `after_event` would find them.

    It serves readers of a whole log that show no nodes, and needs the same time for a thousand
    nodes as for one.
    """

    def __init__(self) -> None:
        self.run = 1
        self.started_s: float | None = None
        self.incidents = IncidentHistory()
        self.stragglers: dict[int, StragglerView] = {}
        self._runs = RunTrack()
        self._states: dict[str, str] = {}  # of each node, the one that changed last at the end
        self._is_over = False

    def add(self, event: LoggedEvent) -> None:
        """Add an event in the merged order."""
        kind = _KINDS.get(event.kind)
        if kind is None or not 0.0 <= event.time_s <= TIME_MAX_S:
            return
        before = self._runs
        self._runs, begins = before.after(event, is_over=self._is_over)
        if begins:
            self._begin_run(before, event)
        if self.started_s is None:
            self.started_s = event.time_s
        if kind is EventKind.COORDINATOR_STARTED:
            self._states.setdefault(event.node, "starting")
        state = self._states.get(event.node)
        if self.incidents.belongs_to:
            self.incidents = msgspec.structs.replace(self.incidents, belongs_to=0)
        if not self._is_over:
            self.incidents = after_incident_event(self.incidents, event, state or "")
        if kind in NODE_STATES:
            self._set(event.node, _next_state(state or "starting", kind, event))
        self._is_over = self._is_over or kind is EventKind.JOB_ENDED
        self.stragglers = {} if self._is_over else after_straggler_event(self.stragglers, event)

    def _begin_run(self, before: RunTrack, event: LoggedEvent) -> None:
        """Begin another run under the same name; `before`: the track before its first event."""
        here = before.newer()
        self._states = {
            name: one for name, one in self._states.items() if name in here and one not in _ENDED
        }
        self.started_s = _begun_s(before, event)
        self.run, self.incidents, self._is_over = self.run + 1, IncidentHistory(), False

    def _set(self, name: str, state: str) -> None:
        if self._states.get(name) == state:
            return
        self._states.pop(name, None)
        self._states[name] = state
        if len(self._states) > NODES_MAX:
            gone = (name for name, one in self._states.items() if one in ("gone", "left"))
            self._states.pop(next(gone, ""), None)


def after_straggler_event(
    stragglers: dict[int, StragglerView], event: LoggedEvent
) -> dict[int, StragglerView]:
    """Return the ranks for which the others wait, by rank; none once their world has ended."""
    if event.kind in (EventKind.ROUND_SETTLED, EventKind.INCIDENT):
        return {}
    rank = event.number("rank")
    if rank is None or event.kind not in (EventKind.STRAGGLER, EventKind.STRAGGLER_ENDED):
        return stragglers
    found = {key: one for key, one in stragglers.items() if key != rank}
    if event.kind == EventKind.STRAGGLER and len(found) < STRAGGLERS_MAX:
        found[rank] = StragglerView(
            rank=rank,
            node=event.node,
            why=event.text("why"),
            text=event.reason,
            since_s=event.time_s,
        )
    return found


def line_of(event: LoggedEvent, node: NodeView | None, incident: int = 0) -> ViewLine:
    """Return one event in words; `node` is its node before it."""
    return ViewLine(
        time_s=event.time_s,
        node=event.node,
        kind=event.kind,
        text=described(event),
        tone=tone_of(event, node),
        incident=incident,
    )


def after_steps(view: JobView, time_s: float, steps: int) -> JobView:
    """Return the view after the coordinator said how many steps the world has made."""
    if not view.steps:
        return _with_point(view, StepPoint(time_s, steps, time_s))
    last = view.steps[-1]
    since_s = max(last.time_s, time_s - SPREAD_S)
    made = 0 if last.steps is None else max(0, steps - last.steps)
    return _with_point(view, StepPoint(time_s, steps, since_s, made))


def _with_point(view: JobView, point: StepPoint) -> JobView:
    if view.steps and point.time_s <= view.steps[-1].time_s:
        return view
    points = view.steps
    if len(points) == STEP_POINTS_MAX:
        half = STEP_POINTS_MAX // 2
        points = Recent(STEP_POINTS_MAX, [*_merged(points[:half]), *points[half:]])
    # Where the script's own progress is read, the coordinator's count of steps is older.
    has_own_progress = view.total_steps > 0
    step = view.step if point.steps is None or has_own_progress else point.steps
    return msgspec.structs.replace(view, step=step, steps=points.after(point))


def after_progress(view: JobView, point: StepProgress) -> JobView:
    """Return the view after one line of training progress."""
    losses, accuracies = view.losses, view.accuracies
    if point.loss is not None:
        losses = losses.after(point.loss)
    if point.accuracy is not None:
        accuracies = accuracies.after(point.accuracy)
    return msgspec.structs.replace(
        view,
        step=point.step,
        total_steps=point.total_steps,
        losses=losses,
        accuracies=accuracies,
        learned=point.final_loss if point.final_accuracy is None else point.final_accuracy,
    )


def after_act(view: JobView, time_s: float, node: str, text: str) -> JobView:
    """Return the view after a person outside the job acted on it."""
    return _with_line(view, ViewLine(time_s=time_s, node=node, kind="act", text=text, tone="act"))


def decode_progress(line: bytes) -> StepProgress | None:
    """Return the progress in a line, or None if the line is torn or something else."""
    try:
        return msgspec.json.decode(line, type=StepProgress)
    except UNREADABLE:
        return None


def pids_of(event: LoggedEvent) -> tuple[int, ...]:
    """Return the pids in a workers-started event, in the order of local rank."""
    words = event.text("pids").strip("()[]").replace(",", " ").split()
    return tuple(int(word) for word in words if word.isdecimal() and len(word) < 12)


def _merged(points: tuple[StepPoint, ...]) -> list[StepPoint]:
    """Merge neighbours into points of nearly equal length, at most half as many and one more.

    A merged point keeps the sum of the steps and the time in which they were made. Points are not
    merged over a gap that is longer than a point, so the gap stays.
    """
    length_s = (points[-1].time_s - points[0].since_s) * 4 / len(points)
    merged = [points[0]]
    for point in points[1:]:
        last = merged[-1]
        if point.time_s - last.since_s > length_s:
            merged.append(point)
        else:
            made = last.made + point.made
            merged[-1] = StepPoint(point.time_s, point.steps, last.since_s, made)
    return merged


def tone_of(event: LoggedEvent, node: NodeView | None) -> str:
    """Return the tone of an event; `node` is its node before it."""
    kind = _KINDS.get(event.kind)
    if kind is EventKind.WORKER_EXITED:
        return "bad" if _exit_state(event) == "failed" else "plain"
    if kind is EventKind.JOB_ENDED and not event.data.get("ok", True):
        return "bad"
    if kind is EventKind.NODE_DEPARTED and node is not None and node.state in (*_ENDED, "leaving"):
        return "plain"
    return TONES.get(kind, "plain") if kind else "plain"


def _next_run(view: JobView, event: LoggedEvent) -> JobView:
    """Return the view of another run under the same name, which begins with the event."""
    here = view.runs.newer()
    nodes = {
        name: node for name, node in view.nodes.items() if name in here and node.state not in _ENDED
    }
    started_s = _begun_s(view.runs, event)
    return JobView(job=view.job, run=view.run + 1, nodes=nodes, started_s=started_s)


def _begun_s(before: RunTrack, event: LoggedEvent) -> float:
    """Return since when a run lasts whose first event this is: the start of its first agent."""
    started_s = before.newer_s()
    return event.time_s if started_s is None else min(started_s, event.time_s)


def _next_node(
    node: NodeView | None, kind: EventKind, event: LoggedEvent, *, is_over: bool
) -> NodeView | None:
    """Return a node after an event about it; None if the event changes no node.

    `is_over`: the job has ended, so that the node stays as it was then.
    """
    if kind is EventKind.WORKER_EXITED:
        return _with_exit(node, event) if node else None
    if kind not in NODE_STATES:
        return None
    if node is None:
        node = NodeView(name=event.node)
    if _has_ended(node.state, kind):
        return node
    state, workers = _next_workers(node, kind, event, is_over=is_over)
    changed = (state, workers) != (node.state, node.workers)
    return msgspec.structs.replace(
        node,
        state=state,
        workers=workers,
        host=event.host if event.source == "agent" else node.host,
        since_s=event.time_s if changed else node.since_s,
        why=event.reason if changed else node.why,
    )


def _has_ended(state: str, kind: EventKind) -> bool:
    """Return whether a node in this state stays in it after an event of this kind."""
    return state in _ENDED and kind not in _REVIVING


def _next_state(state: str, kind: EventKind, event: LoggedEvent) -> str:
    """Return the state of a node after an event of a kind in NODE_STATES, while the job runs."""
    if _has_ended(state, kind):
        return state
    if kind is EventKind.AGENT_STOPPED and event.data.get("exit_code") == 0:
        return "done"
    following = NODE_STATES[kind]
    return "left" if following in _ENDED and state == "leaving" else following


def _next_workers(
    node: NodeView, kind: EventKind, event: LoggedEvent, *, is_over: bool
) -> tuple[str, tuple[WorkerView, ...]]:
    """Return the state of a node after an event, and its workers."""
    workers, state = node.workers, _next_state(node.state, kind, event)
    if kind is EventKind.WORKERS_STARTED:
        return state, tuple(WorkerView(pid) for pid in pids_of(event))
    if kind is EventKind.WORKERS_STOPPED:
        return state, tuple(
            WorkerView(w.pid, "stopped") if w.state == "training" else w for w in workers
        )
    if state not in _ENDED or state == "done":
        return state, workers
    if is_over:
        failed = any(worker.state == "failed" for worker in workers)
        return "failed" if failed else "stopped", workers
    return state, ()


def _with_exit(node: NodeView, event: LoggedEvent) -> NodeView:
    local_rank, state = event.number("local_rank"), _exit_state(event)
    workers = tuple(
        WorkerView(worker.pid, state) if index == local_rank else worker
        for index, worker in enumerate(node.workers)
    )
    return msgspec.structs.replace(node, workers=workers)


def _exit_state(event: LoggedEvent) -> str:
    """Return the state of a worker that exited; one that was asked to stop has not failed."""
    if event.data.get("exit_code", 0) == 0:
        return "done"
    return "stopped" if event.data.get("stopped") else "failed"


def _with_node(view: JobView, node: NodeView | None) -> JobView:
    if node is None or view.node(node.name) == node:
        return view
    nodes = {**view.nodes, node.name: node}
    if len(nodes) > NODES_MAX:
        gone = [one for one in nodes.values() if one.state in ("gone", "left")]
        if gone:
            del nodes[min(gone, key=lambda one: one.since_s).name]
    return msgspec.structs.replace(view, nodes=nodes)


def _with_coordinator(view: JobView, event: LoggedEvent) -> JobView:
    """Mark this node as the coordinator's, and no other."""
    nodes = {
        name: msgspec.structs.replace(node, coordinates=False) if node.coordinates else node
        for name, node in view.nodes.items()
    }
    node = nodes.get(event.node) or NodeView(name=event.node)
    nodes[event.node] = msgspec.structs.replace(node, coordinates=True)
    return msgspec.structs.replace(view, nodes=nodes)


def _with_incident(view: JobView, event: LoggedEvent) -> JobView:
    """End the world's stragglers, and let members that did not come back be gone.

    A coordinator without a store does not know their names, only their number. All others have
    registered again.
    """
    view = _with_straggler(view, event)
    nodes = [node for node in (view.node(name) for name in view.members) if node is not None]
    unnamed = (event.number("departed") or 0) - sum(node.state in _ENDED for node in nodes)
    absent = [node for node in nodes if node.state not in (*_ENDED, "waiting")]
    for node in absent if len(absent) == unnamed else ():
        gone = msgspec.structs.replace(
            node, state="gone", workers=(), since_s=event.time_s, why=event.reason
        )
        view = _with_node(view, gone)
    return view


def _with_world(view: JobView, event: LoggedEvent) -> JobView:
    size = event.number("world_size") or 0
    return msgspec.structs.replace(
        view,
        round=event.round,
        attempt=event.attempt,
        members=tuple(event.text("members").split()),
        world_size=size,
        worlds=view.worlds.after(WorldPoint(event.time_s, size)),
        waiting="",
        lacking="",
        stragglers={},
    )


def _with_straggler(view: JobView, event: LoggedEvent) -> JobView:
    stragglers = after_straggler_event(view.stragglers, event)
    return msgspec.structs.replace(view, stragglers=stragglers)


def _with_progress(view: JobView, event: LoggedEvent) -> JobView:
    steps = event.number("steps")
    return view if steps is None else after_steps(view, event.time_s, steps)


def _with_pace(view: JobView, event: LoggedEvent) -> JobView:
    last_s = view.steps[-1].time_s if view.steps else float("-inf")
    since_s = max(last_s, event.time_s - min(event.measure("seconds"), SPREAD_S))
    point = StepPoint(event.time_s, None, since_s, event.number("made") or 0)
    return _with_point(view, point) if since_s < event.time_s else view


def _with_own_parts(view: JobView, event: LoggedEvent) -> JobView:
    point = _own_parts(view, event)
    if point is None:
        return view
    points = view.own_parts
    if len(points) == OWN_PARTS_MAX:
        half = OWN_PARTS_MAX // 2
        points = Recent(OWN_PARTS_MAX, [*points[:half:2], *points[half:]])
    return msgspec.structs.replace(view, own_parts=points.after(point))


def _own_parts(view: JobView, event: LoggedEvent) -> OwnParts | None:
    """Return the own parts in an event; None if its fields are not those in docs/events.md."""
    own_ms = [_not_negative(word) for word in event.text("own_ms").split(",")]
    median_ms = event.measure("median_ms")
    is_whole = "ranks" not in event.data
    workers = _all_workers(view, len(own_ms)) if is_whole else _listed_workers(event)
    if median_ms <= 0.0 or None in own_ms or len(workers) != len(own_ms):
        return None
    last = view.own_parts[-1].workers if view.own_parts else ()
    ratios = tuple(round(each / median_ms, 3) for each in own_ms if each is not None)
    return OwnParts(
        time_s=event.time_s,
        workers=last if last == workers else workers,
        ratios=ratios,
        is_whole=is_whole,
        median_ms=median_ms,
        count=max(len(workers), event.number("workers") or 0),
    )


def _not_negative(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0.0 <= value < TIME_MAX_S else None


def _all_workers(view: JobView, count: int) -> tuple[WorkerName, ...]:
    """Return all workers of the world by rank, by their ranks alone if a node is not known."""
    nodes = [(name, view.node(name)) for name in view.members]
    found = tuple(
        WorkerName(name, local_rank)
        for name, node in nodes
        if node is not None
        for local_rank in range(len(node.workers))
    )
    return found if len(found) == count else tuple(WorkerName(rank=at) for at in range(count))


def _listed_workers(event: LoggedEvent) -> tuple[WorkerName, ...]:
    ranks = [int(word) for word in event.text("ranks").split(",") if word.isdecimal()]
    nodes = event.text("nodes").split()
    if len(nodes) != len(ranks):  # The names of nodes were too long for a line.
        nodes = [""] * len(ranks)
    return tuple(WorkerName(node, rank=rank) for node, rank in zip(nodes, ranks, strict=True))


def _with_budget(view: JobView, event: LoggedEvent) -> JobView:
    used = event.number("used")
    allowed = event.number("allowed")
    used = view.restarts[0] if used is None else used
    return msgspec.structs.replace(
        view, restarts=(used, view.restarts[1] if allowed is None else allowed)
    )


def _with_checkpoint(view: JobView, event: LoggedEvent) -> JobView:
    made = CheckpointView(
        time_s=event.time_s,
        begun_s=event.time_s - event.measure("age_s"),
        step=event.number("step") or 0,
        location=event.text("location"),
        node=event.node,
        stored_bytes=event.number("bytes") or 0,
        seconds=event.measure("seconds"),
        why=event.text("why"),
        slug=event.text("slug") if event.kind == EventKind.CHECKPOINT_FAILED else "",
    )
    return msgspec.structs.replace(
        view,
        checkpoints=view.checkpoints.after(made),
        saved=view.saved + (0 if made.slug else max(1, event.number("saves") or 1)),
        not_saved=view.not_saved + bool(made.slug),
    )


def _with_waiting(view: JobView, event: LoggedEvent) -> JobView:
    if event.data.get("trains"):
        return msgspec.structs.replace(view, lacking=event.reason)
    return msgspec.structs.replace(view, waiting=event.reason)


def _with_losses(view: JobView, event: LoggedEvent) -> JobView:
    lost = view.events_lost + (event.number("events") or 0)
    return msgspec.structs.replace(view, events_lost=lost)


def _with_end(view: JobView, event: LoggedEvent) -> JobView:
    end = JobEnd(
        time_s=event.time_s,
        ok=bool(event.data.get("ok")),
        reason=event.reason,
        exit_code=event.number("exit_code"),
        next_step=event.text("next_step"),
    )
    return msgspec.structs.replace(view, end=end, waiting="", lacking="", stragglers={})


def _with_line(view: JobView, line: ViewLine) -> JobView:
    return msgspec.structs.replace(view, lines=view.lines.after(line))


_KINDS = {kind.value: kind for kind in EventKind}
_RULES: dict[EventKind, Callable[[JobView, LoggedEvent], JobView]] = {
    EventKind.COORDINATOR_STARTED: _with_coordinator,
    EventKind.ROUND_SETTLED: _with_world,
    EventKind.PROGRESS: _with_progress,
    EventKind.PACE: _with_pace,
    EventKind.STEP_TIMES: _with_own_parts,
    EventKind.RESTART: _with_budget,
    EventKind.REPLACEMENT: _with_budget,
    EventKind.CHECKPOINT_SAVED: _with_checkpoint,
    EventKind.CHECKPOINT_FAILED: _with_checkpoint,
    EventKind.WAITING: _with_waiting,
    EventKind.INCIDENT: _with_incident,
    EventKind.STRAGGLER: _with_straggler,
    EventKind.STRAGGLER_ENDED: _with_straggler,
    EventKind.EVENTS_LOST: _with_losses,
    EventKind.JOB_ENDED: _with_end,
}
