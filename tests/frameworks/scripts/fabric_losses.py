"""An ordinary Fabric script in which workers kill themselves at places that are named here.

Usage: fabric_losses.py FOLDER asks|keeps|counts|first, with four workers. "asks" loses three of
them and asks Fabric for rank and size each time; "keeps" loses one and keeps its size; "counts"
loses one, at its first start, in a sum of counts before which it asks for the size; "first" loses
the one that goes first. The last worker, or the one of rank 0, writes what it has to said.json.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins.io import TorchCheckpointIO

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])
SAMPLES = 24


def die(rank):
    """End the worker that has begun with this rank."""
    if rank == FIRST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in(name, rank, calls=1):
    """End the worker that has begun with this rank in a call of torch.distributed.NAME."""
    function, left = getattr(torch.distributed, name), [calls]

    def called(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            die(rank)
        return function(*args, **kwargs)

    setattr(torch.distributed, name, called)


class Job:
    """The model, its data, and what this worker writes."""

    def __init__(self):
        torch.manual_seed(1)
        logger = CSVLogger(FOLDER, "log", version=0, flush_logs_every_n_steps=1)
        self.fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp", loggers=logger)
        self.fabric.launch()
        net = torch.nn.Linear(1, 1)
        self.net, self.optimizer = self.fabric.setup(
            net, torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
        )
        dataset = torch.arange(float(SAMPLES)).unsqueeze(1)
        data = torch.utils.data.DataLoader(dataset, batch_size=2)
        self.data = self.fabric.setup_dataloaders(data)
        self.said = {}

    def train(self, step):
        """Make one step, and log it."""
        self.fabric.backward(self.net(torch.full((4, 1), float(step))).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.fabric.log("loss", float(step), step)
        state = torch.cat([each.detach().reshape(-1) for each in self.net.parameters()])
        with (FOLDER / f"{FIRST_RANK}.digests").open("a") as file:
            file.write(f"{step} {hashlib.sha1(state.numpy().tobytes()).hexdigest()}\n")

    def seen(self):
        """Return how many samples the workers have together in one pass, by fabric.all_reduce."""
        count = sum(len(batch) for batch in self.data)
        return int(self.fabric.all_reduce(torch.tensor(count), reduce_op="sum"))


def ask(job):
    """Lose worker 1 in a mean, 3 in a gather, and 0 in a save."""
    fabric, said = job.fabric, job.said
    job.train(1)
    die_in("all_reduce", 1, calls=2)
    parts = {"rank": torch.tensor(float(FIRST_RANK)), "one": torch.tensor(1.0)}
    means = fabric.all_reduce(parts)
    said["mean"] = {name: float(value) for name, value in means.items()}
    said["in place"] = float(parts["rank"])
    said["size"] = fabric.world_size
    with torch.no_grad():
        said["evaluated"] = job.seen()
    said["trained"] = job.seen()
    job.train(2)
    die_in("all_reduce", 3)
    rank = torch.tensor([FIRST_RANK + 1.0], requires_grad=True)
    gathered = fabric.all_gather(rank, sync_grads=True)
    said["gathered"] = gathered.flatten().tolist()
    (gathered[fabric.global_rank] ** 2).backward()
    said["gradient"] = rank.grad.item()
    job.train(3)
    save = TorchCheckpointIO.save_checkpoint

    def save_half(self, checkpoint, path, *args, **kwargs):
        if FIRST_RANK == 0:
            Path(path).write_text("half")
            die(0)
        save(self, checkpoint, path, *args, **kwargs)

    TorchCheckpointIO.save_checkpoint = save_half
    fabric.save(FOLDER / "net.ckpt", {"net": job.net, "step": 3})
    said["step"] = fabric.load(FOLDER / "net.ckpt", {"net": job.net})["step"]
    job.train(4)
    fabric.print(f"printed by {FIRST_RANK}")


def keep(job):
    """Lose worker 1 in a mean of floats, which is divided by the size of the beginning."""
    size, said = job.fabric.world_size, job.said
    metric = torchmetrics.MeanMetric()
    job.train(1)
    die_in("all_reduce", 1)
    total = torch.tensor(float(FIRST_RANK + 1))
    torch.distributed.all_reduce(total)
    said["mean"] = float(total / size)
    said["fabric"] = float(job.fabric.all_reduce(torch.tensor(float(FIRST_RANK + 1))))
    metric.update(float(FIRST_RANK + 1))
    said["metric"] = float(metric.compute())
    said["size"] = job.fabric.world_size
    said["count"] = int(job.fabric.all_reduce(torch.tensor(2), reduce_op="sum"))
    job.train(2)


def count(job):
    """Lose worker 1 in a sum of counts by which the loss is divided, times the size before."""
    job.train(1)
    lost = FOLDER / "lost"
    if FIRST_RANK == 1 and not lost.exists():
        lost.touch()
        die_in("all_reduce", 1)
    size = job.fabric.world_size
    total = job.fabric.all_reduce(torch.tensor(2), reduce_op="sum")
    weight = job.net.weight.detach().clone()
    job.fabric.backward(job.net(torch.ones(2, 1)).sum() * size / total)
    job.optimizer.step()
    job.said["gradient"] = float(weight - job.net.weight) / 1e-3


def go_first(job):
    """Lose worker 0 in the block in which it is first."""
    job.train(1)
    place = FOLDER / "place"
    seen = FOLDER / "seen"
    with job.fabric.rank_zero_first():
        # Whether another worker is in the block, and whether one has completed it.
        with seen.open("a") as file:
            file.write(f"{FIRST_RANK} {place.exists()} {(FOLDER / 'done').exists()}\n")
        if not (FOLDER / "done").exists():
            place.touch()
            die(0)
            time.sleep(0.5)  # the time in which others could come
            place.unlink()
            (FOLDER / "done").touch()
    job.train(2)
    job.said["seen"] = [line.split() for line in seen.read_text().splitlines()]


def main():
    """Run the requested mode."""
    torch.set_num_threads(1)
    job = Job()
    {"asks": ask, "keeps": keep, "counts": count, "first": go_first}[sys.argv[2]](job)
    if job.fabric.is_global_zero:
        (FOLDER / "said.json").write_text(json.dumps(job.said))
        job.fabric.logger.finalize("success")


main()
