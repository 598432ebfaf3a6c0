"""The sum over virtual shards is that of one tree, whichever rank computes it."""

import random

import pytest
import torch

from elastane.comms.mean import Buffers, TreeSum, blocks_of, combine
from elastane.data.ledger import dealt_evenly


def _reference(vectors):
    """The tree by its definition: halves of a power of two, a missing half adds nothing."""
    size = 1
    while size < len(vectors):
        size *= 2
    if size == 1:
        return vectors[0]
    left, right = vectors[: size // 2], vectors[size // 2 :]
    return _reference(left) + _reference(right)


def _world(vectors, dealt):
    shards = len(vectors)
    nodes, values = [], []
    for held in dealt:
        buffers = Buffers(vectors[0].numel(), torch.float32, torch.device("cpu"))
        total = TreeSum(held, shards, buffers)
        for shard in held:
            total.add(lambda into, adds, v=vectors[shard]: into.add_(v) if adds else into.copy_(v))
        blocks = total.blocks()
        assert len(blocks) == len(blocks_of(held, shards))
        assert buffers.made <= max(2, 2 * len(held).bit_length() - 1), "2 log2 of the shards"
        nodes += blocks_of(held, shards)
        values += blocks
    return combine(nodes, values, shards)


@pytest.mark.parametrize("shards", range(1, 33))
def test_every_world_has_the_same_sum_bit_for_bit(shards):
    generator = torch.Generator().manual_seed(shards)
    # Of very different sizes, so that another order gives other bits.
    vectors = [
        torch.randn(50, generator=generator) * 10 ** (3 * torch.randn(50, generator=generator))
        for _ in range(shards)
    ]
    expected = _reference(vectors)
    for world_size in range(1, min(shards, 16) + 1):
        dealt = dealt_evenly(shards, world_size)
        assert torch.equal(_world(vectors, dealt), expected), world_size


@pytest.mark.parametrize("seed", range(30))
def test_any_deal_has_the_same_sum_bit_for_bit(seed):
    drawn = random.Random(seed)
    shards = drawn.randrange(2, 40)
    vectors = [
        torch.randn(50, generator=torch.Generator().manual_seed(shard)) * 10 ** (shard % 7)
        for shard in range(shards)
    ]
    cuts = sorted(drawn.sample(range(1, shards), drawn.randrange(1, min(shards, 9))))
    dealt = list(map(range, [0, *cuts], [*cuts, shards]))
    assert torch.equal(_world(vectors, dealt), _reference(vectors)), dealt


def test_another_order_of_the_sum_gives_other_bits():
    """The test above can fail, since a plain loop gives other bits."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(500, generator=generator) for _ in range(8)]
    assert not torch.equal(sum(vectors[1:], vectors[0]), _reference(vectors))


@pytest.mark.parametrize("shards", [1, 5, 8, 12, 31, 32])
def test_shards_are_dealt_once_and_evenly(shards):
    for world_size in range(1, shards + 1):
        held = dealt_evenly(shards, world_size)
        assert [shard for each in held for shard in each] == list(range(shards))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_world_with_power_of_two_shards_per_rank_has_one_block_per_rank():
    for shards, world_size in [(8, 1), (8, 2), (8, 4), (8, 8), (32, 4), (12, 3)]:
        for rank in range(world_size):
            assert len(blocks_of(dealt_evenly(shards, world_size)[rank], shards)) == 1
