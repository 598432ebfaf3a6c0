"""Run the training program of a seed through an ElasticLoader, and record each step.

Usage: drawn_joining.py FOLDER SEED [outside]. Each process writes FOLDER/PID/N.begin before the
first backward pass of its step N, and FOLDER/PID/N.pt after the step. Each death happens once: its
file in FOLDER says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from drawn_program import Joining, deaths_at, model_of, optimizer_of, uses_other
from drawn_training import evaluate, extra, loader_of, record, state_of, wrapped

import elastane

FOLDER, PROGRAM = Path(sys.argv[1]), Joining.drawn(int(sys.argv[2]))
if sys.argv[3:]:
    PROGRAM = replace(PROGRAM, deaths=())
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
OWN = FOLDER / str(os.getpid())


def passed(step: int, place: str) -> None:
    """Die here if the program says so."""
    deaths_at(FOLDER, PROGRAM.deaths, LOCAL_RANK, step, place)


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


def work_between_epochs(
    epoch: int, step: int, loader: elastane.ElasticLoader, **named: torch.nn.Module
) -> None:
    """Evaluate, and save in some epochs."""
    model = named["model"]
    model.eval()
    passed(step, "evaluate")
    evaluate(PROGRAM, model)
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
        self.trained = wrapped(PROGRAM, self.model)
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
    batches = loader_of(PROGRAM)
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
            record(OWN, f"{step}.begin", passes=passes)
            time.sleep(PROGRAM.pause_s)
            training.add(loader, batch)
            if not loader.is_last:
                continue
            passed(step, "reduced")
            after = training.update()
            passed(step, "updated")
            record(OWN, f"{step}.pt", before=before, passes=passes, epoch=epoch, **after)
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
