"""The sections of a job's live views, made from its view, its account and its report.

Pure. A section is sent again only if it has changed, so each holds what changes together. Sizes are
bounded: a job of a thousand nodes has some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from elastane.dashboard.scalars import ScalarCurve
from elastane.observe.account import INCIDENTS_SHOWN, NOT_HERE, Account, CauseSeconds, missing_of
from elastane.observe.incidents import IncidentView
from elastane.observe.needs import Need, needs_of
from elastane.observe.rates import Series, StepRates, rates_of, series_of
from elastane.observe.step_times import StepTimesNow, step_times_of
from elastane.observe.view import CheckpointView, JobView, NodeView
from elastane.protocol.messages import NodeStatus, Report, SafeCopies
from elastane.protocol.model import NO_RANK

# As many as a chart of full width has pairs of pixels.
BUCKETS = 480
# Nodes up to this number are listed with all their workers, more only with those not well.
DETAILED_NODES_MAX = 64
MARKS_MAX = 1000
# A job that trains logs its progress every ten seconds, wherever its agents run.
SILENT_S = 60.0
CHECKPOINTS_LISTED = 30
# The interval of checkpoints is that of this many: one that is late changes nothing.
INTERVAL_SAVES = 10
GONE_LISTED = 20
_WELL = frozenset({"training", "done"})
_STALLED = "stalled"


class JobSection(msgspec.Struct, kw_only=True):
    """The job as a whole; `state` is that of `state_of`."""

    key: str
    name: str
    state: str
    reason: str
    log_dir: str
    run: int
    started_s: float | None
    ended_s: float | None
    exit_code: int | None
    step: int
    has_steps: bool
    world_size: int
    world_full: int
    nodes: int
    round: int | None
    attempt: int | None
    restarts_used: int
    restarts_allowed: int | None
    min_nodes: int | None
    max_nodes: int | None
    events: int
    is_live: bool
    is_read: bool


class WorkerRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One worker; `rank` is missing where the log does not say it.

    `state`: `awaited` is that of one for which the others wait in a standstill, `stalled` that of
    the others. `slow`: why the others wait for it in each step, in a word.
    """

    local_rank: int
    pid: int
    state: str
    rank: int | None = None
    slow: str = ""


class NodeRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One node; what only a coordinator knows is missing without one."""

    name: str
    state: str
    host: str = ""
    why: str = ""
    since_s: float = 0.0
    workers: list[WorkerRow] = []
    worker_count: int = 0
    coordinates: bool = False
    heard_s: float | None = None
    step: int | None = None
    rate: float | None = None


class _Marks(msgspec.Struct, frozen=True):
    """What differs from the usual: why slow ranks are slow, and the rank that all others wait for.

    `stands_still`: no worker makes steps.
    """

    slow: Mapping[int, str] = {}
    awaited: int | None = None
    stands_still: bool = False


class NodesSection(msgspec.Struct, kw_only=True):
    """The nodes in the order of their ranks, and the ones that are gone, newest first."""

    here: list[NodeRow]
    gone: list[NodeRow]
    gone_count: int
    has_all_workers: bool


class Mark(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One incident as a mark on the timeline."""

    id: int
    kind: str
    state: str
    from_s: float
    to_s: float | None
    whole_s: float | None
    title: str
    node: str = ""
    rank: int | None = None
    trained_s: float | None = None


class CheckpointsSection(msgspec.Struct, kw_only=True):
    """The newest checkpoints, newest first, and all of them as (time, step, failed).

    `interval_s` is the usual time between two that were saved to the place of the newest; None
    while there was only one.
    """

    newest: list[CheckpointView]
    saved: int
    failed: int
    marks: list[tuple[float, int, bool]]
    interval_s: float | None = None


class SnapshotRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The newest snapshot that survives the loss of any `survives`, which is worker or node.

    Its save began at `begun_s`, and it was there `took_s` later; saves come `every_s` apart.
    """

    survives: str
    step: int
    begun_s: float
    took_s: float
    every_s: float | None = None


class CauseRow(msgspec.Struct, kw_only=True):
    """The seconds of one cause, and its longest incidents as (number, seconds)."""

    cause: str
    seconds: float
    incidents: list[tuple[int, float]]


class AccountSection(msgspec.Struct, kw_only=True):
    """The use of the job's time: its causes, the longest first, sum to the wall time.

    `missing`: in words, why the account is not of the whole run; empty if it is.
    """

    wall_s: float
    goodput: float
    causes: list[CauseRow]
    helped: tuple[str, ...]
    missing: str


class Sections(msgspec.Struct, kw_only=True):
    """Everything that is shown without asking further.

    `not_here`: in words, why steps, incidents and the account are not known and will not be; empty
    if they are, or may be later.
    """

    job: JobSection
    rate: StepRates
    needs: list[Need]
    nodes: NodesSection
    step_times: StepTimesNow | None
    series: Series
    incidents: list[Mark]
    checkpoints: CheckpointsSection
    snapshots: list[SnapshotRow]
    account: AccountSection | None
    not_here: str
    scalars: list[ScalarCurve]


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a view as of `now_s`, by the clock of the machine that reads the log.

    `has_agents`: whether agents of the job run on this machine. `scalars`: the values that its
    workers log. `share_read`: how much of the log was read, from 0 to 1.
    """

    now_s: float
    key: str
    folder: str
    events: int
    has_agents: bool
    share_read: float = 1.0
    report: Report | None = None
    scalars: list[ScalarCurve] = []


def sections_of(view: JobView, source: SourceFacts, account: Account | None = None) -> Sections:
    """Return all sections of a job; `account`: the one until `shown_until_s`."""
    end_s = shown_until_s(view, source)
    begin_s = end_s if view.started_s is None else view.started_s
    return Sections(
        job=_job(view, source),
        rate=_rate(view, source.report, end_s),
        needs=needs_of(view) if source.share_read >= 1.0 else [],
        nodes=_nodes(view, source.report),
        step_times=step_times_of(view),
        series=series_of(view, begin_s, max(end_s, begin_s + 60.0), BUCKETS, end_s),
        incidents=[_mark(one) for one in view.incidents.listed[-MARKS_MAX:]],
        checkpoints=_checkpoints(view),
        snapshots=_snapshots(source),
        account=None if account is None else _account(account),
        not_here="" if account is not None else _not_here(view, source),
        scalars=source.scalars,
    )


def state_of(view: JobView, source: SourceFacts) -> str:
    """Return the state of a job in a word.

    reading: not all of its log was read, so that no other state is known; starting, training,
    stalled, recovering, waiting, done, failed; stopped: all its nodes left before its end; silent:
    its log has no end and no recent event, and no agent runs on this machine.
    """
    if source.share_read < 1.0:
        return "reading"
    if view.end is not None:
        return "done" if view.end.ok else "failed"
    if view.all_left:
        return "stopped"
    if not _is_alive(view, source):
        return "silent"
    last = view.incidents.of_world()
    if last is not None and last.state == "open" and last.kind != "change":
        return "recovering"
    if view.waiting:
        return "waiting"
    if view.incidents.beside("stall") is not None:
        return "stalled"
    is_training = any(node.state == "training" for node in view.nodes.values())
    return "training" if is_training and view.world_size else "starting"


def _rate(view: JobView, report: Report | None, end_s: float) -> StepRates:
    """Return the rates, that of now from the coordinator if it answers."""
    rates = rates_of(view, end_s)
    if view.end is None and view.incidents.beside("stall") is not None:
        return StepRates(now=0.0, usual=rates.usual)
    told = (
        [node.steps_per_s for node in report.nodes if node.steps_per_s is not None]
        if report
        else []
    )
    return StepRates(now=median(told), usual=rates.usual) if told else rates


def _not_here(view: JobView, source: SourceFacts) -> str:
    """Return why a log has no account, if its agents were past their start."""
    began = any(node.state != "starting" for node in view.nodes.values())
    return NOT_HERE if began and source.share_read >= 1.0 else ""


def _is_alive(view: JobView, source: SourceFacts) -> bool:
    return source.has_agents or source.now_s - (view.last_s or 0.0) < SILENT_S


def shown_until_s(view: JobView, source: SourceFacts) -> float:
    """Return until when the job is shown: now, its end, or its last event."""
    if view.end is not None:
        return view.end.time_s
    if view.last_s is None or (_is_alive(view, source) and not view.all_left):
        return max(source.now_s, view.last_s or 0.0)
    return view.last_s


def _ended_s(view: JobView) -> float | None:
    if view.end is not None:
        return view.end.time_s
    return view.last_s if view.all_left else None


def _reason(view: JobView, source: SourceFacts) -> str:
    if source.share_read < 1.0:
        return f"{source.share_read:.0%} of its log was read"
    if view.end is not None:
        return view.end.reason
    stall = view.incidents.beside("stall")
    if stall is not None and state_of(view, source) == "stalled":
        return stall.cause
    if source.report is not None:
        return source.report.reason
    if view.all_left:
        return "all nodes left before the job's end; it can be started again"
    return view.waiting


def _job(view: JobView, source: SourceFacts) -> JobSection:
    report = source.report
    used, allowed = view.restarts
    return JobSection(
        key=source.key,
        name=view.job or source.key,
        state=state_of(view, source),
        reason=_reason(view, source),
        log_dir=source.folder,
        run=view.run,
        started_s=view.started_s,
        ended_s=_ended_s(view),
        exit_code=view.end.exit_code if view.end else None,
        step=view.step,
        has_steps=bool(view.steps) and view.steps[-1].steps is not None,
        world_size=view.world_size,
        world_full=max((point.size for point in view.worlds), default=0),
        nodes=sum(node.state not in ("gone", "left", "done") for node in view.nodes.values()),
        round=view.round,
        attempt=view.attempt,
        restarts_used=max(used, report.restarts_used) if report else used,
        restarts_allowed=report.max_restarts if report else allowed,
        min_nodes=report.min_nodes if report else None,
        max_nodes=report.max_nodes if report else None,
        events=source.events,
        is_live=report is not None,
        is_read=source.share_read >= 1.0,
    )


def _nodes(view: JobView, report: Report | None) -> NodesSection:
    ranks = view.first_ranks()
    known = {node.node_id: node for node in report.nodes} if report else {}
    over = view.end is not None
    here = [node for node in view.nodes.values() if over or node.state not in ("gone", "left")]
    gone = [node for node in view.nodes.values() if not over and node.state in ("gone", "left")]
    detailed = len(here) <= DETAILED_NODES_MAX
    stall = None if over else view.incidents.beside("stall")
    marks = _Marks(
        slow={rank: one.why for rank, one in view.stragglers.items()},
        awaited=None if stall is None else stall.rank,
        stands_still=stall is not None,
    )
    here.sort(key=lambda node: _order(node, ranks, known))
    gone.sort(key=lambda node: -node.since_s)
    return NodesSection(
        here=[
            _row(node, ranks.get(node.name), known.get(node.name), marks, detailed=detailed)
            for node in here
        ],
        gone=[_row(node, None, None, _Marks(), detailed=False) for node in gone[:GONE_LISTED]],
        gone_count=len(gone),
        has_all_workers=detailed,
    )


def _order(node: NodeView, ranks: dict[str, int], known: dict[str, NodeStatus]) -> tuple[int, str]:
    status = known.get(node.name)
    if status is not None and status.node_rank is not None:
        return status.node_rank, node.name
    return ranks.get(node.name, 1 << 30), node.name


def _row(
    node: NodeView,
    first_rank: int | None,
    status: NodeStatus | None,
    marks: _Marks,
    *,
    detailed: bool,
) -> NodeRow:
    """Return one node; one that is well in a large job is only counted, not described."""
    first = NO_RANK if first_rank is None else first_rank
    ranks = range(first, first + len(node.workers)) if first >= 0 else range(0)
    well = node.state in _WELL and all(worker.state in _WELL for worker in node.workers)
    well = well and marks.awaited not in ranks and not any(rank in marks.slow for rank in ranks)
    row = NodeRow(
        name=node.name,
        state=_node_state(node, status, marks),
        worker_count=len(node.workers),
        coordinates=node.coordinates,
    )
    if well and not detailed and row.state in (node.state, _STALLED):
        return row
    row.host, row.why, row.since_s = node.host, node.why, node.since_s
    row.workers = [
        WorkerRow(
            local_rank=index,
            pid=worker.pid,
            state=_worker_state(node, worker.state, first + index if ranks else None, marks),
            rank=None if first_rank is None else first_rank + index,
            slow=marks.slow.get(first + index, "") if ranks else "",
        )
        for index, worker in enumerate(node.workers)
    ]
    if status is not None:
        row.heard_s = round(status.heard_s, 1)
        row.step = status.progress
        if status.steps_per_s is not None:
            row.rate = 0.0 if marks.stands_still else round(status.steps_per_s, 3)
    return row


def _node_state(node: NodeView, status: NodeStatus | None, marks: _Marks) -> str:
    if status is not None and status.state == "away":
        return "away"
    if node.state == "training" and any(worker.state == "failed" for worker in node.workers):
        return "failed"
    return _STALLED if node.state == "training" and marks.stands_still else node.state


def _worker_state(node: NodeView, state: str, rank: int | None, marks: _Marks) -> str:
    if state != "training":
        return state
    if rank is not None and rank == marks.awaited:
        return "awaited"
    return _STALLED if node.state == "training" and marks.stands_still else node.state


def _mark(one: IncidentView) -> Mark:
    return Mark(
        id=one.id,
        kind=one.kind,
        state=one.state,
        from_s=one.from_s,
        to_s=one.to_s,
        whole_s=one.whole_s,
        title=one.title,
        node=one.node,
        rank=one.rank,
        trained_s=one.trained_s,
    )


def _account(account: Account) -> AccountSection:
    """Return the account, rounded far below what is shown of it, which is rounded there."""
    return AccountSection(
        wall_s=round(account.wall_s, 4),
        goodput=round(account.goodput, 6),
        causes=[_cause(cause, of) for cause, of in account.causes().items()],
        helped=account.helped,
        missing=missing_of(account),
    )


def _cause(cause: str, of: CauseSeconds) -> CauseRow:
    longest = sorted(of.incidents.items(), key=lambda item: -item[1])[:INCIDENTS_SHOWN]
    return CauseRow(
        cause=str(cause),
        seconds=round(of.seconds, 4),
        incidents=[(number, round(seconds, 4)) for number, seconds in longest],
    )


def _snapshots(source: SourceFacts) -> list[SnapshotRow]:
    """Return the newest snapshots as the coordinator reports them; none without its answer."""
    safe = source.report.safe if source.report is not None else SafeCopies()
    known = [("worker", safe.worker), ("node", safe.node)]
    return [
        SnapshotRow(
            survives=survives,
            step=copy.step,
            begun_s=round(source.now_s - copy.age_s, 1),
            took_s=round(copy.took_s, 3),
            every_s=None if copy.every_s is None else round(copy.every_s, 3),
        )
        for survives, copy in known
        if copy is not None
    ]


def _usual_s(times_s: Sequence[float]) -> float | None:
    """Return the usual time between the newest of these; None for fewer than two."""
    gaps = [after - before for before, after in pairwise(times_s[-INTERVAL_SAVES:])]
    return round(median(gaps), 3) if gaps else None


def _checkpoints(view: JobView) -> CheckpointsSection:
    saved = [made for made in view.checkpoints if not made.slug]
    # A script may save to two places, each of which has an interval of its own.
    times_s = [made.time_s for made in saved if made.location == saved[-1].location]
    return CheckpointsSection(
        newest=list(reversed(view.checkpoints[-CHECKPOINTS_LISTED:])),
        saved=view.saved,
        failed=view.not_saved,
        marks=[(made.time_s, made.step, bool(made.slug)) for made in view.checkpoints[-MARKS_MAX:]],
        interval_s=_usual_s(times_s),
    )
