"""Train a classifier of handwritten digits with DDP over gloo, at any number of workers.

An ordinary torchrun-style script: it reads the environment that a launcher sets, loads its
checkpoint, trains, and checkpoints. It works with any launcher:

    torchrun    --standalone --nproc-per-node 2 --max-restarts 3 digits.py --dir /tmp/digits
    elastane run --standalone --nproc-per-node 2 --max-restarts 3 digits.py --dir /tmp/digits

The step alone determines the position in the data: step s of an epoch is the same global batch for
every world size, and an unequal share of it is weighted. So neither the batch nor the learning rate
changes when the number of workers does. On SIGTERM the workers agree, in an all-reduce that they
perform anyway, on the step after which all stop, and rank 0 checkpoints that step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TRAIN_IMAGES = 1437  # four fifths of 1,797; the rest is held out
LEARNING_RATE = 4e-3
WARMUP_STEPS = 40


def main() -> None:
    """Train from the newest checkpoint to the last epoch, then test on the held-out digits."""
    options = options_parser().parse_args()
    stop_requested = listen_for_sigterm()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    folder = Path(options.dir)
    images, labels = load_digits(folder / "digits.npz")
    trainer = Trainer(options, images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    trainer.load(folder / "checkpoint.pt")
    progress = DigitsProgress(
        Path(options.progress or folder / "progress.jsonl"), trainer.total_steps
    )

    while trainer.step < trainer.total_steps:
        epoch = trainer.epoch
        loss, stop = trainer.train_step(stop_requested())
        held_out = {}
        if trainer.epoch > epoch and dist.get_rank() == 0:
            held_out = {"accuracy": trainer.accuracy(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])}
        progress.report(step=trainer.step, epoch=epoch, loss=loss, **held_out)
        if stop or trainer.step % options.checkpoint_every == 0:
            trainer.save(folder / "checkpoint.pt")
        if stop:
            dist.destroy_process_group()  # a group that is left open may abort at exit
            sys.exit(128 + signal.SIGTERM)
        time.sleep(options.step_delay)

    trainer.save(folder / "checkpoint.pt")
    if dist.get_rank() == 0:
        final = trainer.accuracy(images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])
        progress.report(step=trainer.step, epoch=trainer.epoch, final_accuracy=final)
        print(f"accuracy on {len(images) - TRAIN_IMAGES} held-out digits: {final:.2%}", flush=True)
    dist.destroy_process_group()


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Classify handwritten digits with DDP.")
    parser.add_argument("--dir", required=True, help="folder for data, checkpoint and progress")
    parser.add_argument("--progress", help="file for progress lines (DIR/progress.jsonl)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def listen_for_sigterm() -> Callable[[], bool]:
    """Return a function that tells whether this process received SIGTERM."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    return lambda: bool(seen)


def load_digits(cache: Path) -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8) in 0..1 and labels, in a fixed random order."""
    if not cache.exists():
        from sklearn.datasets import load_digits as load  # takes half a second, so only once

        digits = load()
        with temporary(cache) as path:
            np.savez(path, images=digits.images.astype("float32") / 16, labels=digits.target)
    with np.load(cache) as data:
        order = np.random.default_rng(0).permutation(len(data["labels"]))
        images = torch.from_numpy(data["images"][order]).unsqueeze(1)
        return images, torch.from_numpy(data["labels"][order])


class temporary:  # noqa: N801 - reads as the function it stands for
    """A path that replaces `target` atomically once its content is on disk."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.path.unlink(missing_ok=True)
            return
        sync(self.path)
        self.path.replace(self.target)
        sync(self.target.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Trainer:
    """Model, optimizer, schedule, and the position in the data."""

    def __init__(self, options: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.seed, self.global_batch = options.seed, options.global_batch
        self.steps_per_epoch = math.ceil(len(images) / options.global_batch)
        self.total_steps = options.epochs * self.steps_per_epoch
        self.step = 0
        self.model = DistributedDataParallel(build_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return int(self.step // self.steps_per_epoch)

    def learning_rate(self, step: int) -> float:
        """Return the factor of the learning rate: a warm-up, then half a cosine."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        return warmup * 0.5 * (1 + math.cos(math.pi * step / max(1, self.total_steps)))

    def my_share(self) -> Tensor:
        """Return the indices of this rank's part of the step's global batch."""
        shuffle = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
        order = torch.randperm(len(self.images), generator=shuffle)
        first = self.step % self.steps_per_epoch * self.global_batch
        batch = order[first : first + self.global_batch]
        self.batch_size = len(batch)
        return batch[dist.get_rank() :: dist.get_world_size()]

    def train_step(self, stop_requested: bool) -> tuple[float, bool]:
        """Perform one step; return the loss of the global batch, and whether all workers stop."""
        share = self.my_share()
        logits = self.model(self.images[share])
        # DDP averages over the ranks; this makes it the mean over the global batch.
        total = nn.functional.cross_entropy(logits, self.labels[share], reduction="sum")
        loss = total * dist.get_world_size() / self.batch_size
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        sums = torch.tensor([float(total.detach()), float(stop_requested)])
        dist.all_reduce(sums)
        return float(sums[0]) / self.batch_size, bool(sums[1] > 0)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the fraction of `images` that is classified as `labels` says."""
        self.model.module.eval()
        guesses = self.model.module(images).argmax(dim=1)
        self.model.module.train()
        return float((guesses == labels).float().mean())

    def save(self, path: Path) -> None:
        """Checkpoint from rank 0, atomically: a reader finds the old or the new one."""
        if dist.get_rank() != 0:
            return
        state = {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        with temporary(path) as new:
            torch.save(state, new)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint, if there is one."""
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def build_model() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


# A file with which `elastane demo` slows the training down, until a node that it started has come.
SLOW_DOWN, SLOW_STEP_S = "slow-down", 0.5


class DigitsProgress:
    """A file to which rank 0 appends a JSON line for each step."""

    def __init__(self, path: Path, total_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.about = {
            "total_steps": total_steps,
            "world_size": dist.get_world_size(),
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
        }

    def report(self, **values: float) -> None:
        """Append one line."""
        if dist.get_rank() == 0:
            line = json.dumps({"time": time.time(), **values, **self.about})
            with self.path.open("a") as file:
                file.write(line + "\n")
            if self.path.with_name(SLOW_DOWN).exists():
                time.sleep(SLOW_STEP_S)


if __name__ == "__main__":
    main()
