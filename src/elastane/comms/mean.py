"""The mean over virtual shards that all ranks compute, with the same bits in every world.

V virtual shards are the leaves of one fixed binary tree, and every pair is added left to right. A
rank holds a contiguous range of shards and sums the largest aligned blocks of it as they arrive (a
binary counter: at most log2 V + 1 vectors are held, or 2 log2 V where a range begins anywhere). The
blocks of all ranks are combined by the same tree. So the bits do not depend on which rank computes
which part, in any world of 1 to V workers.

Each rank combines the blocks of all ranks for its own part of the vector, and sends that part to
the others. If the world divides V into powers of two, each rank has one block, and the bytes moved
are those of a ring all-reduce. Over gloo the parts travel as messages, from and into their final
memory; on a device by two collectives.

Memory is reused from step to step. After an interrupted mean it is abandoned, since late messages
may still write to it. It does not know gradients. Fails as the group does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from elastane.comms.elastic import ElasticGroup

# Message tags: block k of a rank's part has tag _TAG + k.
_TAG = 0x7EE0000
_TAG_WHOLE = 0x7EEFFFF
# This many numbers are summed, divided and copied while they are in the processor's cache.
_PIECE = 1 << 16
# A node of the tree: its level (leaves are 0) and its index in the level.
Node: TypeAlias = tuple[int, int]
# Writes a shard's vector into a tensor: adds it if the flag is set, else overwrites.
Write: TypeAlias = Callable[[torch.Tensor, bool], object]


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


class Mean:
    """The mean of `shards` flat vectors of `count` numbers; one mean at a time."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, shards: int) -> None:
        self._shards = shards
        self._count = count
        # Long enough for equal parts in any world.
        self._kind = count + shards, dtype, device
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._buffers = Buffers(*self._kind)
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._in_use: list[torch.Tensor] = []
        self._tree: TreeSum | None = None
        # The blocks that each rank of the world contributes.
        self._nodes: list[list[Node]] = []

    def begin(self, rank: int, dealt: Sequence[range]) -> TreeSum:
        """Return the tree to add this rank's shards to, in order; an unfinished mean is dropped.

        `dealt` has the shards of each rank of the world. The tensor that a shard's vector is
        written to is longer than `count`.
        """
        if self._tree is not None:  # It was not finished, so messages may still arrive.
            self._buffers, self._in_use = Buffers(*self._kind), []
            self._scratch = torch.empty_like(self._scratch)
        while self._in_use:
            self._buffers.give(self._in_use.pop())
        self._nodes = [blocks_of(held, self._shards) for held in dealt]
        self._tree = TreeSum(dealt[rank], self._shards, self._buffers)
        return self._tree

    def finish(self, group: ElasticGroup) -> torch.Tensor:
        """Return the mean, the same on every rank, without negative zeros; its memory is reused."""
        assert self._tree is not None, "begin() comes first"
        blocks = self._tree.blocks()
        if group.size() == 1:
            self._combine(self._nodes[0], blocks, blocks[0])
        elif blocks[0].device.type == "cpu":
            self._by_messages(group, blocks)
        else:
            self._by_collectives(group, blocks)
        self._in_use, self._tree = blocks, None
        return blocks[0][: self._count]

    def _divide(self, total: torch.Tensor) -> torch.Tensor:
        # Adding zero in the same operation removes negative zeros: a gradient that was None must
        # equal one that was zeroed.
        return torch.add(self._zero, total, alpha=1.0 / self._shards, out=total)

    def _combine(self, nodes: list[Node], values: list[torch.Tensor], into: torch.Tensor) -> None:
        """Write the mean of this rank's part, piece by piece; `into` may be one of the values."""
        piece = _PIECE if into.device.type == "cpu" else into.numel()
        for start in range(0, into.numel(), piece):
            pieces = [value[start : start + piece] for value in values]
            total = self._divide(combine(nodes, pieces, self._shards))
            here = into[start : start + piece]
            if total.data_ptr() != here.data_ptr():
                here.copy_(total)

    def _by_messages(self, group: ElasticGroup, blocks: list[torch.Tensor]) -> None:
        """Compute the mean into the first block, over gloo."""
        rank, size = group.rank(), group.size()
        peers = [(rank + step) % size for step in range(1, size)]
        nodes = self._nodes
        ours = [self._parts(block, size) for block in blocks]
        theirs = self._receive_parts(
            [0 if each == rank else len(nodes[each]) for each in range(size)], size
        )
        group.exchange(
            [(part, peer, _TAG + k) for peer in peers for k, part in enumerate(theirs[peer])],
            [(parts[peer], peer, _TAG + k) for peer in peers for k, parts in enumerate(ours)],
        ).wait()
        theirs[rank] = [parts[rank] for parts in ours]
        whole, mine = ours[0], ours[0][rank]
        self._combine(list(itertools.chain(*nodes)), list(itertools.chain(*theirs)), mine)
        group.exchange(
            [(whole[peer], peer, _TAG_WHOLE) for peer in peers],
            [(mine, peer, _TAG_WHOLE) for peer in peers],
        ).wait()

    def _by_collectives(self, group: ElasticGroup, blocks: list[torch.Tensor]) -> None:
        """Compute the mean into the first block, on a device."""
        rank, size, nodes = group.rank(), group.size(), self._nodes
        ours = [self._parts(block, size) for block in blocks]
        part = ours[0][0].numel()
        outgoing = torch.cat([parts[each] for each in range(size) for parts in ours])
        incoming = outgoing.new_empty(part * sum(map(len, nodes)))
        lengths = [part * len(theirs) for theirs in nodes]
        group.alltoall_base(incoming, outgoing, lengths, [part * len(blocks)] * size).wait()
        mine = ours[0][rank]
        self._combine(list(itertools.chain(*nodes)), list(torch.split(incoming, part)), mine)
        group._allgather_base(blocks[0][: part * size], mine.clone()).wait()

    def _parts(self, vector: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Return the ranks' parts of a vector, of equal length: padding follows its last number."""
        part = -(-self._count // size)
        return list(torch.split(vector[: part * size], part))

    def _receive_parts(self, counts: list[int], size: int) -> list[list[torch.Tensor]]:
        """Return, for each rank, its count of parts to receive into."""
        part = -(-self._count // size)
        if self._scratch.numel() < part * sum(counts):
            self._scratch = self._scratch.new_empty(part * sum(counts))
        parts = iter(torch.split(self._scratch, part))
        return [list(itertools.islice(parts, count)) for count in counts]
