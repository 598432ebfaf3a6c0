"""One frame of `elastane top`: the sections of a job as lines of text that fill a terminal.

Pure. A frame has the sections of the web page. Colour only repeats a word or a sign, so a frame
without colours is complete. Control characters in the log's texts are replaced, so they cannot move
the cursor.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.text import Text

from elastane.cli._top_layout import (
    TITLE_STYLE,
    Beside,
    Lines,
    Listed,
    ListEntry,
    Panel,
    Stack,
    entry,
    fitted,
    titled,
)
from elastane.cli.status import duration
from elastane.dashboard.snapshot import NodeRow, Sections, SnapshotRow, WorkerRow
from elastane.observe.box import printable
from elastane.observe.incidents import IncidentView
from elastane.observe.rates import series_of
from elastane.observe.screen import STATE_STYLES, bars
from elastane.observe.step_times import NodeStep, milliseconds
from elastane.observe.view import CheckpointView, JobView
from elastane.protocol.ring import spans
from elastane.protocol.words import counted

# Widths from which two panels, or two columns of panels, are drawn side by side.
PAIR_WIDTH = 72
COLUMNS_WIDTH = 110
# The curve beside the step rate.
RECENT_S = 600.0
_RECENT_BARS = 20
_LABEL = 9
_OWN_PART = 13
_DAY_S = 86400.0
_SCALE = 7
INCIDENTS_LISTED = 50
_CAUSE_LINES = 2
_REASON_LINES = 3
_SIGNS = {
    "training": "●",
    "done": "✓",
    "starting": "○",
    "waiting": "○",
    "recovering": "○",
    "draining": "↓",
    "stopping": "↓",
    "leaving": "↓",
    "left": "↓",
    "stopped": "■",
    "silent": "?",
    "reading": "○",
    "stalled": "!",
    "away": "?",
}
_FAULTS = ("worker", "node", "failure", "end")
# Replacements for a terminal that has only ASCII.
_ASCII = str.maketrans("▁▂▃▄▅▆▇█●✓○↓■×…±≠", "_.:-=+*#*v.-#x~+!")


@dataclass(frozen=True)
class Picture:
    """The data of a frame at `now_s`. `is_live`: more frames follow."""

    sections: Sections
    view: JobView
    now_s: float
    is_live: bool = False


def frame(picture: Picture, width: int, height: int) -> list[Text]:
    """Return at most `height` lines of at most `width` columns."""
    sections = picture.sections
    nodes = _nodes(picture)
    incidents = _incidents(picture)
    account, checkpoints = _account(sections), _checkpoints(picture)
    below: Panel
    if width >= COLUMNS_WIDTH:
        below = Beside(
            Stack(nodes, _space(), incidents), Stack(account, _space(), checkpoints), 0.6
        )
    elif width >= PAIR_WIDTH:
        pair = Beside(account, checkpoints, 0.5)
        below = Stack(nodes, _space(), incidents, _space(), pair)
    else:
        below = Stack(nodes, _space(), incidents, _space(), account, _space(), checkpoints)
    lines = _head(picture, width)
    head = Lines(tuple(lines), least=len(lines))
    needs = Lines(tuple(_needs(sections)), least=min(1, len(sections.needs)))
    timeline = Lines(tuple(_timeline(picture, width)), least=4)
    parts: list[Panel] = [head, _space(), timeline, _space(), below]
    if sections.needs:
        parts[1:1] = [_space(), needs]
    return Stack(*parts).drawn(width, height)


def plain(text: str) -> str:
    """Return the text of a frame in ASCII alone."""
    return text.translate(_ASCII)


def _space() -> Lines:
    return Lines((Text(),), least=0)


def _head(picture: Picture, width: int) -> list[Text]:
    job = picture.sections.job
    clock = time.strftime("%H:%M:%S", time.localtime(picture.now_s))
    right = f"q leaves   {clock} " if picture.is_live else f"{clock} "
    title = fitted(Text(f" elastane top   {printable(job.name)}"), max(0, width - len(right)))
    title.pad_right(max(0, width - len(right) - title.cell_len))
    title.append(right)
    title.stylize("bold reverse")
    lines = [title, _state(picture, width)]
    if job.reason and job.state != "training":
        said = textwrap.wrap(
            printable(job.reason), max(2, width - 2), max_lines=_REASON_LINES, placeholder=" …"
        )
        lines += [Text(f"  {line}") for line in said]
    lines += [_speed(picture, width), *_waits(picture, width), _budget(picture, width)]
    return [*lines, _scalars(picture.sections, width)] if picture.sections.scalars else lines


def _scalars(sections: Sections, width: int) -> Text:
    """Return the last values that the script has logged."""
    shown = [(printable(one.name), one.values[-1]) for one in sections.scalars]
    parts = [f"{name} {'nan' if value is None else format(value, '.4g')}" for name, value in shown]
    return _joined(Text(), [Text(part) for part in parts], width)


def _speed(picture: Picture, width: int) -> Text:
    """Return step and step rate; for an ended job, the last ones that it logged."""
    job, rate = picture.sections.job, picture.sections.rate
    is_over = job.ended_s is not None
    counted = f"step {job.step:,}" + (" at the last count" if is_over else "")
    none = "steps not known here" if picture.sections.not_here else "no step reported"
    text = Text(counted if job.has_steps else none, style="bold")
    parts = []
    if rate.now is not None and not is_over:
        parts.append(Text(f"{rate.now:.3g} steps/s", style="bold"))
    if rate.usual is not None:
        parts.append(Text(f"usual {rate.usual:.3g}" + (" steps/s" if is_over else "")))
    if not is_over and picture.view.steps:
        parts.append(Text(_recent(picture), style="cyan"))
    return _joined(text, parts, width)


def _waits(picture: Picture, width: int) -> list[Text]:
    """Return the line that says which workers the others wait for, while the job runs."""
    times = picture.sections.step_times
    if times is None or picture.sections.job.ended_s is not None:
        return []
    usual = f"own part of a step {milliseconds(times.median_ms)} in the median"
    if not times.waits:
        return [fitted(Text(usual), width)]
    waits = fitted(Text(f"! {printable(times.waits)}", style="yellow"), width)
    return [_joined(waits, [Text(usual)], width)]


def _joined(text: Text, parts: Sequence[Text], width: int) -> Text:
    """Return a line with those of the parts that fit, the first ones first."""
    for part in parts:
        if text.cell_len + 3 + part.cell_len <= width:
            text = Text.assemble(text, "   " if text else "", part)
    return text


def _state(picture: Picture, width: int) -> Text:
    job = picture.sections.job
    style = f"bold {STATE_STYLES.get(job.state, 'red')}"
    text = Text(f"{_SIGNS.get(job.state, '×')} {job.state}", style=style)
    if job.state == "silent":
        text.append(f", no event for {duration(picture.now_s - (picture.view.last_s or 0.0))}")
    more = []
    if job.world_full:
        here = counted(job.world_size, "worker")
        if job.world_full != job.world_size:
            here = f"{job.world_size} of {counted(job.world_full, 'worker')}"
        more.append(here + (f" on {counted(job.nodes, 'node')}" if job.nodes else ""))
    if job.exit_code:
        more.append(f"exit code {job.exit_code}")
    if job.started_s is not None:
        until_s = picture.now_s if job.ended_s is None else job.ended_s
        more.append(duration(max(0.0, until_s - job.started_s)))
    if job.round is not None:
        more.append(f"round {job.round}, attempt {job.attempt}")
    if job.run > 1:
        more.append(f"run {job.run}")
    return _joined(text, [Text(part) for part in more], width)


def _budget(picture: Picture, width: int) -> Text:
    """Return the line with goodput, remaining restarts, and the newest checkpoint."""
    sections = picture.sections
    job, account = sections.job, sections.account
    parts = [] if account is None else [f"goodput {account.goodput:.1%}"]
    allowed = "" if job.restarts_allowed is None else f" of {job.restarts_allowed}"
    saved = [made for made in sections.checkpoints.newest if not made.slug]
    parts += [f"saved step {saved[0].step:,}, {_ago(picture, saved[0].begun_s)}"] if saved else []
    parts.append(f"restarts {job.restarts_used}{allowed} used")
    return _joined(Text(), [Text(part) for part in parts], width)


def _recent(picture: Picture) -> str:
    """Return the step rate of the last minutes as bars."""
    begun_s = picture.now_s if picture.view.started_s is None else picture.view.started_s
    span_s = min(RECENT_S, max(60.0, picture.now_s - begun_s))
    series = series_of(picture.view, picture.now_s - span_s, picture.now_s, _RECENT_BARS)
    highest = max((rate for rate in series.rate if rate is not None), default=0.0)
    return f"{bars(series.rate, 0.0, highest)} {_age(span_s)}"


def _needs(sections: Sections) -> list[Text]:
    """Return the needs of the job: what a person can do or should know."""
    lines = []
    for need in sections.needs:
        sign, style = ("→", "bold") if need.severity == "next" else ("!", "bold yellow")
        number = f" (#{need.incident})" if need.incident else ""
        text = Text(f"{sign} {printable(need.text)}{number}", style=style)
        # The reason of the state has been said above.
        hint = "" if need.hint in sections.job.reason else f": {printable(need.hint)}"
        text.append(hint, style="not bold default")
        lines.append(text)
    return lines


def _timeline(picture: Picture, width: int) -> list[Text]:
    """Return world size, step rate and incidents of the whole job above one axis of time."""
    series, job = picture.sections.series, picture.sections.job
    room = max(1, width - _LABEL - _SCALE)
    end_s = picture.now_s if job.ended_s is None else job.ended_s
    span_s = max(series.bucket_s, end_s - series.from_s)
    known = math.ceil(span_s / series.bucket_s)  # buckets of a young job may lie in the future
    world = _gathered(series.world[:known], room, min)
    rate = _gathered(series.rate[:known], room, lambda some: sum(some) / len(some))
    fastest = max((one for one in rate if one is not None), default=0.0)
    lines = [
        _row("workers", Text(bars(world, 0.0, job.world_full)), f"{job.world_full}"),
    ]
    if fastest:
        lines.append(
            _row("steps/s", Text(bars(rate, 0.0, fastest), style="cyan"), f"{fastest:.3g}")
        )
    lines.append(_row("incidents", _marks(picture, series.from_s, span_s, room), ""))
    if job.started_s is None:
        return lines
    from_text, to_text = _clock(job.started_s, picture), _clock(end_s, picture)
    legend = "× fault  + - world  ! stall"
    free = room - len(from_text) - len(to_text)
    middle = legend.center(free) if free > len(legend) + 2 else " " * max(1, free)
    lines.append(_row("", Text(f"{from_text}{middle}{to_text}", style="dim"), ""))
    return lines


def _row(label: str, drawn: Text, scale: str) -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), drawn, (f" {scale}", "dim"))


def _gathered(
    values: Sequence[float | None], room: int, of: Callable[[list[float]], float]
) -> list[float | None]:
    """Return one value for each column of `room`; None for a column without data."""
    gathered: list[float | None] = []
    for column in range(room):
        first = len(values) * column // room
        after = max(first + 1, len(values) * (column + 1) // room)
        known = [value for value in values[first:after] if value is not None]
        gathered.append(of(known) if known else None)
    return gathered


def _marks(picture: Picture, from_s: float, span_s: float, room: int) -> Text:
    """Return a sign in each column in which an incident began; for several, their number."""
    columns: dict[int, list[IncidentView]] = {}
    for one in picture.view.incidents.listed:
        column = int((one.from_s - from_s) / span_s * room) if span_s > 0 else 0
        columns.setdefault(min(max(column, 0), room - 1), []).append(one)
    text = Text()
    for column in range(max(columns, default=-1) + 1):
        found = columns.get(column, [])
        signs = sorted((_sign(one) for one in found), key="×!≠-+±".index)
        styles = ["red" if sign in "×!" else "default" for sign in signs]
        if len(found) > 1:
            text.append(str(len(found)) if len(found) < 10 else "*", style=styles[0])
        else:
            text.append(*((signs[0], styles[0]) if found else (" ", "default")))
    text.pad_right(room - text.cell_len)
    return text


def _sign(one: IncidentView) -> str:
    if one.kind in _FAULTS:
        return "×"
    if one.kind == "change":
        change = one.world_after - one.world_before
        return "+" if change > 0 else "-" if change < 0 else "±"
    return "≠" if one.kind == "difference" else "!"


def _nodes(picture: Picture) -> Panel:
    """Return the table of nodes; if it is cut, nodes with a fault are kept."""
    sections = picture.sections
    here = sections.nodes.here
    names = [printable(row.name) for row in here]
    longest = min(24, max(map(len, names), default=4))
    states = max((len(row.state) for row in here), default=5) + 2
    known = sections.step_times
    times = None if known is None else {one.node: one for one in known.nodes}

    def title(width: int) -> Text:
        own = [] if times is None else [f"{'OWN PART':>{_OWN_PART}}"]
        heads = ("NODE".ljust(longest + 2), "STATE".ljust(states), "     STEP", "STEPS/S", *own)
        line = Text("  ".join((*heads, "RANKS")), style=TITLE_STYLE)
        return _joined(line, [Text("* coordinator")], width)

    def entries(width: int) -> list[ListEntry]:
        rows = [
            ListEntry(
                1,
                partial(_node, row, times, longest, states),
                is_important=not _is_well(row) or (times is not None and _is_slow(row, times)),
            )
            for row in here
        ]
        gone = ", ".join(_gone(row, picture) for row in sections.nodes.gone)
        if gone:
            text = f"no longer here: {counted(sections.nodes.gone_count, 'node')}: {gone}"
            rows.append(entry(Text(text, style="dim")))
        return rows

    return Listed(title, entries, least=min(5, 1 + max(1, len(here))))


def _gone(row: NodeRow, picture: Picture) -> str:
    how = "lost" if row.state == "gone" else "left"
    return f"{printable(row.name)} {how} {_clock(row.since_s, picture)}"


def _is_well(row: NodeRow) -> bool:
    is_well = row.state in ("training", "done", "stalled")
    return is_well and all(w.state == row.state and not w.slow for w in row.workers)


def _is_slow(row: NodeRow, times: Mapping[str, NodeStep]) -> bool:
    return row.name in times and times[row.name].is_slow


def _node(
    row: NodeRow, times: Mapping[str, NodeStep] | None, longest: int, states: int
) -> list[Text]:
    name = Text(printable(row.name))
    name.truncate(longest, overflow="ellipsis", pad=True)
    sign = _SIGNS.get(row.state, "×")
    step = "-" if row.step is None else f"{row.step:,}"
    rate = "-" if row.rate is None else f"{row.rate:.3g}"
    line = Text.assemble(
        name,
        " *" if row.coordinates else "  ",
        "  ",
        (f"{sign} {row.state}".ljust(states), STATE_STYLES.get(row.state, "red")),
        f"  {step:>9}  {rate:>7}  ",
        "" if times is None else _own_part(times.get(row.name)),
        _workers(row),
    )
    return [line]


def _own_part(one: NodeStep | None) -> Text:
    """Return the own part of a node's slowest worker, also as a multiple of the median."""
    if one is None:
        return Text(" " * _OWN_PART + "  ")
    cell = f"{milliseconds(one.own_ms)} {one.ratio:.2f}×"
    return Text(f"{cell:>{_OWN_PART}}  ", style="yellow" if one.is_slow else "default")


def _workers(row: NodeRow) -> Text:
    """Return the ranks of a node's workers, and the states that differ from the node's."""
    if not row.workers:
        return Text(counted(row.worker_count, "worker") if row.worker_count else "")
    parts = []
    for state, same in groupby(sorted(row.workers, key=_worker_order), lambda one: one.state):
        members = list(same)
        said = spans([worker.rank for worker in members if worker.rank is not None])
        part = Text(said or counted(len(members), "worker"))
        if state != row.state:
            part.append(f" {state}", style=STATE_STYLES.get(state, "bold red"))
        parts.append(part)
    slow = [worker for worker in row.workers if worker.slow]
    for why, alike in groupby(sorted(slow, key=lambda one: one.slow), lambda one: one.slow):
        ranks = spans([worker.rank for worker in alike if worker.rank is not None])
        parts.append(Text(f"{ranks} slow ({printable(why)})", style="yellow"))
    return Text("; ").join(parts)


def _worker_order(worker: WorkerRow) -> tuple[bool, str, int]:
    return worker.state not in ("failed", "away", "awaited"), worker.state, worker.local_rank


def _incidents(picture: Picture) -> Panel:
    """Return the incidents, newest first, each with its cause."""
    history = picture.view.incidents
    count = Counter(one.kind == "change" for one in history.listed)
    title = (
        f"INCIDENTS   {counted(count[False], 'fault')}, {counted(count[True], 'planned change')}"
    )

    def entries(width: int) -> list[ListEntry]:
        found = history.by_time(INCIDENTS_LISTED)
        if not found:
            is_known = not picture.sections.not_here
            return [entry(Text("none so far" if is_known else "not known here", style="dim"))]
        return [_incident(one, picture, width) for one in found]

    return Listed(titled(title), entries, least=min(4, 2 + 2 * len(history.listed)))


def _incident(one: IncidentView, picture: Picture, width: int) -> ListEntry:
    style = "default" if one.kind == "change" else "red" if one.state != "recovered" else "yellow"
    head = f"#{one.id:<3} {_clock(one.from_s, picture)}  {_sign(one)} "
    line = Text.assemble(
        head, (f"{_course(one, picture):<17}", style), "  ", (printable(one.title), "bold")
    )
    cause = printable(one.cause)
    if one.kind == "change" or cause in one.title:
        return entry(line)
    said = textwrap.wrap(cause, max(20, width - 5), max_lines=_CAUSE_LINES, placeholder=" …")
    return entry(line, *(Text(f"     {part}", style="dim") for part in said))


def _course(one: IncidentView, picture: Picture) -> str:
    """Return the state of an incident, and how long it took."""
    if one.state == "fatal":
        return "ended the job"
    if one.went_on_s is None:
        ended_s = picture.sections.job.ended_s
        if ended_s is not None:
            return "open at the end"
        return f"open for {duration(max(0.0, picture.now_s - one.from_s))}"
    word = "took" if one.kind == "change" else "recovered"
    return f"{word} {_brief(max(0.0, one.went_on_s - one.from_s))}"


def _brief(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)


def _quiet(text: str, width: int) -> list[ListEntry]:
    lines = textwrap.wrap(text, max(20, width))
    return [entry(Text(line, style="dim")) for line in lines]


def _account(sections: Sections) -> Panel:
    """Return where the time went, by cause."""
    account = sections.account

    def entries(width: int) -> list[ListEntry]:
        if account is None:
            why = f"not known: {sections.not_here}" if sections.not_here else "nothing is known yet"
            return _quiet(why, width)
        rows = []
        if account.missing:
            rows += _quiet(account.missing, width)
        for row in account.causes:
            share = row.seconds / account.wall_s if account.wall_s else 0.0
            line = Text(f"{row.cause:<17} {_brief(row.seconds):>12} {share:6.1%}")
            numbers = " ".join(f"#{number}" for number, _ in row.incidents)
            if line.cell_len + 2 + len(numbers) <= width:
                line.append(f"  {numbers}", style="dim")
            rows.append(entry(line))
        rows += [entry(Text(f"would help: {text}", style="dim")) for text in account.helped]
        return rows

    goodput = "" if account is None else f"   goodput {account.goodput:.1%}"
    return Listed(titled(f"WHERE THE TIME WENT{goodput}"), entries, least=4)


def _checkpoints(picture: Picture) -> Panel:
    """Return the newest checkpoints with their age."""
    found = picture.sections.checkpoints
    failed = f", {found.failed} failed" if found.failed else ""

    def entries(width: int) -> list[ListEntry]:
        rows = [entry(_snapshot(held, picture)) for held in picture.sections.snapshots]
        if not found.newest:
            return [*rows, entry(Text("none saved by elastane's Checkpointer", style="dim"))]
        return [*rows, *(entry(_checkpoint(made, picture)) for made in found.newest)]

    return Listed(titled(f"CHECKPOINTS   {found.saved} saved{failed}"), entries, least=2)


def _snapshot(held: SnapshotRow, picture: Picture) -> Text:
    when, took = _ago(picture, held.begun_s), f"{held.took_s:.1f} s"
    return Text(f"step {held.step:,}  {when}  in memory, survives any {held.survives}  {took}")


def _checkpoint(made: CheckpointView, picture: Picture) -> Text:
    if made.slug:
        return Text(f"× step {made.step:,} failed [{printable(made.slug)}]", style="red")
    when = _ago(picture, made.begun_s)
    size, took = _bytes(made.stored_bytes), f"{made.seconds:.1f} s"
    return Text(f"step {made.step:,}  {when}  {size}  {took}")


def _ago(picture: Picture, time_s: float) -> str:
    """Return how long ago a time was; for an ended job, how long before its end."""
    end_s = picture.sections.job.ended_s
    if end_s is not None:
        return f"{_age(end_s - time_s)} before the end"
    return f"{_age(picture.now_s - time_s)} ago"


def _age(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit_s, name in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def _clock(time_s: float, picture: Picture) -> str:
    """Return the local time of day, with the date if it is of another day than now."""
    is_recent = picture.now_s - time_s < _DAY_S
    return time.strftime("%H:%M:%S" if is_recent else "%m-%d %H:%M", time.localtime(time_s))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
