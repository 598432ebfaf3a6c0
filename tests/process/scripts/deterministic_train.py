"""Training whose end depends on seed and shards alone, if deterministic=True keeps its word.

Dropout, noise from four kinds of random streams, BatchNorm, a schedule, clipping, GradScaler,
AdamW, DDP. With SLOW_WORKERS set, one in three processes is slow.
Each commit is a line in FOLDER/PID.jsonl. All stop after STEPS, or, where STEPS is 0,
after the step in which rank 0 finds FOLDER/enough.

    deterministic_train.py FOLDER STEPS STEP_S
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

SAMPLES, BATCH, SIZE, SHARDS = 524, 24, 6, 8


class Noisy(torch.utils.data.Dataset):
    """Samples with noise from the streams of Python, NumPy and torch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.sin(torch.arange(SIZE) * (index + 1)) + 0.01 * noise


class Net(torch.nn.Module):
    """With a parameter that only some shards use, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(SIZE, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2)
        )
        self.outer = torch.nn.Linear(16, SIZE)
        self.seldom = torch.nn.Parameter(torch.ones(SIZE))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.outer(torch.relu(self.inner(batch)))
        return found * self.seldom if batch[0, 0] > 0.9 else found


def digest(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all weights, buffers and optimizer state."""
    found = hashlib.sha256()
    states = optimizer.state_dict()["state"]
    tensors = [*net.state_dict().items()]
    tensors += [(f"{key}.{name}", t) for key in sorted(states) for name, t in states[key].items()]
    for name, tensor in tensors:
        found.update(name.encode() + tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def parts(job):
    """The objects of the training, tracked."""
    net = Net().to(job.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10_000)
    noise = torch.Generator(job.device)
    scaler = torch.amp.GradScaler(job.device.type, init_scale=1024.0)
    job.track(net=net, optimizer=optimizer, scheduler=scheduler, noise=noise, scaler=scaler)
    model = DDP(net, process_group=job.process_group, find_unused_parameters=True)
    import elastane

    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)
    loader = torch.utils.data.DataLoader(Noisy(), batch_sampler=batches)
    return net, model, optimizer, scheduler, noise, scaler, loader


def train(
    job,
    steps: int,
    enough=lambda: False,
    said=lambda step: None,
    accumulate=1,
    compute=lambda step: None,
):
    """Train; returns the number of steps and the digest, at each of `steps`.

    `compute` is called in each shard.
    """
    import torch.distributed as dist

    net, model, optimizer, scheduler, noise, scaler, loader = parts(job)
    for step, _ in job.steps(loader, until_step=steps or 10**9, accumulate=accumulate):
        with step:
            device = job.device
            last = torch.tensor(float(not steps and enough()), device=device)
            for clean in step.batches:
                compute(step)
                drawn = torch.rand(clean.shape, generator=noise, device=device)
                batch = clean.to(device) + 0.01 * drawn
                loss = (model(batch) - batch.flip(1)).square().mean()
                step.backward(scaler.scale(loss + 0.01 * torch.rand((), device=device)))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            dist.all_reduce(last, group=job.process_group)
        if step.committed:
            said(step)
            if last:
                break
    return job.committed, digest(net, optimizer)


def main() -> None:
    import elastane

    folder, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def said(step) -> None:
        place = {"rank": job.rank, "world": job.world_size, "round": job.fence.round}
        place["shards"] = shards.pop(step.number)
        line = {"what": "committed", "step": step.number, **place, "at_s": time.monotonic()}
        log.write(json.dumps(line) + "\n")
        time.sleep(step_s)

    backend = os.environ.get("GPU_BACKEND", "")
    shards: dict[int, int] = {}

    def compute(step) -> None:
        shards[step.number] = shards.get(step.number, 0) + 1
        if "SLOW_WORKERS" in os.environ:
            time.sleep(0.02 if os.getpid() % 3 == 0 else 0.005)

    with elastane.init(deterministic=True, shards=SHARDS, seed=7, backend=backend) as job:
        torch.set_num_threads(1)
        enough = lambda: job.rank == 0 and (folder / "enough").exists()  # noqa: E731
        found = train(job, steps, enough, said, compute=compute)
        told = dict(zip(("steps", "digest"), found, strict=True))
        (folder / f"{os.getpid()}.final").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
