"""Run the training program of a seed through an ElasticLoader, and record each step.

Usage: drawn_joining.py FOLDER SEED [outside]. Each process writes FOLDER/PID/N.begin before the
first backward pass of its step N, and FOLDER/PID/N.pt after the step. Each death happens once: its
file in FOLDER says so.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from drawn_program import (
    Joining,
    deaths_at,
    evaluation_set,
    model_of,
    optimizer_of,
    training_set,
    uses_other,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastane

FOLDER, PROGRAM = Path(sys.argv[1]), Joining.drawn(int(sys.argv[2]))
if sys.argv[3:]:
    PROGRAM = replace(PROGRAM, deaths=())
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
OWN = FOLDER / str(os.getpid())


def passed(step: int, place: str) -> None:
    """Die here if the program says so."""
    deaths_at(FOLDER, PROGRAM.deaths, LOCAL_RANK, step, place)


def record(name: str, **what: object) -> None:
    """Write a record whole."""
    torch.save(what, OWN / "new")
    os.replace(OWN / "new", OWN / name)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return a copy of the state of both."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return copy.deepcopy(state)


def extra(op: str) -> None:
    """Make one more collective in the loop."""
    own = torch.ones(1, dtype=torch.float64)
    if op == "barrier":
        dist.barrier()
    elif op == "gather":
        dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)
    else:
        dist.all_reduce(own, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])


def evaluate(model: torch.nn.Module) -> float:
    """Return the mean loss over the dataset, of which this worker has a part."""
    inputs, labels = evaluation_set(PROGRAM)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(inputs[mine]), labels[mine], reduction="none"
        )
    total = torch.stack((losses.sum(), torch.tensor(float(len(losses)), dtype=torch.float64)))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save(loader: elastane.ElasticLoader, **named: object) -> None:
    """Save on rank 0."""
    if dist.get_rank() == 0:
        state = {name: each.state_dict() for name, each in named.items()}
        torch.save({**state, "loader": loader.state_dict()}, FOLDER / "checkpoint.new")
        os.replace(FOLDER / "checkpoint.new", FOLDER / "checkpoint.pt")


def resume(loader: elastane.ElasticLoader, **named: object) -> None:
    """Load the checkpoint, if there is one."""
    if (FOLDER / "checkpoint.pt").exists():
        state = torch.load(FOLDER / "checkpoint.pt")
        for name, each in {**named, "loader": loader}.items():
            each.load_state_dict(state[name])


def wrapped(model: torch.nn.Module) -> DistributedDataParallel:
    """Return the model as it trains."""
    more = {"bucket_cap_mb": 0.0006} if PROGRAM.small_buckets else {}
    return DistributedDataParallel(
        model,
        static_graph=PROGRAM.static,
        find_unused_parameters=PROGRAM.unused,
        gradient_as_bucket_view=PROGRAM.views,
        **more,
    )


def work_between_epochs(
    epoch: int, step: int, loader: elastane.ElasticLoader, **named: torch.nn.Module
) -> None:
    """Evaluate, and save in some epochs."""
    model = named["model"]
    model.eval()
    passed(step, "evaluate")
    evaluate(model)
    model.train()
    if PROGRAM.save_every and epoch % PROGRAM.save_every == 0:
        passed(step, "save")
        save(loader, **named)
        passed(step, "saved")


class Training:
    """The model and what changes it."""

    def __init__(self) -> None:
        self.model = model_of(PROGRAM)
        self.optimizer = optimizer_of(PROGRAM, self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.trained = wrapped(self.model)
        self.named = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    @property
    def step(self) -> int:
        """How many steps of the optimizer were made."""
        return self.schedule.last_epoch

    def add(self, loader: elastane.ElasticLoader, batch: tuple[torch.Tensor, ...]) -> None:
        """Add the gradients of one batch."""
        step, (_, inputs, labels) = self.step, batch
        passed(step, "forward")
        quiet = PROGRAM.no_sync and not loader.is_last
        with self.trained.no_sync() if quiet else contextlib.nullcontext():
            logits = self.trained(inputs, other=uses_other(PROGRAM, step))
            loss = torch.nn.functional.cross_entropy(logits, labels)
            if loader.is_last:
                loss.register_hook(lambda _: passed(step, "backward"))
            loader.backward(loss)

    def update(self) -> dict[str, object]:
        """Make a step; return its gradients and the state after it."""
        parameters = [*self.model.parameters()]
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        if PROGRAM.clip:
            torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        self.optimizer.step()
        self.schedule.step()
        return {"grads": grads, **state_of(self.model, self.optimizer)}


def main() -> None:
    """Train to the last epoch."""
    torch.set_num_threads(1)
    OWN.mkdir()
    dist.init_process_group("gloo")
    training = Training()
    data = TensorDataset(*training_set(PROGRAM))
    sampler = elastane.ElasticBatchSampler(len(data), PROGRAM.batch, seed=PROGRAM.seed)
    batches = DataLoader(data, batch_sampler=sampler)
    loader = elastane.ElasticLoader(batches, accumulate=PROGRAM.micro, **training.named)
    resume(loader, **training.named)
    passes: list[tuple[list[int], float, list[int]]] = []
    before: dict[str, object] = {}
    for epoch in loader.epochs(PROGRAM.epochs):
        for batch in loader:
            step = training.step
            if not passes:
                training.optimizer.zero_grad()
                before = state_of(training.model, training.optimizer)
            own = batch[0].tolist()
            passes.append((own if loader.samples else [], loader.weight, own))
            record(f"{step}.begin", passes=passes)
            time.sleep(PROGRAM.pause_s)
            training.add(loader, batch)
            if not loader.is_last:
                continue
            passed(step, "reduced")
            after = training.update()
            passed(step, "updated")
            record(f"{step}.pt", before=before, passes=passes, epoch=epoch, **after)
            passes = []
            for op in PROGRAM.extras:
                passed(step, "extra")
                extra(op)
                passed(step, "extra made")
        work_between_epochs(epoch, training.step - 1, loader, **training.named)
    if dist.get_rank() == 0:
        torch.save(training.model.state_dict(), FOLDER / "final.pt")
    dist.destroy_process_group()


main()
