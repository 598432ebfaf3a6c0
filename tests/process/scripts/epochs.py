"""Training by epochs, as a script for ImageNet does: BatchNorm, StepLR, validation, checkpoints.

    epochs.py FOLDER EPOCHS STEP_S [behind|between|unguarded]

Validation all-reduces its metrics. It stands after the last step of each epoch, or between loops
of one epoch each; or after the step, but without job.retry(). Each committed step and each value
is a line in FOLDER/PID.jsonl. A worker that finds FOLDER/die in a validation takes it and is
killed. While FOLDER/stay exists, no worker leaves the last epoch. At the end each worker leaves
FOLDER/PID.final: its weights and the values of all validations that it has seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastane

CLASSES, SIZE, TRAINED, HELD_OUT, BATCH, CHUNKS = 4, 8, 192, 96, 24, 4
torch.set_num_threads(1)


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return small images, each brighter in the quarter that is its class."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    found = torch.randn(count, 1, SIZE, SIZE, generator=random)
    for image, label in zip(found, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1.0
    return found, labels


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))


def validate(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], folder: Path) -> float:
    """Return the accuracy over all workers' parts of the held-out images."""
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for chunk in torch.arange(len(data[1])).chunk(CHUNKS):
            part = chunk[dist.get_rank() :: dist.get_world_size()]
            hits = (model(data[0][part]).argmax(1) == data[1][part]).sum()
            counted = torch.tensor([float(hits), float(len(part))])
            with contextlib.suppress(FileNotFoundError):
                (folder / "die").rename(folder / f"died-{os.getpid()}")
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(counted)
            total += counted
    model.train()
    assert total[1] == HELD_OUT, total  # each image once, whatever the world was meanwhile
    return float(total[0] / total[1])


def guarded(job: elastane.Job, function, *args: object) -> float:
    """Call a function in the way that the arguments name."""
    if sys.argv[4:] == ["unguarded"]:
        return function(*args)
    return job.retry(function, *args)


def stay(folder: Path, pause_s: float, *, is_last: bool) -> None:
    """Wait in the last epoch while FOLDER/stay exists."""
    while is_last and (folder / "stay").exists():
        time.sleep(pause_s)


def main() -> None:
    folder, epochs, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    between = sys.argv[4:] == ["between"]
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    train, held_out = images(TRAINED, 1), images(HELD_OUT, 2)
    values: list[float] = []

    def say(what: str, **more: object) -> None:
        place = {"what": what, "rank": job.rank, "world": job.world_size}
        log.write(json.dumps({**place, **more, "at_s": time.monotonic()}) + "\n")

    def evaluate(epoch: int, saver: elastane.Checkpointer) -> None:
        values.append(guarded(job, validate, model, held_out, folder))
        say("value", epoch=epoch, value=values[-1])
        if not between:
            saver.save(job.committed)

    with elastane.init(backend=os.environ.get("GPU_BACKEND", "")) as job:
        net = network().to(job.device)
        model = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        batches = elastane.ElasticBatchSampler(TRAINED, BATCH, seed=0)
        loader = torch.utils.data.DataLoader(range(TRAINED), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer, scheduler=scheduler)
        saver = elastane.Checkpointer(folder / "checkpoints", every_steps=10**9)
        restored = saver.restore(job)
        say("begins", step=restored.step if restored else 0)
        for epoch in range(0 if between else epochs - 1, epochs):
            for step, samples in job.steps(loader, until_epoch=epoch + 1):
                with step:
                    step.backward(
                        nn.functional.cross_entropy(model(train[0][samples]), train[1][samples])
                    )
                    optimizer.step()
                    optimizer.zero_grad()
                    if step.last_of_epoch:
                        scheduler.step()
                time.sleep(step_s)
                stay(folder, step_s, is_last=step.epoch == epochs - 1)
                if step.committed:
                    say("committed", step=step.number, lr=scheduler.get_last_lr()[0])
                    if step.last_of_epoch and not between:
                        evaluate(step.epoch, saver)
            if between:
                evaluate(epoch, saver)
        saver.wait()
        saver.close()
        found = {"values": values, "lr": scheduler.get_last_lr()[0], "steps": job.committed}
        found["weights"] = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
        (folder / f"{os.getpid()}.final").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
