"""A sum that does not depend on who computes it.

V virtual shards stand at the leaves of one fixed binary tree; every pair is added left to right.
A rank holds a contiguous range of shards, adds up the largest aligned blocks of it while they come
(a binary counter: at most log2 V + 1 vectors are held), and the blocks of all ranks are put
together by the same tree: each rank does that for its part of the vector, after an all-to-all, and
an all-gather spreads the parts. So the result is bit for bit the same for every world of 1 to V.

Where the world divides V into powers of two each rank brings one block, and the bytes moved are
those of a ring all-reduce. Knows nothing of gradients; fails as the group does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

# A node of the tree: its level (leaves are 0) and its place in the level.
Node: TypeAlias = tuple[int, int]


def shards_of(rank: int, world_size: int, shards: int) -> range:
    """The shards that a rank holds: contiguous, and as even as it goes."""
    assert 0 <= rank < world_size <= shards, (rank, world_size, shards)
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def raised(node: Node, shards: int) -> Node:
    """The highest node with the same sum: a right sibling that holds no shard adds nothing."""
    level, place = node
    while place % 2 == 0 and place << level > 0 and (place + 1) << level >= shards:
        level, place = level + 1, place // 2
    return level, place


def blocks_of(held: range, shards: int) -> list[Node]:
    """The blocks into which a range of shards adds up by itself."""
    stack: list[Node] = []
    for shard in held:
        stack.append(raised((0, shard), shards))
        while len(stack) > 1 and _siblings(stack[-2], stack[-1]):
            right = stack.pop()
            stack[-1] = raised((right[0] + 1, right[1] // 2), shards)
    return stack


def _siblings(left: Node, right: Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


class TreeSum:
    """The sums of one rank's shards, added in the order of the shards."""

    def __init__(self, held: range, shards: int) -> None:
        self._coming = iter(held)
        self._left = len(held)
        self._shards = shards
        self._stack: list[tuple[Node, torch.Tensor]] = []
        self._spare: list[torch.Tensor] = []

    def add(self, shard: torch.Tensor) -> None:
        """Take the next shard's vector; it is copied."""
        own = self._spare.pop() if self._spare else torch.empty_like(shard)
        own.copy_(shard)
        self._left -= 1
        self._push(raised((0, next(self._coming)), self._shards), own)

    def blocks(self) -> list[torch.Tensor]:
        """The sums of the blocks, when all shards came."""
        assert self._left == 0, f"{self._left} shards are to come"
        return [value for _, value in self._stack]

    def _push(self, node: Node, value: torch.Tensor) -> None:
        self._stack.append((node, value))
        while len(self._stack) > 1 and _siblings(self._stack[-2][0], self._stack[-1][0]):
            (level, place), right = self._stack.pop()
            _, left = self._stack[-1]
            left.add_(right)
            self._spare.append(right)
            self._stack[-1] = (raised((level + 1, place // 2), self._shards), left)


def combine(nodes: Iterable[Node], values: Iterable[torch.Tensor], shards: int) -> torch.Tensor:
    """The sum of all shards from blocks that cover them, in order. Changes the values."""
    total = TreeSum(range(0), shards)
    for node, value in zip(nodes, values, strict=True):
        total._push(node, value)
    (result,) = total.blocks()
    return result


def reduce_blocks(group: ProcessGroup, blocks: Sequence[torch.Tensor], shards: int) -> torch.Tensor:
    """The sum over all ranks' blocks, on every rank; `blocks` are those of `TreeSum`, flat."""
    rank, world_size = group.rank(), group.size()
    nodes = [blocks_of(shards_of(each, world_size, shards), shards) for each in range(world_size)]
    assert len(nodes[rank]) == len(blocks), (len(nodes[rank]), len(blocks))
    if world_size == 1:
        return combine(nodes[0], [block.clone() for block in blocks], shards)
    count = blocks[0].numel()
    part = -(-count // world_size)
    sizes = [min(part, max(0, count - part * each)) for each in range(world_size)]
    # For each receiver in turn, its part of each of our blocks.
    outgoing = torch.cat([
        block[part * each : part * each + sizes[each]]
        for each in range(world_size)
        for block in blocks
    ])  # fmt: skip
    taken = [len(theirs) * sizes[rank] for theirs in nodes]
    incoming = outgoing.new_empty(sum(taken))
    group.alltoall_base(incoming, outgoing, taken, [len(blocks) * size for size in sizes]).wait()
    mine = outgoing.new_zeros(part)
    if sizes[rank]:
        all_nodes = itertools.chain.from_iterable(nodes)
        mine[: sizes[rank]] = combine(all_nodes, torch.split(incoming, sizes[rank]), shards)
    whole = outgoing.new_empty(part * world_size)
    group.allgather([list(torch.split(whole, part))], [mine]).wait()
    return whole[:count]


def tree_sum(group: ProcessGroup, vectors: Iterable[torch.Tensor], shards: int) -> torch.Tensor:
    """The sum of `shards` flat vectors of which this rank brings its own, in order."""
    held = shards_of(group.rank(), group.size(), shards)
    total = TreeSum(held, shards)
    for vector in vectors:
        total.add(vector)
    return reduce_blocks(group, total.blocks(), shards)
