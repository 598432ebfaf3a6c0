"""A sum whose bits do not depend on which rank computes which part.

V virtual shards are the leaves of one fixed binary tree, and every pair is added left to right. A
rank holds a contiguous range of shards and sums the largest aligned blocks of it as they arrive (a
binary counter: at most log2 V + 1 vectors are held). The blocks of all ranks are combined by the
same tree. So the result is bit for bit the same in every world of 1 to V workers.

It does not know gradients or groups: `comms.mean` exchanges the blocks of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

# A node of the tree: its level (leaves are 0) and its index in the level.
Node: TypeAlias = tuple[int, int]
# Writes a shard's vector into a tensor: adds it if the flag is set, else overwrites.
Write: TypeAlias = Callable[[torch.Tensor, bool], object]


def shards_of(rank: int, world_size: int, shards: int) -> range:
    """Return the shards that a rank holds: contiguous, and as even as possible."""
    assert 0 <= rank < world_size <= shards, (rank, world_size, shards)
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def raised(node: Node, shards: int) -> Node:
    """Return the highest node with the same sum: a right sibling without shards adds nothing."""
    level, place = node
    while place % 2 == 0 and place << level > 0 and (place + 1) << level >= shards:
        level, place = level + 1, place // 2
    return level, place


def blocks_of(held: range, shards: int) -> list[Node]:
    """Return the blocks that a range of shards sums to without shards of others."""
    stack: list[Node] = []
    for shard in held:
        stack.append(raised((0, shard), shards))
        while len(stack) > 1 and _siblings(stack[-2], stack[-1]):
            stack[-2:] = [_parent(stack[-1], shards)]
    return stack


def _siblings(left: Node, right: Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


def _parent(right: Node, shards: int) -> Node:
    return raised((right[0] + 1, right[1] // 2), shards)


class Buffers:
    """Flat vectors of one size and dtype that are reused.

    Fresh memory costs many times what is done with it here, since the kernel makes each page.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._count, self._dtype, self._device = count, dtype, device
        self._free: list[torch.Tensor] = []
        self.made = 0

    def take(self) -> torch.Tensor:
        """Return a vector with undefined content."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.empty(self._count, dtype=self._dtype, device=self._device)

    def give(self, vector: torch.Tensor) -> None:
        """Return a vector to the pool."""
        self._free.append(vector)


class TreeSum:
    """The sums of one rank's shards, added in the order of the shards."""

    def __init__(self, held: range, shards: int, buffers: Buffers) -> None:
        self._coming = iter(held)
        self._left = len(held)
        self._shards = shards
        self._buffers = buffers
        self._stack: list[tuple[Node, torch.Tensor]] = []

    def add(self, write: Write) -> None:
        """Add the next shard's vector, which `write` writes."""
        node = raised((0, next(self._coming)), self._shards)
        self._left -= 1
        if self._stack and _siblings(self._stack[-1][0], node):
            _, left = self._stack.pop()
            write(left, True)
            self._push(_parent(node, self._shards), left)
        else:
            own = self._buffers.take()
            write(own, False)
            self._push(node, own)

    def blocks(self) -> list[torch.Tensor]:
        """Return the sums of the blocks, once all shards were added."""
        assert self._left == 0, f"{self._left} shards are missing"
        return [value for _, value in self._stack]

    def _push(self, node: Node, value: torch.Tensor) -> None:
        while self._stack and _siblings(self._stack[-1][0], node):
            _, left = self._stack.pop()
            left.add_(value)
            self._buffers.give(value)
            node, value = _parent(node, self._shards), left
        self._stack.append((node, value))


def combine(nodes: Iterable[Node], values: Iterable[torch.Tensor], shards: int) -> torch.Tensor:
    """Return the sum of all shards from blocks that cover them, in order, in one of the values."""
    stack: list[tuple[Node, torch.Tensor]] = []
    for each in zip(nodes, values, strict=True):
        node, value = each
        while stack and _siblings(stack[-1][0], node):
            _, left = stack.pop()
            left.add_(value)
            node, value = _parent(node, shards), left
        stack.append((node, value))
    ((_, total),) = stack
    return total
