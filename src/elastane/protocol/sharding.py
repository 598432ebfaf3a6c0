"""A sharded state: what a node holds of it, and which nodes make whole replicas.

A replica spans the workers of one node or of several. With several, each node holds one slice of it
for as long as its workers live. A world consists of whole replicas, except right after a loss: then
all survivors first form a world that brings them to one step, since any may be ahead. Surplus nodes
leave it afterwards (`coordinator.rules.sizing`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from elastane.protocol.limits import COUNT_MAX
from elastane.protocol.model import Fence

NO_SLICE = -1


class Sharding(msgspec.Struct, frozen=True):
    """What the workers of a node hold; they enter a world together or not at all.

    `sole`: some hold what no other worker of their world does. `span`: nodes per replica. `part`:
    which slice of it they hold, from 0. `level`: a world with a partial replica that makes no steps
    and whose members are all at the same step.
    """

    sole: bool = False
    span: Annotated[int, msgspec.Meta(ge=1, lt=COUNT_MAX)] = 1
    part: Annotated[int, msgspec.Meta(ge=NO_SLICE, lt=COUNT_MAX)] = NO_SLICE
    level: Fence | None = None


def merge_shardings(said: Iterable[Sharding]) -> Sharding | None:
    """Return what the workers of a node hold together; None if their state is not sharded.

    Workers that joined have no slice yet, and take that of the others.
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
    """Return the nodes that make as many whole replicas as possible, at most `most` nodes.

    `parts` has the slice of each node. Earlier nodes are preferred; a node without a slice takes
    any.
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
    """Return the least and the greatest number of nodes of a world, in whole replicas.

    It is at least one replica. The maximum prevails if no such number is within the range.
    """
    most = max(1, max_nodes // span) * span
    return min(-(-min_nodes // span) * span, most), most
