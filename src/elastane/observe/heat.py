"""When each worker was slow: the own parts of steps by worker and time, from a job's view.

Pure. A worker's own part of a step is the step without its waits for others. It is shown as a
multiple of the median of all workers at that time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastane.observe.view import JobView, OwnParts, WorkerName

# Cells of a row: as many as a person can distinguish. The log has a point every half minute.
CELLS_MAX = 120
CELL_S_MIN = 30.0
ROWS_MAX = 64
# Rows of a world of which the log lists only the slowest workers.
ROWS_SLOWEST = 10
# The multiple that is assumed for a worker that the log does not list among the slowest.
_USUAL = 1.0


class HeatRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. `ratios`: the mean ratio in each cell; None in a cell without a measurement.

    `rank` is set if node and local rank are not both known.
    """

    ratios: list[float | None]
    node: str = ""
    local_rank: int | None = None
    rank: int | None = None


class StepHeat(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of all workers, or of the slowest, in cells of equal length from `from_s` on."""

    from_s: float
    cell_s: float
    rows: list[HeatRow]
    is_whole: bool


def heat_of(view: JobView, from_s: float, to_s: float) -> StepHeat:
    """Return the own parts from `from_s` to `to_s`."""
    points = [point for point in view.own_parts if from_s <= point.time_s <= to_s]
    cell_s = max(CELL_S_MIN, (to_s - from_s) / CELLS_MAX)
    cells = min(CELLS_MAX, int((to_s - from_s) / cell_s) + 1)
    is_whole = all(point.is_whole for point in points)
    chosen = _workers(points, is_whole)
    sums = [[0.0] * cells for _ in chosen]
    counts = [[0] * cells for _ in chosen]
    for point in points:
        cell = min(cells - 1, int((point.time_s - from_s) / cell_s))
        for row, ratio in _placed(point, chosen):
            sums[row][cell] += ratio
            counts[row][cell] += 1
    rows = [_row(*of_worker) for of_worker in zip(chosen, sums, counts, strict=True)]
    return StepHeat(from_s=from_s, cell_s=cell_s, rows=rows, is_whole=is_whole)


def _workers(points: Sequence[OwnParts], is_whole: bool) -> list[WorkerName]:
    """Return the workers that are shown: in the order of ranks, or the slowest first."""
    newest_first = reversed(points)
    if is_whole:
        found = dict.fromkeys(worker for point in newest_first for worker in point.workers)
        return [*found][:ROWS_MAX]
    excess: dict[WorkerName, float] = {}
    for point in newest_first:
        for worker, ratio in zip(point.workers, point.ratios, strict=True):
            excess[worker] = excess.get(worker, 0.0) + max(0.0, ratio - _USUAL)
    return sorted(excess, key=lambda worker: -excess[worker])[:ROWS_SLOWEST]


def _placed(point: OwnParts, chosen: Sequence[WorkerName]) -> list[tuple[int, float]]:
    """Return the ratio of each chosen worker that was in the world, with the number of its row."""
    of = dict(zip(point.workers, point.ratios, strict=True))
    missing = None if point.is_whole else _USUAL
    found = [(row, of.get(worker, missing)) for row, worker in enumerate(chosen)]
    return [(row, ratio) for row, ratio in found if ratio is not None]


def _row(worker: WorkerName, sums: Sequence[float], counts: Sequence[int]) -> HeatRow:
    return HeatRow(
        node=worker.node,
        local_rank=worker.local_rank,
        rank=worker.rank,
        ratios=[
            round(total / count, 2) if count else None
            for total, count in zip(sums, counts, strict=True)
        ],
    )
