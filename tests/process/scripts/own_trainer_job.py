"""A user's script of examples/own_trainer.py. Usage: own_trainer_job.py FOLDER.

It ends at the first epoch's end after a file "enough" is there. It writes what it has after each
step, as joining_ddp.py does.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from joining_data import BATCH, Numbers, digest
from own_trainer import Callback, Trainer

FOLDER = Path(sys.argv[1])


class Sums(torch.nn.Module):
    """Learns the sum of a sample."""

    def __init__(self):
        super().__init__()
        inner = torch.nn.LayerNorm(32), torch.nn.ReLU()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), *inner, torch.nn.Linear(32, 1))
        self.note = None

    def loss(self, batch):
        indices, inputs = batch
        if torch.is_grad_enabled():
            self.note(indices.tolist())
        return (self.layers(inputs).squeeze(-1) - inputs.sum(1)).square().mean()


class Says(Callback):
    """Writes after each step what the worker has; keeps the number of epochs."""

    def __init__(self, module, file):
        self.module, self.file, self.epochs = module, file, 0

    def step_begins(self, trainer, indices):
        """Write what the worker was dealt; a stand-in has no samples of the step."""
        dealt = indices if trainer.loader.samples else []
        self._say(trainer, optimizer_steps=trainer.steps + 1, dealt=dealt)

    def step_ended(self, trainer, loss):
        assert (trainer.rank, trainer.world_size) == (dist.get_rank(), dist.get_world_size())
        what = f"{digest(self.module, trainer.optimizer)} {self.epochs}"
        self._say(trainer, optimizer_steps=trainer.steps, digest=what, rank=trainer.rank)
        time.sleep(0.01)

    def _say(self, trainer, **what):
        world = trainer.world_size
        what |= {"step": trainer.loader.step, "epoch": trainer.loader.epoch, "of": world}
        self.file.write(json.dumps({**what, "world": world, "contributed": world}) + "\n")
        self.file.flush()

    def epoch_ended(self, trainer, loss):
        self.epochs += 1
        there = torch.tensor([int((FOLDER / "enough").exists())])
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        if there.item():
            raise Enough

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Enough(Exception):
    """The job is over."""


def main():
    """Train until it is enough."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # DDP gives the first ones the same parameters.
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:
        module = Sums()
        says = Says(module, file)
        trainer = Trainer(
            module, Numbers(), batch=BATCH, evaluation=Numbers(), callbacks=[says], folder=FOLDER
        )
        module.note = lambda indices: says.step_begins(trainer, indices)
        (FOLDER / f"{os.getpid()}.ready").touch()
        with contextlib.suppress(Enough):
            trainer.fit(10_000)
    dist.destroy_process_group()


main()
