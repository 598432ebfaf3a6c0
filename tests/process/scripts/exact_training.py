"""Training whose weights are exact: its result is one number, independent of faults.

Weights are integers, so the order of a sum does not matter, and the number of workers does not
either: each step sums over the same samples, divided among the workers. Rank 0 checkpoints,
and all stop after the step in which rank 0 finds FOLDER/enough.

    exact_training.py FOLDER STEP_S
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SAMPLES, SIZE, EVERY, MODULUS = 64, 16, 5, (1 << 31) - 1


def gradient(step: int, sample: int) -> list[int]:
    """Return the contribution of one sample at a step; it differs for each sample and step."""
    return [(step * 7919 + sample * 104729 + place * 1299709) % 65537 for place in range(SIZE)]


def update(weights: list[int], total: list[int]) -> list[int]:
    """Return the weights after a step whose gradients sum up to `total`."""
    return [(weight * 31 + grad) % MODULUS for weight, grad in zip(weights, total, strict=True)]


def undisturbed(steps: int) -> list[int]:
    """Return the final weights of training without a fault."""
    weights = [0] * SIZE
    for step in range(steps):
        parts = [gradient(step, sample) for sample in range(SAMPLES)]
        weights = update(weights, [sum(column) for column in zip(*parts, strict=True)])
    return weights


def load(path: Path) -> tuple[int, list[int]]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return 0, [0] * SIZE
    return found["step"], found["weights"]


def save(path: Path, step: int, weights: list[int]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"step": step, "weights": weights}))
    part.replace(path)


def main() -> None:
    import torch
    import torch.distributed as dist

    import elastane

    folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
    path = folder / "checkpoint.json"
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # What rank 0 reads, all begin with: another may still be writing.
    begin = torch.tensor([*load(path)[1], load(path)[0]], dtype=torch.int64)
    if rank == 0:
        step, weights = load(path)
        begin = torch.tensor([*weights, step], dtype=torch.int64)
    dist.broadcast(begin, 0)
    *weights, step = begin.tolist()
    enough = False
    while not enough:
        mine = [gradient(step, sample) for sample in range(rank, SAMPLES, world)]
        total = torch.tensor(mine, dtype=torch.int64).reshape(-1, SIZE).sum(dim=0)
        said = torch.tensor([int(rank == 0 and (folder / "enough").exists())])
        total = torch.cat([total, said])
        dist.all_reduce(total)
        *sums, enough = total.tolist()
        weights, step = update(weights, sums), step + 1
        if rank == 0 and step % EVERY == 0:
            save(path, step, weights)
        time.sleep(step_s)
        while elastane.should_checkpoint():
            if rank == 0:
                save(path, step, weights)
    if rank == 0:
        save(folder / "final.json", step, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
