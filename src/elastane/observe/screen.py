"""Draws the view of a job: as a live screen, or as plain lines if the stream is no terminal.

A face gets whole views and finds the changes itself. `show` draws in the caller's thread, because
the process forks others and so must stay single-threaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from elastane.observe.view import JobView, NodeView, ViewLine
from elastane.protocol.words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
# Ten frames a second look smooth; more frames would only take processor time from the workers.
REDRAW_S = 0.1
EVENT_ROWS = 14
# Columns of the border, the padding and the label before the curve.
CURVE_MARGIN = 12
PLAIN_PROGRESS_PARTS = 10
STYLES = {"good": "green", "bad": "red", "act": "bold yellow", "plain": "default"}
STATE_STYLES = {
    "training": "green",
    "done": "green",
    "starting": "cyan",
    "reading": "cyan",
    "waiting": "cyan",
    "draining": "yellow",
    "stopping": "yellow",
    "leaving": "yellow",
    "stopped": "dim",
    "left": "dim",
}


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars, the newest at the right; each bar is the mean of its share."""
    if not values or width <= 0:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return bars(means, min(means), max(means))


def bars(values: Sequence[float | None], low: float, high: float) -> str:
    """Draw values between `low` and `high` as one bar each; an unknown one is a blank."""
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if value is None else _BARS[round((min(value, high) - low) * scale)] for value in values
    )


class Face(Protocol):
    """A way to draw views until it is closed; a context manager."""

    def show(self, view: JobView) -> None:
        """Draw the view; a face may skip a view that comes too soon after the last one."""

    def __enter__(self) -> Self:
        """Open the display."""

    def __exit__(self, *_: object) -> None:
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
        lines = tuple(view.lines)
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

    def __exit__(self, *_: object) -> None:
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

    def __exit__(self, *_: object) -> None:
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
    return f"round {view.round} attempt {view.attempt} · {counted(view.world_size, 'worker')}"


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
    ranks = view.first_ranks()
    for node in view.nodes.values():
        style = STATE_STYLES.get(node.state, "red")
        role = Text("coordinator" if node.coordinates else "", style="dim")
        table.add_row(
            node.name,
            Text(node.state, style=style),
            _workers_text(node, ranks.get(node.name)),
            role,
        )
    return table


def _workers_text(node: NodeView, first: int | None) -> Text:
    from rich.text import Text

    text = Text()
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
