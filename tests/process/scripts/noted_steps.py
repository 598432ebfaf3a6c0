"""Training of exact numbers that notes each step before it is made and once it is committed.

Weights and momentum are sums of integers, so they depend neither on the order of a sum nor on the
number of workers: `undisturbed` has the samples and the weights of each step. Each process appends
to a file of its own in FOLDER/notes, and saves to FOLDER/disk. All stop after the step in which
rank 0 finds FOLDER/enough.

    noted_steps.py in-place|restarts FOLDER STEP_S
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SAMPLES, BATCH, SIZE = 240, 12, 8
STEPS_MAX = 100_000
SAVE_EVERY = {"in-place": 20, "restarts": 5}


def gradient(step: int, sample: int) -> list[int]:
    """What one sample adds at a step, and nothing else would."""
    return [(step * 7919 + sample * 104729 + place * 1299709) % 65537 for place in range(SIZE)]


def digest(weights: list[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{SIZE}d", *weights)).hexdigest()[:16]


def sampler():
    """Return the order of the samples, which deals a step the same ones in every world."""
    import elastane

    return elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)


def undisturbed(steps: int) -> tuple[str, list[tuple[list[int], str]]]:
    """Return the first digest, and of each step its samples and the digest after it."""
    batches = sampler().bind(0, 1)
    weights, momentum = [0] * SIZE, [0] * SIZE
    first, made = digest(weights), []
    while len(made) < steps:
        for samples in batches:
            grads = [gradient(len(made), sample) for sample in samples]
            sums = [sum(column) for column in zip(*grads, strict=True)]
            momentum = [m + g for m, g in zip(momentum, sums, strict=True)]
            weights = [w - m for w, m in zip(weights, momentum, strict=True)]
            made.append((sorted(samples), digest(weights)))
            batches.commit()
    return first, made[:steps]


class Training:
    """The state of a worker, and its file of notes."""

    def __init__(self, folder: Path, step_s: float) -> None:
        import torch
        import uncompiled  # noqa: F401 - before the optimizer is made

        self.folder, self.step_s = folder, step_s
        self.net = torch.nn.Linear(SIZE, 1, bias=False).to(torch.float64)
        torch.nn.init.zeros_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=1.0)
        self.batches = sampler()
        # A host that lost its power has the same process numbers again.
        name = f"{os.environ['ELASTANE_NODE']}.{os.getpid()}.{time.monotonic_ns()}.jsonl"
        self.log = (folder / "notes" / name).open("x", buffering=1)

    def note(self, what: str, step: int, **more: object) -> None:
        more |= {"digest": digest(self.net.weight.flatten().tolist()), "at_s": time.monotonic()}
        self.log.write(json.dumps({"what": what, "step": step, **more}) + "\n")

    def make(self, number: int, samples: list[int], place: dict, group=None) -> bool:
        """Make a step; returns whether rank 0 has found FOLDER/enough."""
        import torch
        import torch.distributed as dist

        self.note("body", number, samples=samples, **place)
        grads = [gradient(number, sample) for sample in samples]
        total = torch.tensor(grads, dtype=torch.float64).reshape(-1, SIZE).sum(dim=0)
        enough = place["rank"] == 0 and (self.folder / "enough").exists()
        total = torch.cat([total, torch.tensor([float(enough)], dtype=torch.float64)])
        time.sleep(self.step_s / 2)
        dist.all_reduce(total, group=group)
        self.net.weight.grad = total[:SIZE].reshape(1, SIZE)
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.step_s / 2)
        return bool(total[SIZE])


def in_place(training: Training) -> None:
    import torch

    import elastane

    with elastane.init() as job:
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=training.batches)
        job.track(net=training.net, optimizer=training.optimizer)
        checkpointer = elastane.Checkpointer(
            training.folder / "disk" / "checkpoints", every_steps=SAVE_EVERY["in-place"], keep=2
        )
        checkpointer.restore(job)
        for step, samples in job.steps(loader, until_step=STEPS_MAX):
            with step:
                place = {"fence": [job.fence.round, job.fence.attempt]}
                place |= {"rank": job.rank, "size": job.world_size}
                mine = samples.tolist() if step.samples else []
                enough = training.make(step.number, mine, place, job.process_group)
            if step.committed:
                training.note("committed", step.number, **place)
                checkpointer.maybe_save(step)
                if enough:
                    break
        checkpointer.wait()
        checkpointer.close()


def restarts(training: Training) -> None:
    import torch.distributed as dist

    import elastane

    dist.init_process_group("gloo")
    place = {"fence": [int(os.environ[f"ELASTANE_{name}"]) for name in ("ROUND", "ATTEMPT")]}
    place |= {"rank": dist.get_rank(), "size": dist.get_world_size()}
    checkpointer = elastane.Checkpointer(
        training.folder / "disk" / "checkpoints", every_steps=SAVE_EVERY["restarts"], keep=2
    )
    state = {"net": training.net, "optimizer": training.optimizer, "data": training.batches}
    checkpointer.restore(state)
    for number, samples in dealt(training.batches.bind(dist.get_rank(), dist.get_world_size())):
        enough = training.make(number, samples, place)
        training.batches.commit()
        training.note("committed", number, **place)
        is_saved = checkpointer.maybe_save(number + 1)
        if enough:
            if not is_saved:
                checkpointer.save(number + 1)
            break
    checkpointer.wait()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def dealt(batches) -> Iterator[tuple[int, list[int]]]:
    """Yield number and samples of each step, epoch after epoch."""
    while True:
        for samples in batches:
            yield batches.next_step, samples


if __name__ == "__main__":
    train = {"in-place": in_place, "restarts": restarts}[sys.argv[1]]
    train(Training(Path(sys.argv[2]), float(sys.argv[3])))
