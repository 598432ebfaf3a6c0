"""A sum that does not depend on who computes it.

V virtual shards stand at the leaves of one fixed binary tree; every pair is added left to right.
A rank holds a contiguous range of shards and adds up the largest aligned blocks of it while they
come (a binary counter: at most log2 V + 1 vectors are held); the blocks of all ranks are put
together by the same tree. So the result is bit for bit the same for every world of 1 to V.

Knows nothing of gradients or of groups: `comms.mean` brings the blocks of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

# A node of the tree: its level (leaves are 0) and its place in the level.
Node: TypeAlias = tuple[int, int]
# Writes a shard's vector into a tensor: adds it where the flag says so, else overwrites.
Write: TypeAlias = Callable[[torch.Tensor, bool], object]


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
            stack[-2:] = [_parent(stack[-1], shards)]
    return stack


def _siblings(left: Node, right: Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


def _parent(right: Node, shards: int) -> Node:
    return raised((right[0] + 1, right[1] // 2), shards)


class Buffers:
    """Flat vectors of one size and kind that are used again and again.

    Memory that is fresh costs many times what is done with it here: the kernel makes each page.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._count, self._dtype, self._device = count, dtype, device
        self._free: list[torch.Tensor] = []
        self.made = 0

    def take(self) -> torch.Tensor:
        """A vector with whatever is in it."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.empty(self._count, dtype=self._dtype, device=self._device)

    def give(self, vector: torch.Tensor) -> None:
        """Let another have a vector."""
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
        """Take the next shard's vector, by what writes it."""
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
        """The sums of the blocks, when all shards came."""
        assert self._left == 0, f"{self._left} shards are to come"
        return [value for _, value in self._stack]

    def _push(self, node: Node, value: torch.Tensor) -> None:
        while self._stack and _siblings(self._stack[-1][0], node):
            _, left = self._stack.pop()
            left.add_(value)
            self._buffers.give(value)
            node, value = _parent(node, self._shards), left
        self._stack.append((node, value))


def combine(nodes: Iterable[Node], values: Iterable[torch.Tensor], shards: int) -> torch.Tensor:
    """The sum of all shards from blocks that cover them, in order; it is in one of the values."""
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
