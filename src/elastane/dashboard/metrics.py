"""The metrics of jobs for Prometheus, made from the sections that the web page shows.

Pure. Each metric of `METRICS` has a name, a kind, its labels besides JOB_LABEL, a help text, and a
function that reads its samples. Docs and the dashboard of contrib/ are checked against this table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from elastane.dashboard.snapshot import Sections, SnapshotRow
from elastane.observe.account import TimeCause
from elastane.observe.events import LoggedEvent
from elastane.observe.incidents import BESIDE, IncidentHistory
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Report
from elastane.protocol.stragglers import Why

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# The operator's metrics begin with elastane_job_.
PREFIX = "elastane_"
# Not `job`: Prometheus gives each target a label of that name.
JOB_LABEL = "job_name"
# Upper bounds in seconds: in place 0.1 to 1 s, restarts 1 to 30 s, waits for nodes minutes.
RECOVERY_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
# The nodes of a world start their workers, and make their first step, within this.
SETTLE_S = 10.0
# Kinds of incidents, as observe.incidents has them.
KINDS = ("worker", "node", "failure", "change", *sorted(BESIDE))
# A stall has a recovery if a worker fails in it.
_NO_RECOVERY = BESIDE - {"stall"}
STATES = (
    "starting", "training", "stalled", "recovering", "waiting", "done", "failed", "stopped",
    "silent",
)  # fmt: skip


class Durations(msgspec.Struct):
    """The recoveries of one kind: how many took at most each bound, and their sum in seconds.

    `counts` has one more entry than RECOVERY_BUCKETS_S, for those that took longer than all bounds.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one recovery."""
        self.counts[bisect_left(RECOVERY_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts up to each bound, as Prometheus has them."""
        bounds = [*map(str, RECOVERY_BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


# The values of the labels besides JOB_LABEL, and the sample.
Sample = tuple[tuple[str, ...], float | Durations]
Kind = Literal["gauge", "counter", "histogram"]


class RunTotals:
    """All incidents and checkpoints of one run of a job, and how long the recoveries took.

    A view keeps some thousand of each; these totals count those before them too. All kinds are
    there from the start, because Prometheus sees no increase in a series that begins with 1.
    """

    def __init__(self) -> None:
        self.found = Counter(dict.fromkeys(KINDS, 0))
        self.recoveries = {kind: Durations() for kind in KINDS if kind not in _NO_RECOVERY}
        self.checkpoints = Counter(saved=0, failed=0)
        self._last = 0
        self._open: set[int] = set()

    def note(self, event: LoggedEvent) -> None:
        """Count an event, if it is a checkpoint's."""
        if event.kind == EventKind.CHECKPOINT_SAVED:
            self.checkpoints["saved"] += max(1, event.number("saves") or 1)
        elif event.kind == EventKind.CHECKPOINT_FAILED:
            self.checkpoints["failed"] += 1

    def add(self, history: IncidentHistory, now_s: float) -> None:
        """Count what is new in a history, which is of the same run as the one before.

        `now_s`: no event until SETTLE_S before then is missing.
        """
        last = history.last()
        newest = last.id if last else 0
        for number in range(self._last + 1, newest + 1):
            if (one := history.by_number(number)) is not None:
                self.found[one.kind] += 1
                self._open.add(number)
        self._last = newest
        for number in sorted(self._open):
            one = history.by_number(number)
            is_stalled = one is not None and one.kind == "stall" and one.state == "open"
            if one is None or one.state == "fatal" or (one.is_beside and not is_stalled):
                self._open.discard(number)
            elif one.to_s is not None and now_s - one.to_s > SETTLE_S:
                self._open.discard(number)
                self.recoveries[one.kind].add((one.went_on_s or one.to_s) - one.from_s)


@dataclass(frozen=True, slots=True)
class MeasuredState:
    """All that is known of one job as it is scraped, at `now_s` of this machine's clock."""

    now_s: float
    sections: Sections
    totals: RunTotals
    report: Report | None


@dataclass(frozen=True, slots=True)
class MetricRule:
    """One metric: its name without PREFIX, and how its samples are read from a job."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    what: str
    read: Callable[[MeasuredState], Iterable[Sample]]


def _one(read: Callable[[MeasuredState], float | None]) -> Callable[[MeasuredState], list[Sample]]:
    """Return a reader of a metric without labels, which has no sample while it is not known."""

    def samples(state: MeasuredState) -> list[Sample]:
        value = read(state)
        return [] if value is None else [((), float(value))]

    return samples


def _states(state: MeasuredState) -> list[Sample]:
    return [((name,), float(name == state.sections.job.state)) for name in STATES]


def _workers(state: MeasuredState) -> list[Sample]:
    found: list[Sample] = []
    for row in state.sections.nodes.here:
        # A node of a large job whose workers are all well is counted alone.
        count = Counter(one.state for one in row.workers) or {row.state: row.worker_count}
        found += [((row.name, name), float(number)) for name, number in sorted(count.items())]
    return found


def _seconds(state: MeasuredState) -> list[Sample]:
    account = state.sections.account
    if account is None:
        return []
    known = {row.cause: row.seconds for row in account.causes}
    return [((str(cause),), known.get(str(cause), 0.0)) for cause in TimeCause]


def _stragglers(state: MeasuredState) -> list[Sample]:
    workers = [one for row in state.sections.nodes.here for one in row.workers]
    return [((str(why),), float(sum(one.slow == why for one in workers))) for why in Why]


def _incidents(state: MeasuredState) -> list[Sample]:
    return [((kind,), float(count)) for kind, count in sorted(state.totals.found.items())]


def _recoveries(state: MeasuredState) -> list[Sample]:
    return [((kind,), one) for kind, one in sorted(state.totals.recoveries.items())]


def _checkpoints(state: MeasuredState) -> list[Sample]:
    made = state.totals.checkpoints
    return [((result,), float(made[result])) for result in ("saved", "failed")]


def _standbys(state: MeasuredState) -> int | None:
    if state.report is None:
        return None
    return sum(node.node_rank is None for node in state.report.nodes)


def _gauge(name: str, what: str, path: str) -> MetricRule:
    """Return a gauge without labels; `path`: the attribute of a MeasuredState that it shows."""
    return MetricRule(name, "gauge", (), what, _one(attrgetter(path)))


def _step(state: MeasuredState) -> float | None:
    return state.sections.job.step if state.sections.job.has_steps else None


def _goodput(state: MeasuredState) -> float | None:
    return state.sections.account.goodput if state.sections.account else None


def _saved(name: str, what: str, field_name: str) -> MetricRule:
    """Return a gauge of the newest checkpoint that was saved."""

    def read(state: MeasuredState) -> float | None:
        newest = state.sections.checkpoints.newest
        made = next((one for one in newest if not one.slug), None)
        return None if made is None else getattr(made, field_name)

    return MetricRule(name, "gauge", (), what, _one(read))


def _checkpoint_age(state: MeasuredState) -> float | None:
    """Return how long ago the save of the newest checkpoint began; None of a job that is over."""
    newest = state.sections.checkpoints.newest
    made = next((one for one in newest if not one.slug), None)
    if made is None or state.sections.job.ended_s is not None:
        return None
    return max(0.0, state.now_s - made.begun_s)


def _snapshot(
    name: str, what: str, read: Callable[[SnapshotRow, float], float | None]
) -> MetricRule:
    """Return a gauge of the newest snapshots; `read` gets the snapshot and the present time."""

    def samples(state: MeasuredState) -> list[Sample]:
        rows = [(row.survives, read(row, state.now_s)) for row in state.sections.snapshots]
        return [((survives,), value) for survives, value in rows if value is not None]

    return MetricRule(name, "gauge", ("survives",), what, samples)


def _of_node(name: str, what: str, field_name: str) -> MetricRule:
    """Return a gauge that each node has."""

    def read(state: MeasuredState) -> list[Sample]:
        rows = state.sections.nodes.here
        values = ((row.name, getattr(row, field_name)) for row in rows)
        return [((node,), float(value)) for node, value in values if value is not None]

    return MetricRule(name, "gauge", ("node",), what, read)


METRICS = (
    MetricRule(
        "training_state", "gauge", ("state",), "1 for the state of the job, else 0", _states
    ),
    MetricRule("training_step", "gauge", (), "steps that all workers have made", _one(_step)),
    _gauge("training_steps_per_second", "steps per second now", "sections.rate.now"),
    _gauge("training_usual_steps_per_second", "usual steps per second", "sections.rate.usual"),
    _gauge("training_world_size", "workers in the present world", "sections.job.world_size"),
    _gauge("training_world_size_max", "workers in the largest world", "sections.job.world_full"),
    _gauge("training_nodes", "nodes that are with the job", "sections.job.nodes"),
    _gauge("training_nodes_min", "nodes that the job needs", "sections.job.min_nodes"),
    _gauge("training_nodes_allowed", "nodes that the job takes at most", "sections.job.max_nodes"),
    MetricRule(
        "training_standby_nodes", "gauge", (), "nodes that wait for a place", _one(_standbys)
    ),
    _gauge("training_round", "number of the present round", "sections.job.round"),
    MetricRule(
        "training_restarts",
        "counter",
        (),
        "restarts of the budget that were used",
        _one(attrgetter("sections.job.restarts_used")),
    ),
    _gauge(
        "training_restarts_allowed",
        "restarts that the budget allows",
        "sections.job.restarts_allowed",
    ),
    _gauge(
        "training_start_time_seconds",
        "when the job began, in seconds since 1970",
        "sections.job.started_s",
    ),
    _gauge(
        "training_end_time_seconds",
        "when the job ended, in seconds since 1970",
        "sections.job.ended_s",
    ),
    MetricRule("training_incidents", "counter", ("kind",), "incidents by kind", _incidents),
    MetricRule(
        "training_recovery_seconds",
        "histogram",
        ("kind",),
        "seconds from a failure, or a planned change, until the next world had made its first step",
        _recoveries,
    ),
    MetricRule(
        "training_seconds",
        "gauge",
        ("cause",),
        "seconds of the job by cause; a cause that is known later replaces one that was assumed",
        _seconds,
    ),
    MetricRule(
        "training_goodput_ratio", "gauge", (), "productive share of the time", _one(_goodput)
    ),
    MetricRule(
        "training_checkpoints", "counter", ("result",), "checkpoints by result", _checkpoints
    ),
    _saved("training_checkpoint_step", "step of the newest checkpoint", "step"),
    _saved(
        "training_checkpoint_time_seconds",
        "when the newest checkpoint was saved, in seconds since 1970",
        "time_s",
    ),
    _saved(
        "training_checkpoint_duration_seconds", "seconds that the newest checkpoint took", "seconds"
    ),
    MetricRule(
        "training_checkpoint_age_seconds",
        "gauge",
        (),
        "seconds since the save of the newest checkpoint began",
        _one(_checkpoint_age),
    ),
    _gauge(
        "training_checkpoint_interval_seconds",
        "usual seconds between two checkpoints",
        "sections.checkpoints.interval_s",
    ),
    _saved("training_checkpoint_bytes", "bytes that the newest checkpoint stored", "stored_bytes"),
    _snapshot("training_snapshot_step", "step of the newest snapshot", lambda row, _: row.step),
    _snapshot(
        "training_snapshot_age_seconds",
        "seconds since the save of the newest snapshot began",
        lambda row, now_s: max(0.0, now_s - row.begun_s),
    ),
    _snapshot(
        "training_snapshot_duration_seconds",
        "seconds that the newest snapshot took until it was there",
        lambda row, _: row.took_s,
    ),
    _snapshot(
        "training_snapshot_interval_seconds",
        "usual seconds between two snapshots",
        lambda row, _: row.every_s,
    ),
    MetricRule(
        "training_stragglers",
        "gauge",
        ("why",),
        "ranks that make the others wait in each step, by reason",
        _stragglers,
    ),
    MetricRule("node_workers", "gauge", ("node", "state"), "workers of a node by state", _workers),
    _of_node("node_is_coordinator", "1 for the node that coordinates, else 0", "coordinates"),
    _of_node(
        "node_heartbeat_age_seconds", "seconds since the coordinator heard from the node", "heard_s"
    ),
    _of_node("node_step", "steps that the node's workers have made", "step"),
    _of_node("node_steps_per_second", "steps per second of the node's workers", "rate"),
)


def families(jobs: Mapping[str, MeasuredState]) -> Iterator[Metric]:
    """Yield the metrics of jobs by their names; needs the package prometheus_client."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    kinds: dict[Kind, Any] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    for rule in METRICS:
        family = kinds[rule.kind](PREFIX + rule.name, rule.what, labels=(JOB_LABEL, *rule.labels))
        for job, state in jobs.items():
            for values, value in rule.read(state):
                shown = (value.buckets(), value.sum_s) if isinstance(value, Durations) else (value,)
                family.add_metric((job, *values), *shown)
        yield family
