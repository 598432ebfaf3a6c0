"""One of two ranks that gather within `VisibleWorld.whole`, and by torch itself, and compare.

Usage: whole_gathers.py RANK FOLDER. It prints "equal" at its end.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from elastane.synchrony.visible import VisibleWorld

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


def tensors():
    """Return tensors of many kinds, of other values on each rank."""
    draw = torch.Generator().manual_seed(RANK)
    return [
        torch.tensor(1.5 + RANK),
        torch.tensor([RANK == 0, RANK == 1]),
        torch.randn(3, 5, dtype=torch.complex128, generator=draw),
        torch.randn(7, generator=draw).to(torch.bfloat16),
        torch.arange(5, dtype=torch.int8) - 9 * RANK,
        torch.randn(4, 3, generator=draw).t(),
        torch.tensor([float("inf"), -0.0, RANK]),
    ]


def gathered(tensor):
    """Return what torch gathers."""
    places = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(places, tensor)
    return places


def main():
    """Compare."""
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    world, torchs = VisibleWorld(sys.exit), dist.all_gather
    for tensor in tensors():
        sums = world.whole(lambda t=tensor: gathered(t))
        for ours, plain in zip(sums, gathered(tensor), strict=True):
            assert torch.equal(ours, plain) and ours.dtype == plain.dtype, (ours, plain)
    objects = [None, None]
    world.whole(lambda: dist.all_gather_object(objects, {"rank": RANK, "text": "a" * 99 * RANK}))
    assert objects == [{"rank": 0, "text": ""}, {"rank": 1, "text": "a" * 99}], objects
    assert dist.all_gather is torchs
    dist.destroy_process_group()
    print("equal")


main()
