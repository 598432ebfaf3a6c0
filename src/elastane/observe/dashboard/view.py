"""One view of a job, built from its logged events and its training progress.

Pure: each function takes a view and an input, and returns the next view; it uses no file, clock or
screen. An unknown kind of event, such as one of a newer version, becomes a line of text and changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from elastane.observe.records import LoggedEvent
from elastane.protocol.log_events import EventKind
from elastane.protocol.unreadable import UNREADABLE

# Bounds: a screen shows some tens of lines, and a sparkline is at most as wide as the screen.
LINES_MAX = 500
HISTORY_MAX = 4096
_BARS = "▁▂▃▄▅▆▇█"

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
# Events whose reasons repeat those of the incident, the round or the job's end that caused them.
ECHOES = frozenset(
    {
        EventKind.COORDINATOR_FOUND,
        EventKind.NODE_READY,
        EventKind.WORKERS_STARTING,
        EventKind.WORKERS_STOPPING,
        EventKind.WORKERS_STOPPED,
        EventKind.AGENT_STOPPED,
        EventKind.COORDINATOR_STOPPED,
    }
)
# Final states that a later event of the same life of a node must not overwrite.
_ENDED = ("gone", "left", "done")
_REVIVING = (EventKind.AGENT_STARTED, EventKind.NODE_JOINED, EventKind.WORKERS_STARTING)
TONES = {
    EventKind.INCIDENT: "bad",
    EventKind.NODE_DEPARTED: "bad",
    EventKind.NODE_REFUSED: "bad",
    EventKind.AUTHORITY_LOST: "bad",
    EventKind.COORDINATOR_AWAY: "bad",
    EventKind.ZYGOTE_DIED: "bad",
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
    """One node: its state in a word, and its workers in the order of local rank."""

    name: str
    state: str = "starting"
    workers: tuple[WorkerView, ...] = ()
    coordinates: bool = False


class ViewLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event in words. `tone` is good, bad, plain, or act (an action by a person)."""

    time_s: float
    node: str
    kind: str
    text: str
    tone: str = "plain"


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is displayed."""

    nodes: tuple[NodeView, ...] = ()
    members: tuple[str, ...] = ()
    round: int | None = None
    attempt: int | None = None
    world_size: int = 0
    step: int = 0
    total_steps: int = 0
    losses: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    learned: float | None = None
    lines: tuple[ViewLine, ...] = ()

    def node(self, name: str) -> NodeView | None:
        """Return a node by its name."""
        return next((node for node in self.nodes if node.name == name), None)

    def first_rank(self, name: str) -> int | None:
        """Return the rank of a node's first worker, or None if the node is not in the world."""
        rank = 0
        for member in self.members:
            if member == name:
                return rank
            node = self.node(member)
            rank += len(node.workers) if node else 0
        return None


def after_event(view: JobView, event: LoggedEvent) -> JobView:
    """Return the view after one logged event; an event in ECHOES adds no line."""
    kind = EventKind(event.kind) if event.kind in set(EventKind) else None
    if kind not in ECHOES:
        tone = _tone(view.node(event.node), kind, event)
        line = ViewLine(
            time_s=event.time_s, node=event.node, kind=event.kind, text=event.reason, tone=tone
        )
        view = _with_line(view, line)
    if kind is None:
        return view
    if kind is EventKind.ROUND_SETTLED:
        return msgspec.structs.replace(
            view,
            round=event.round,
            attempt=event.attempt,
            members=tuple(str(event.data.get("members", "")).split()),
            world_size=int(event.data.get("world_size", 0)),
        )
    if kind is EventKind.COORDINATOR_STARTED:
        return _only_coordinator(view, event.node)
    return _with_node(view, _next_node(view.node(event.node), kind, event))


def after_progress(view: JobView, point: StepProgress) -> JobView:
    """Return the view after one line of training progress."""
    losses, accuracies = view.losses, view.accuracies
    if point.loss is not None:
        losses = (*losses, point.loss)[-HISTORY_MAX:]
    if point.accuracy is not None:
        accuracies = (*accuracies, point.accuracy)[-HISTORY_MAX:]
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


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars, the newest at the right; each bar is the mean of its share."""
    if not values or width <= 0:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def pids_of(event: LoggedEvent) -> tuple[int, ...]:
    """Return the pids in a workers-started event, in the order of local rank."""
    words = str(event.data.get("pids", "")).strip("()[]").replace(",", " ").split()
    return tuple(int(word) for word in words if word.isdigit())


def _tone(node: NodeView | None, kind: EventKind | None, event: LoggedEvent) -> str:
    if kind is EventKind.WORKER_EXITED:
        asked = node is not None and node.state in ("draining", "stopping")
        return "plain" if asked or event.data.get("exit_code", 0) == 0 else "bad"
    if kind is EventKind.JOB_ENDED and not event.data.get("ok", True):
        return "bad"
    return TONES.get(kind, "plain") if kind else "plain"


def _next_node(node: NodeView | None, kind: EventKind, event: LoggedEvent) -> NodeView | None:
    """Return a node after an event about it; None if the event changes no node."""
    if kind is EventKind.WORKER_EXITED:
        return _with_exit(node, event) if node else None
    state = NODE_STATES.get(kind)
    if state is None:
        return None
    if node is None:
        node = NodeView(name=event.node)
    if node.state in _ENDED and kind not in _REVIVING:
        return node
    workers = node.workers
    if kind is EventKind.WORKERS_STARTED:
        workers = tuple(WorkerView(pid) for pid in pids_of(event))
    elif kind is EventKind.WORKERS_STOPPED:
        workers = tuple(WorkerView(w.pid, "stopped") for w in workers)
    elif kind is EventKind.AGENT_STOPPED and event.data.get("exit_code") == 0:
        state = "done"
    elif state in _ENDED:
        workers = ()
    return msgspec.structs.replace(node, state=state, workers=workers)


def _with_exit(node: NodeView, event: LoggedEvent) -> NodeView:
    local_rank = int(event.data.get("local_rank", -1))
    state = "done" if event.data.get("exit_code", 0) == 0 else "failed"
    workers = tuple(
        WorkerView(worker.pid, state) if index == local_rank else worker
        for index, worker in enumerate(node.workers)
    )
    return msgspec.structs.replace(node, workers=workers)


def _with_node(view: JobView, node: NodeView | None) -> JobView:
    if node is None:
        return view
    if view.node(node.name) is None:
        return msgspec.structs.replace(view, nodes=(*view.nodes, node))
    nodes = tuple(node if old.name == node.name else old for old in view.nodes)
    return msgspec.structs.replace(view, nodes=nodes)


def _only_coordinator(view: JobView, name: str) -> JobView:
    if view.node(name) is None:
        view = _with_node(view, NodeView(name=name))
    nodes = tuple(
        msgspec.structs.replace(node, coordinates=node.name == name) for node in view.nodes
    )
    return msgspec.structs.replace(view, nodes=nodes)


def _with_line(view: JobView, line: ViewLine) -> JobView:
    return msgspec.structs.replace(view, lines=(*view.lines, line)[-LINES_MAX:])
