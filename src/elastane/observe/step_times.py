"""How long the own part of a step takes on each node now, and which workers the others wait for.

Pure. `heat` shows the same measurements over time. A node is shown by its slowest worker, because
that worker determines the length of the world's steps. Measurements of older worlds are not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import msgspec

from elastane.observe.view import JobView, OwnParts, WorkerName
from elastane.protocol.ring import spans
from elastane.protocol.stragglers import EXCESS_MIN_S, NAMED_RATIO

_MS = 1000.0


class NodeStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The slowest worker of a node: its own part of a step, also as a multiple of the median.

    `is_slow`: the other workers wait for this one.
    """

    node: str
    rank: int
    own_ms: float
    ratio: float
    is_slow: bool = False


class StepTimesNow(msgspec.Struct, frozen=True, kw_only=True):
    """The own parts of the current world's workers, measured at `time_s`.

    `nodes`: the measured nodes; of a large world, only those with the slowest workers. `waits`: in
    words, how many workers wait, how long and for which; empty while none waits, and while no
    worker makes steps.
    """

    time_s: float
    median_ms: float
    nodes: list[NodeStep]
    waits: str


class _WorkerStep(msgspec.Struct, frozen=True):
    node: str
    rank: int
    ratio: float
    is_slow: bool


def step_times_of(view: JobView) -> StepTimesNow | None:
    """Return the newest measurement; None while the current world has none."""
    point = view.own_parts[-1] if view.own_parts else None
    if point is None or (view.worlds and point.time_s < view.worlds[-1].time_s):
        return None
    usual = _usual(point)
    last = view.incidents.of_world()
    makes_steps = view.incidents.beside("stall") is None and (last is None or last.state != "open")
    workers = [
        _worker(at, name, ratio, usual, point)
        for at, (name, ratio) in enumerate(zip(point.workers, point.ratios, strict=True))
    ]
    slowest: dict[str, _WorkerStep] = {}
    for one in workers:
        if one.node and (one.node not in slowest or one.ratio > slowest[one.node].ratio):
            slowest[one.node] = one
    return StepTimesNow(
        time_s=point.time_s,
        median_ms=point.median_ms,
        nodes=[
            NodeStep(
                node=one.node,
                rank=one.rank,
                own_ms=round(one.ratio * point.median_ms, 2),
                ratio=one.ratio,
                is_slow=one.is_slow,
            )
            for one in slowest.values()
        ],
        waits=_waits([one for one in workers if one.is_slow and makes_steps], usual, point),
    )


def milliseconds(value_ms: float) -> str:
    """Return a duration in three digits and the unit that suits it."""
    return f"{value_ms / _MS:.3g} s" if value_ms >= _MS else f"{value_ms:.3g} ms"


def _usual(point: OwnParts) -> float:
    """Return the ratio of a usual worker; among few workers a slow one moves the median."""
    return median_low(point.ratios) if point.is_whole else 1.0


def _worker(at: int, name: WorkerName, ratio: float, usual: float, point: OwnParts) -> _WorkerStep:
    excess_ms = (ratio - usual) * point.median_ms
    return _WorkerStep(
        node=name.node,
        rank=at if name.rank is None else name.rank,
        ratio=ratio,
        is_slow=ratio >= NAMED_RATIO * usual and excess_ms >= EXCESS_MIN_S * _MS,
    )


def _waits(slow: Sequence[_WorkerStep], usual: float, point: OwnParts) -> str:
    if not slow:
        return ""
    wait_ms = (max(one.ratio for one in slow) - usual) * point.median_ms
    nodes = list(dict.fromkeys(one.node for one in slow))
    where = f" on {nodes[0]}" if len(nodes) == 1 and nodes[0] else ""
    ranks = f"rank{'s' if len(slow) > 1 else ''} {spans([one.rank for one in slow])}"
    waiting = point.count - len(slow)
    others = "1 worker waits" if waiting == 1 else f"{waiting} workers wait"
    return f"{others} {milliseconds(wait_ms)} in each step for {ranks}{where}"
