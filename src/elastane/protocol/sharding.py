"""A state that is sharded over workers: what those of a node hold of it, and what makes replicas.

A replica is of the workers of one node, or of several: then each node holds one part of it, for as
long as its workers live. A world is of whole replicas. Survivors that are none first meet all the
same, and come to one step, since any of them may be ahead; then those that are too many for whole
replicas give way (`rendezvous.regroup`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from elastane.protocol.limits import COUNT_MAX
from elastane.protocol.model import Fence

NO_SLICE = -1


class Sharding(msgspec.Struct, frozen=True):
    """What the workers of a node hold; they enter a world all together, or not at all.

    `sole`: some of them hold what nobody else in their world does. `span`: of how many nodes a
    replica is. `part`: which part of it they hold, from 0. `level`: a world that is not of whole
    replicas, makes no step, and has all its members at the same one.
    """

    sole: bool = False
    span: Annotated[int, msgspec.Meta(ge=1, lt=COUNT_MAX)] = 1
    part: Annotated[int, msgspec.Meta(ge=NO_SLICE, lt=COUNT_MAX)] = NO_SLICE
    level: Fence | None = None


def merge_shardings(said: Iterable[Sharding]) -> Sharding | None:
    """Return what the workers of a node hold together; None: their state is not sharded.

    Those that came since have no part yet, and take that of the others.
    """
    each = [*said]
    if not each:
        return None
    parts = {one.part for one in each} - {NO_SLICE}
    levels = {one.level for one in each}
    return Sharding(
        sole=any(one.sole for one in each),
        span=max(one.span for one in each),
        part=parts.pop() if len(parts) == 1 else NO_SLICE,
        level=levels.pop() if len(levels) == 1 else None,
    )


def whole_replicas(parts: Sequence[int], span: int, most: int) -> list[int]:
    """Return which nodes make as many whole replicas as there can be, of `most` nodes at most.

    `parts`: what each holds. Who comes first is chosen first; who holds none takes any.
    """
    if span > len(parts):
        return []
    held: dict[int, list[int]] = {part: [] for part in range(span)}
    free: list[int] = []
    for number, part in enumerate(parts):
        held.get(part, free).append(number)
    count = min(most, len(parts)) // span
    while sum(max(0, count - len(each)) for each in held.values()) > len(free):
        count -= 1
    chosen = [number for each in held.values() for number in each[:count]]
    return sorted(chosen + free[: count * span - len(chosen)])


def world_bounds(min_nodes: int, max_nodes: int, span: int) -> tuple[int, int]:
    """Return of how many nodes a world is at least and at most, both in whole replicas.

    Of one replica at least, and the maximum counts where no such number is within the range.
    """
    most = max(1, max_nodes // span) * span
    return min(-(-min_nodes // span) * span, most), most
