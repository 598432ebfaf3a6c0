"""`elastane status`: one screen about a job, by the answer of its coordinator.

The command finds this user's jobs on this machine by their agents, and any other job by its
endpoint. Of an ended job it reads the event log. It never changes a job.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError, ExitCode, UsageError
from elastane.protocol.words import counted

if TYPE_CHECKING:
    from elastane.observe.account import Account
    from elastane.observe.events import LoggedEvent
    from elastane.observe.needs import Need
    from elastane.process.files import JobEntry
    from elastane.process.tls import TlsConfig
    from elastane.protocol.messages import NodeStatus, Report, StateCopy


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


# The columns of a running job's table: title, and the cell of a node. A new column is a line here.
_COLUMNS: dict[str, Callable[[NodeStatus], str]] = {
    "node": lambda node: node.node_id,
    "host": lambda node: node.host,
    "state": lambda node: node.state,
    "rank": lambda node: _or_dash(node.node_rank),
    "workers": lambda node: str(node.local_world_size),
    "step": lambda node: _or_dash(node.progress),
    "steps/s": lambda node: "-" if node.steps_per_s is None else f"{node.steps_per_s:.3g}",
    "heard": lambda node: f"{duration(node.heard_s)} ago",
}
# The most nodes that are listed; others are counted. Nodes without a rank come first.
NODES_SHOWN_MAX = 40
EVENTS_SHOWN_MAX = 10
# Columns of wrapped lines, and those before their text.
WIDTH = 100
_INDENT = 16


@dataclass
class _View:
    """The known facts about one job: its report, or the query's error and the event log."""

    job: str
    endpoint: str = ""
    report: Report | None = None
    error: ElastaneError | None = None
    agents: list[JobEntry] = field(default_factory=list)
    log_dir: str | None = None  # the log folder, if the coordinator has answered
    folder: str = ""
    events: list[LoggedEvent] = field(default_factory=list)
    has_log: bool = False  # its events were read here
    account: Account | None = None
    troubles: list[Need] = field(default_factory=list)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "job",
        metavar="JOB",
        nargs="?",
        default="",
        help="name of the job (default: all jobs on this machine)",
    )
    add(
        "--rdzv-endpoint",
        metavar="HOST[:PORT]",
        default="",
        help="address of the coordinator to ask",
    )
    add("--rdzv-id", metavar="NAME", default="", help="name of the job, as for elastane run")
    add(
        "--log-dir",
        metavar="DIR",
        default="",
        help="the --log-dir of elastane run, for a job that has ended",
    )
    add(
        "--token-file",
        metavar="FILE",
        default="",
        help="file with the secret of the job (or set ELASTANE_TOKEN)",
    )
    add_tls_options(parser)
    add("--json", action="store_true", help="print everything as JSON")


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add the TLS options of a command that queries the coordinator; `tls_of` reads them."""
    add = parser.add_argument
    add("--tls-cert", metavar="FILE", default="", help="certificate to ask the coordinator (PEM)")
    add("--tls-key", metavar="FILE", default="", help="private key of --tls-cert (PEM)")
    add("--tls-ca", metavar="FILE", default="", help="authority that all nodes trust (PEM)")


def main(args: argparse.Namespace) -> int:
    """Print the job's state; returns 75 if a job runs but its coordinator does not answer."""
    if args.job and args.rdzv_id and args.job != args.rdzv_id:
        raise UsageError(
            f"two names for one job: {args.job} and --rdzv-id {args.rdzv_id}",
            slug="usage",
            expected="one of them",
            next_step=f"elastane status {args.job}, or elastane status {args.rdzv_id}",
        )
    views = _views(args, args.job or args.rdzv_id)
    if args.json:
        for view in views:
            _add_account(view)
        _print_json(views)
    elif not views:
        print("no job of this user runs on this machine")
        print(
            "next: elastane status JOB for one that ended, or --rdzv-endpoint HOST:PORT --rdzv-id"
        )
    else:
        for number, view in enumerate(views):
            _print(["", *_story(view)] if number else _story(view))
            _add_account(view)  # Reading the log of thousands of nodes takes seconds.
            _print([*trouble_lines(view.troubles), *_account_lines(view)])
    troubled = [view for view in views if view.error is not None]
    return int(ExitCode.TRY_AGAIN) if troubled else 0


def _print(lines: Sequence[str]) -> None:
    from elastane.observe.box import printable

    for line in lines:
        print(printable(line))
    sys.stdout.flush()


def _views(args: argparse.Namespace, job: str) -> list[_View]:
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder

    if args.rdzv_endpoint:
        return [_from_endpoint(args, job)]
    running = JobRegistry(runtime_folder(environment.snapshot())).running(job)
    by_job: dict[str, list[JobEntry]] = {}
    for entry in running:
        by_job.setdefault(entry.job, []).append(entry)
    if not by_job and job:
        return [_from_log(job, args.log_dir, all_counts=args.json)]
    return [
        _from_agents(entries, tls_of(args), all_counts=args.json) for entries in by_job.values()
    ]


def _from_endpoint(args: argparse.Namespace, job: str) -> _View:
    """Query the coordinator at an address; errors are raised."""
    from elastane.options.secret import read_token
    from elastane.process import environment
    from elastane.process.endpoint import parse_endpoint

    if not job:
        raise UsageError(
            "--rdzv-endpoint without the job's name",
            slug="usage",
            expected="the name, which the secret of each session is bound to",
            next_step=f"elastane status --rdzv-endpoint {args.rdzv_endpoint} --rdzv-id NAME",
        )
    endpoint = str(parse_endpoint(args.rdzv_endpoint))
    token = read_token(args.token_file) if args.token_file else environment.get("ELASTANE_TOKEN")
    return _View(job, endpoint, report=_ask(endpoint, job, token, tls_of(args)))


def _from_agents(entries: list[JobEntry], tls: TlsConfig | None, *, all_counts: bool) -> _View:
    """Query the coordinators that the agents on this machine know; keep the last error."""
    view = _View(entries[0].job, agents=entries)
    for entry in reversed(entries):  # the youngest agent has the newest address
        view.endpoint = entry.endpoint
        try:
            view.report = _ask(entry.endpoint, entry.job, entry.token, tls)
        except ElastaneError as error:
            view.error = error
        else:
            view.error = None
            view.log_dir = entry.log_dir
            return view
    _add_events(view, entries[-1].log_dir, all_counts=all_counts)
    return view


def _from_log(job: str, log_dir: str, *, all_counts: bool) -> _View:
    view = _View(job)
    _add_events(view, log_dir, must_exist=True, all_counts=all_counts)
    return view


def _add_events(view: _View, log_dir: str, *, all_counts: bool, must_exist: bool = False) -> None:
    """Add the events and the account; `all_counts`: read all step counts, to show all events."""
    from elastane.cli.logs import find_job
    from elastane.observe.account import LogAccount
    from elastane.observe.deposed import decided
    from elastane.observe.events import read_events

    try:
        folder = find_job(view.job, log_dir, "status")
    except UsageError:
        if must_exist:
            raise
        return
    view.job = view.job if view.job != str(folder) else folder.name
    view.folder = str(folder)
    accounting = LogAccount()
    events = accounting.through(decided(read_events(folder, all_counts=all_counts)))
    view.events = list(events) if all_counts else _shown(events)
    view.account, view.has_log = accounting.account(), bool(view.events)


def _shown(events: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    """Return the last events, and the job's end if it is older than these."""
    from elastane.protocol.log_events import EventKind

    last: deque[LoggedEvent] = deque(maxlen=EVENTS_SHOWN_MAX)
    end: LoggedEvent | None = None
    for event in events:
        last.append(event)
        end = event if event.kind == EventKind.JOB_ENDED else end
    return [*last] if end is None or end in last else [end, *last]


def _add_account(view: _View) -> None:
    """Add the account and the troubles of a job whose coordinator has answered, from its log."""
    from elastane.cli.logs import find_job
    from elastane.observe.account import LogAccount
    from elastane.observe.deposed import decided
    from elastane.observe.events import read_events

    if view.log_dir is None:
        return
    try:
        folder = find_job(view.job, view.log_dir, "status")
    except UsageError:
        return
    accounting = LogAccount()
    for event in decided(read_events(folder, all_counts=False)):
        accounting.add(event)
        view.has_log = True
    view.account, view.troubles = accounting.account(time.time()), accounting.troubles()


def _ask(endpoint: str, job: str, token: str, tls: TlsConfig | None) -> Report:
    """Return the coordinator's report; ElastaneError if none arrives."""
    import asyncio

    from elastane.coordinator.client import query
    from elastane.process.endpoint import parse_endpoint
    from elastane.protocol.wire import derive_secret

    where = parse_endpoint(endpoint)
    secret = derive_secret(job, token or None)
    return asyncio.run(query(where.host, where.port, job, secret, tls))


def tls_of(args: argparse.Namespace) -> TlsConfig | None:
    """Return the TLS files of the command line, if it names any."""
    from elastane.options.secret import read_tls
    from elastane.process.tls import TlsConfig

    files = read_tls((args.tls_cert, args.tls_key, args.tls_ca))
    return TlsConfig(cert=files.cert, key=files.key, ca=files.ca) if files else None


def _account_lines(view: _View) -> list[str]:
    from elastane.observe.account import account_lines

    return ["", *(f"  {line}" for line in account_lines(view.account))] if view.has_log else []


def _story(view: _View) -> list[str]:
    if view.report is not None:
        return report_lines(view.report, view.endpoint)
    if view.error is not None:
        agents = [f"{entry.node} (pid {entry.pid})" for entry in view.agents]
        return unreachable_lines(view.job, view.error, agents, view.events)
    return ended_lines(view.job, view.events, view.folder)


def report_lines(report: Report, endpoint: str) -> list[str]:
    """Return the screen of a running job."""
    lines = [
        f"{report.job}: {'stalled' if report.stalled else report.phase}, {_world(report)}",
        f"  why           {report.stalled or report.reason}",
        f"  coordinator   {endpoint}, up {duration(report.uptime_s)}",
        f"  nodes         {_wanted(report)}",
        f"  budget        {report.restarts_used} of {report.max_restarts} restarts used",
    ]
    if report.last_incident:
        lines.append(f"  last incident {report.last_incident}")
    return [*lines, *_copies(report), *_missing_steps(report), "", *_table(_seen(report))]


def _seen(report: Report) -> tuple[NodeStatus, ...]:
    """Return the nodes; while the job is stalled, those with workers are shown as stalled."""
    if not report.stalled:
        return report.nodes
    from msgspec.structs import replace

    return tuple(
        node if node.node_rank is None else replace(node, state="stalled") for node in report.nodes
    )


def _copies(report: Report) -> list[str]:
    """Return the newest copies of the state; no line for a job without any known copy."""
    safe = report.safe
    memory = [(safe.worker, "in another process"), (safe.node, "on two nodes")]
    held = [f"{_copy(copy)} {where}" for copy, where in memory if copy is not None]
    lines = [f"  snapshot      {', '.join(held)}"] if held else []
    return [*lines, f"  checkpoint    {_copy(safe.job)}"] if safe.job is not None else lines


def _copy(copy: StateCopy) -> str:
    took = f", took {duration(copy.took_s)}"
    return f"step {copy.step} ({duration(copy.age_s)} old{took})"


def _missing_steps(report: Report) -> list[str]:
    """Explain why no step numbers are shown for a script that does not report any."""
    training = [node for node in report.nodes if node.node_rank is not None]
    if not training or any(node.progress is not None for node in training):
        return []
    measured = any(node.steps_per_s is not None for node in training)
    seen = "not numbered: a script numbers" if measured else "none seen so far: a script shows"
    return [
        f"  steps         {seen} them by calling",
        "                elastane.should_checkpoint() in each step, or by job.steps()",
    ]


def ended_lines(job: str, events: Sequence[LoggedEvent], folder: str) -> list[str]:
    """Return the screen of an ended job, from its event log."""
    from elastane.protocol.log_events import EventKind

    outcome = [event for event in events if event.kind == EventKind.JOB_ENDED]
    state = _ended(outcome[-1]) if outcome else "no longer runs on this machine"
    step = outcome[-1].text("next_step") if outcome else ""
    lines = [f"{job}: {state}"] + ([f"  next          {step}"] if step else [])
    if outcome and outcome[-1].data.get("ok") is False:
        lines.append(f"  more          elastane explain {shlex.quote(folder)}")
    return [*lines, f"  event log     {folder}", "", *_last_events(events)]


def _ended(event: LoggedEvent) -> str:
    code = event.number("exit_code")
    word = "succeeded" if event.data.get("ok") else "failed" if "ok" in event.data else "ended"
    return f"{word}{f' with exit code {code}' if code else ''}: {event.reason}"


def trouble_lines(troubles: Sequence[Need]) -> list[str]:
    """Return what a person should know while the job runs, worst first."""
    lines: list[str] = []
    for need in troubles:
        # The hint of most incidents is the cause, which begins with their title.
        known = need.hint.casefold().startswith(need.text.casefold())
        said = need.hint if known else ": ".join(filter(None, (need.text, need.hint)))
        wrapped = textwrap.wrap(said, WIDTH - _INDENT) or [""]
        label = "next" if need.severity == "next" else "needs you"
        lines.append(f"  {label:<{_INDENT - 2}}{wrapped[0]}")
        lines += [" " * _INDENT + line for line in wrapped[1:]]
    return ["", *lines] if lines else []


def unreachable_lines(
    job: str, error: ElastaneError, agents: Sequence[str], events: Sequence[LoggedEvent]
) -> list[str]:
    """Return the screen of a job that has agents but whose coordinator does not answer."""
    lines = [f"{job}: its coordinator does not answer", f"  why           {error.what}"]
    lines += [f"  next          {error.next_step}"] if error.next_step else []
    lines.append(f"  agents here   {', '.join(agents)}: alive")
    return [*lines, "", *_last_events(events)]


def _last_events(events: Sequence[LoggedEvent]) -> list[str]:
    from elastane.observe.events import described

    return [
        f"  {event.time[:19]}Z {event.kind:<22} {described(event)}"
        for event in events[-EVENTS_SHOWN_MAX:]
    ]


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
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
    return f"{report.fence}, {counted(report.world_size, 'worker')}"


def _wanted(report: Report) -> str:
    wanted = f"{report.min_nodes}"
    if report.max_nodes != report.min_nodes:
        wanted += f" to {report.max_nodes}"
    return f"{len(report.nodes)} here, {wanted} wanted"


def _table(nodes: tuple[NodeStatus, ...]) -> list[str]:
    if not nodes:
        return []
    ordered = sorted(nodes, key=_state_order)
    shown = ordered[:NODES_SHOWN_MAX]
    rows = [[*_COLUMNS], *([cell(node) for cell in _COLUMNS.values()] for node in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
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


def _print_json(views: list[_View]) -> None:
    import msgspec

    jobs = [
        {
            "job": view.job,
            "running": view.report is not None or view.error is not None,
            "endpoint": view.endpoint,
            "report": view.report,
            "trouble": str(view.error) if view.error else "",
            "agents": [{"node": entry.node, "pid": entry.pid} for entry in view.agents],
            "log_dir": view.folder,
            "events": view.events,
            "account": view.account,
            "needs": view.troubles,
        }
        for view in views
    ]
    sys.stdout.write(msgspec.json.format(msgspec.json.encode({"jobs": jobs})).decode() + "\n")
