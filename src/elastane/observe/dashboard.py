"""The live view of a job: built from its logged events and its training progress, and drawn.

The view is pure: each function takes a view and an input, and returns the next view; it uses no
file, clock or screen. An unknown kind of event, such as one of a newer version, becomes a line of
text and changes nothing else.

A face draws whole views in a terminal, as a live screen, or as plain lines if the stream is no
terminal, and finds the changes itself. `show` draws in the caller's thread, because a process that
starts others must stay single-threaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

import msgspec

from elastane.observe.events import LoggedEvent
from elastane.protocol.log_events import EventKind
from elastane.protocol.unreadable import UNREADABLE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

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
# Ten frames a second look smooth; more only cost the workers processor time.
REDRAW_S = 0.1
EVENT_ROWS = 14
# Border, padding and the label before the curve.
CURVE_MARGIN = 12
PLAIN_PROGRESS_PARTS = 10
STYLES = {"good": "green", "bad": "red", "act": "bold yellow", "plain": "default"}
STATE_STYLES = {
    "training": "green",
    "done": "green",
    "starting": "cyan",
    "waiting": "cyan",
    "draining": "yellow",
    "stopping": "yellow",
    "leaving": "yellow",
    "stopped": "dim",
    "left": "dim",
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


class Face(Protocol):
    """A way to draw views until it is closed; a context manager."""

    def show(self, view: JobView) -> None:
        """Draw the view; may skip one that follows too soon after the last."""

    def __enter__(self) -> Self:
        """Open the display."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Draw the last view and close."""


def face_for(stream: TextIO, title: str) -> Face:
    """Return the live screen if the stream is a capable terminal, else plain lines."""
    if not stream.isatty():
        return PlainLines(stream)
    from rich.console import Console

    console = Console(file=stream)
    return PlainLines(stream) if console.is_dumb_terminal else LiveScreen(console, title)


class PlainLines:
    """Prints one line for each event, and one for each tenth of the training."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._first_s: float | None = None
        self._last: ViewLine | None = None
        self._part = 0

    def show(self, view: JobView) -> None:
        """Print the changes in the view."""
        for line in self._new_lines(view):
            self._print(
                f"{self._since_start(line.time_s)}  {line.node:8}  {line.kind}: {line.text}"
            )
        part = PLAIN_PROGRESS_PARTS * view.step // view.total_steps if view.total_steps else 0
        if part > self._part:  # retried steps are no progress
            self._part = part
            self._print(f"          {'':8}  {progress_text(view)}")

    def _new_lines(self, view: JobView) -> tuple[ViewLine, ...]:
        lines = view.lines
        for index in range(len(lines) - 1, -1, -1):
            if lines[index] is self._last:
                lines = lines[index + 1 :]
                break
        self._last = view.lines[-1] if view.lines else None
        return lines

    def _since_start(self, time_s: float) -> str:
        if self._first_s is None:
            self._first_s = time_s
        return f"{time_s - self._first_s:7.2f} s"

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        return


class LiveScreen:
    """Displays nodes and workers, the training's curve, and the events with their reasons."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._view = JobView()
        self._drawn_s = float("-inf")
        self._open = ExitStack()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live = self._open.enter_context(live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._draw()
        self._open.close()

    def show(self, view: JobView) -> None:
        """Draw the view, unless the last frame is less than REDRAW_S old."""
        self._view = view
        if time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        assert self._live is not None, "__enter__ comes first"
        self._live.update(render(self._view, self._title, self._console.width), refresh=True)


def render(view: JobView, title: str, width: int) -> RenderableType:
    """Return the drawing of a view."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    curve = sparkline(view.losses, max(10, width - CURVE_MARGIN))
    training = Text.assemble((f" {progress_text(view)}", "bold"), "\n loss  ", (curve, "cyan"))
    world = "no world yet" if view.round is None else world_text(view)
    return Panel(
        Group(_nodes_table(view), Text(""), training, Text(""), _events_table(view)),
        title=f"{title} · {world}",
        border_style="dim",
    )


def world_text(view: JobView) -> str:
    """Return round, attempt and world size in words."""
    return f"round {view.round} attempt {view.attempt} · {view.world_size} workers"


def progress_text(view: JobView) -> str:
    """Return the training's progress in one line."""
    if not view.total_steps:
        return "training has not begun"
    parts = [f"step {view.step:4}/{view.total_steps}"]
    if view.losses:
        parts.append(f"loss {view.losses[-1]:.3f}")
    if view.accuracies:
        parts.append(f"held-out {view.accuracies[-1]:.1%}")
    return "  ".join(parts)


def _nodes_table(view: JobView) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
    for heading in ("node", "state", "workers", ""):
        table.add_column(heading)
    for node in view.nodes:
        style = STATE_STYLES.get(node.state, "red")
        role = Text("coordinator" if node.coordinates else "", style="dim")
        table.add_row(node.name, Text(node.state, style=style), _workers_text(view, node), role)
    return table


def _workers_text(view: JobView, node: NodeView) -> Text:
    from rich.text import Text

    text = Text()
    first = view.first_rank(node.name)
    for index, worker in enumerate(node.workers):
        name = f"rank {first + index}" if first is not None else f"pid {worker.pid}"
        state = node.state if worker.state == "training" else worker.state
        text.append(f"● {name} {state}   ", style=STATE_STYLES.get(state, "red"))
    return text


def _events_table(view: JobView) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), show_header=False, expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    start_s = view.lines[0].time_s if view.lines else 0.0
    for line in view.lines[-EVENT_ROWS:]:
        text = Text.assemble((f"{line.kind}: " if line.kind != "act" else "", "dim"), line.text)
        text.stylize(STYLES[line.tone])
        table.add_row(f"{line.time_s - start_s:6.2f} s", line.node, text)
    return table
