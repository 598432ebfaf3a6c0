"""What `elastane status` shows, as text: a screen for a running job, a few lines for an ended one.

Pure: from a report or events to lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastane.errors import ElastaneError
from elastane.observe.events import LoggedEvent
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import NodeStatus, Report

# More nodes than fit on a screen are counted, not listed; those without a rank come first.
NODES_SHOWN_MAX = 40
EVENTS_SHOWN_MAX = 10
_COLUMNS = ("node", "host", "state", "rank", "workers", "step", "steps/s", "heard")


def report_lines(report: Report, endpoint: str) -> list[str]:
    """Return the screen of a running job."""
    lines = [
        f"{report.job}: {report.phase}, {_world(report)}",
        f"  why           {report.reason}",
        f"  coordinator   {endpoint}, up {duration(report.uptime_s)}",
        f"  nodes         {_wanted(report)}",
        f"  budget        {report.restarts_used} of {report.max_restarts} restarts used",
    ]
    if report.last_incident:
        lines.append(f"  last incident {report.last_incident}")
    return [*lines, *_missing_steps(report), "", *_table(report.nodes)]


def _missing_steps(report: Report) -> list[str]:
    """Explain why no steps are shown for a script that does not report any."""
    training = [node for node in report.nodes if node.node_rank is not None]
    if not training or any(node.progress is not None for node in training):
        return []
    return [
        "  steps         none seen: a script shows them by calling elastane.should_checkpoint()",
        "                in each step, or by job.steps(); no others can be seen",
    ]


def ended_lines(job: str, events: Sequence[LoggedEvent], folder: str) -> list[str]:
    """Return how a job went at the end, from its event log."""
    outcome = [event for event in events if event.kind == EventKind.JOB_ENDED]
    state = f"ended: {outcome[-1].reason}" if outcome else "no longer runs on this machine"
    return [f"{job}: {state}", f"  event log     {folder}", "", *_last_events(events)]


def unreachable_lines(
    job: str, error: ElastaneError, agents: Sequence[str], events: Sequence[LoggedEvent]
) -> list[str]:
    """Return what is known of a job whose agents live and whose coordinator does not answer."""
    lines = [f"{job}: its coordinator does not answer", f"  why           {error.what}"]
    lines += [f"  next          {error.next_step}"] if error.next_step else []
    lines.append(f"  agents here   {', '.join(agents)}: alive")
    return [*lines, "", *_last_events(events)]


def _last_events(events: Sequence[LoggedEvent]) -> list[str]:
    return [
        f"  {event.time[:19]}Z {event.kind:<22} {event.reason}"
        for event in events[-EVENTS_SHOWN_MAX:]
    ]


def duration(seconds: float) -> str:
    """Return a time in the two units that matter."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _world(report: Report) -> str:
    if report.fence is None:
        return "no round settled yet"
    return f"{report.fence}, {report.world_size} workers"


def _wanted(report: Report) -> str:
    wanted = f"{report.min_nodes}"
    if report.max_nodes != report.min_nodes:
        wanted += f" to {report.max_nodes}"
    return f"{len(report.nodes)} here, {wanted} wanted"


def _table(nodes: tuple[NodeStatus, ...]) -> list[str]:
    if not nodes:
        return []
    ordered = sorted(nodes, key=_state_order)
    rows = [_COLUMNS, *(_row(node) for node in ordered[:NODES_SHOWN_MAX])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    hidden = len(nodes) - NODES_SHOWN_MAX
    return [*lines, f"  and {hidden} more; --json lists all"] if hidden > 0 else lines


def _state_order(node: NodeStatus) -> tuple[bool, int, str]:
    rank = node.node_rank
    return (rank is not None, -1 if rank is None else rank, node.node_id)


def _row(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.node_id,
        node.host,
        node.state,
        "-" if node.node_rank is None else str(node.node_rank),
        str(node.local_world_size),
        "-" if node.progress is None else str(node.progress),
        "-" if node.steps_per_s is None else f"{node.steps_per_s:.3g}",
        f"{duration(node.heard_s)} ago",
    )
