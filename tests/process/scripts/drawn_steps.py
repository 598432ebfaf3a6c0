"""Run the training program of a seed as a loop of `job.steps()`, and record each step.

Usage: drawn_steps.py FOLDER SEED [outside] [sharded]. Each process writes FOLDER/PID/N.begin before
each backward pass of its step N, and FOLDER/PID/N.pt after it has committed the step. With a
Checkpointer it writes N.saved after it has offered N steps to it, and N.restored if it has restored
N steps. Each death happens once: its file in FOLDER says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from drawn_program import (
    Pair,
    Sharding,
    Stepping,
    clamp,
    deaths_at,
    decay,
    die_once,
    model_of,
    optimizer_of,
    put_into,
    uses_other,
)
from drawn_training import (
    evaluate,
    extra,
    held,
    loader_of,
    own_part,
    record,
    state_of,
    wrapped,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastane

FOLDER, SEED = Path(sys.argv[1]), int(sys.argv[2])
OUTSIDE, SHARDED = (word in sys.argv[3:] for word in ("outside", "sharded"))
PROGRAM: Stepping
if SHARDED:
    PROGRAM = Sharding.of_nodes(SEED) if OUTSIDE else Sharding.drawn(SEED)
else:
    PROGRAM = Stepping.drawn(SEED)
    PROGRAM = replace(PROGRAM, deaths=(), all_die=0) if OUTSIDE else PROGRAM
OWN = FOLDER / str(os.getpid())


def passed(step: int, place: str) -> None:
    """Die here if the program says so."""
    local_rank = int(os.environ["LOCAL_RANK"])
    deaths_at(FOLDER, PROGRAM.deaths, local_rank, step, place)
    if PROGRAM.all_die and (step, place) == (PROGRAM.all_die, "reduced"):
        die_once(FOLDER, f"all.{local_rank}")


class Body:
    """The body of a step, which may run several times."""

    def __init__(self, job: elastane.Job) -> None:
        self.model = model_of(PROGRAM)
        average = model_of(PROGRAM)
        self._mesh = sharded(job, self.model, average) if SHARDED else None
        self._weights = weights_of(self.model)
        self._average = weights_of(average)
        self.optimizer = optimizer_of(PROGRAM, self.model)
        pair = isinstance(self.optimizer, Pair)
        self._parts = self.optimizer.parts if pair else [self.optimizer]
        self._schedules = [torch.optim.lr_scheduler.StepLR(part, 7, 0.9) for part in self._parts]
        self._trained: torch.nn.Module = self.model
        if self._mesh is None:
            self._trained = wrapped(PROGRAM, self.model, job.process_group)
        self.job, self._found = job, {}
        self.number = -1
        named = {f"optimizer{n}": each for n, each in enumerate(self._parts)}
        named |= {f"schedule{n}": each for n, each in enumerate(self._schedules)}
        if PROGRAM.average:
            named["average"] = average
        job.track(model=self.model, **named)

    def make(self, step: elastane.Step) -> None:
        """Make the step."""
        self.number = step.number
        before = self._state() | {"schedule": self._schedules[0].last_epoch}
        world = {
            "fence": (self.job.fence.round, self.job.fence.attempt),
            "world": self.job.world_size,
            "shard": self._mesh.get_local_rank("shard") if self._mesh is not None else 0,
        }
        self._found = {"before": before, "evaluations": [], **world}
        if PROGRAM.decays:
            decay(self._weights)
        if PROGRAM.closure:
            self.optimizer.step(lambda: self._gradients(step))
        else:
            self._gradients(step)
            self.optimizer.step()
        passed(step.number, "updated")
        if PROGRAM.clamps:
            clamp(self._weights)
        if PROGRAM.average == "inside":
            put_into(self._average, self._weights)
        for number, op in enumerate(("", *PROGRAM.extras)):
            if op:
                passed(step.number, "extra")
                extra(op)
                passed(step.number, "extra made")
            if number == (1 if PROGRAM.late and PROGRAM.extras else 0):
                for schedule in self._schedules:
                    schedule.step()

    def _state(self) -> dict[str, object]:
        average = [each.clone() for each in self._average]
        return state_of(self.model, self.optimizer) | {"average": average}

    def _gradients(self, step: elastane.Step) -> torch.Tensor:
        """Compute the gradient at the current weights; return the mean loss of all workers."""
        self.optimizer.zero_grad()
        evaluation = {"before": {"model": held(self.model.state_dict())}, "passes": []}
        self._found["evaluations"].append(evaluation)
        total = torch.zeros((), dtype=torch.float64)
        for micro, batch in enumerate(step.batches):
            is_last = micro == PROGRAM.micro - 1
            if isinstance(PROGRAM, Sharding) and PROGRAM.quiet:
                getattr(self.model, f"set_requires_{PROGRAM.quiet}")(is_last)
            quiet = PROGRAM.no_sync and not is_last
            with self._trained.no_sync() if quiet else contextlib.nullcontext():
                loss = self._backward(step, batch, is_last=is_last)
            total += loss.detach() * step.weight / dist.get_world_size()
        self._passed(step, "reduced")
        parameters = [*self.model.parameters()]
        grads = [None if p.grad is None else own_part(p.grad).clone() for p in parameters]
        if PROGRAM.clip:
            torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        if PROGRAM.optimizer == "LBFGS":  # It decides by the loss when to stop.
            dist.all_reduce(total)
        evaluation.update(grads=grads, loss=total)
        return total

    def _passed(self, step: elastane.Step, place: str) -> None:
        """Die here if the program says so, in one of the step's evaluations."""
        if len(self._found["evaluations"]) == 1 + step.number % PROGRAM.evaluations:
            passed(step.number, place)

    def _backward(
        self, step: elastane.Step, batch: tuple[torch.Tensor, ...], *, is_last: bool
    ) -> torch.Tensor:
        number, (samples, inputs, labels) = step.number, batch
        used = samples.tolist()
        passes = self._found["evaluations"][-1]["passes"]
        passes.append((used if step.weight else [], step.weight, used))
        record(OWN, f"{number}.begin", **self._found)
        time.sleep(PROGRAM.pause_s)
        self._passed(step, "forward")
        logits = self._trained(inputs, other=uses_other(PROGRAM, number))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        if is_last:
            loss.register_hook(lambda _: self._passed(step, "backward"))
        step.backward(loss)
        return loss

    @property
    def last_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps last."""
        return self._parts[-1]

    def write(self, step: elastane.Step) -> None:
        """Put a step that is committed into the average, and record it."""
        if PROGRAM.average == "behind":
            put_into(self._average, self._weights)
        more = {"epoch": step.epoch, "schedule": self._schedules[0].last_epoch, **self._found}
        record(OWN, f"{step.number}.pt", **more, **self._state())

    @property
    def fence(self) -> tuple[int, int]:
        """The world of the last step."""
        fence: tuple[int, int] = self._found["fence"]
        return fence

    def evaluated(self, number: int) -> float:
        """Return the mean loss over all samples, of which this worker has a part."""
        self.model.eval()
        passed(number, "evaluate")
        value = evaluate(PROGRAM, self.model)
        self.model.train()
        return value


def sharded(job: elastane.Job, *models: torch.nn.Module) -> DeviceMesh:
    """Shard models over the replicas of a job; return their mesh."""
    assert isinstance(PROGRAM, Sharding)
    mesh = job.device_mesh(shard=PROGRAM.shard)
    for model in models:
        for layer in model.children():
            if [*layer.parameters()]:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return mesh


def cut_off(program: Sharding, body: Body) -> None:
    """Let some workers not see the end of the agreement on an update, as a worker dies in it."""
    from elastane.worker.shard_healing import Agreement, Shards

    agree, mine = Shards.agree, int(os.environ["LOCAL_RANK"])

    def cut(self: Shards, optimizer: torch.optim.Optimizer | None) -> None:
        agree(self, optimizer)
        is_last = optimizer is body.last_optimizer and body.number == program.cut
        if not is_last or (FOLDER / "cut").exists():
            return
        if mine == program.cut_dies:
            waits = [FOLDER / f"waits.{each}" for each in program.cut_waits]
            if comes(lambda: all(each.exists() for each in waits)):
                die_once(FOLDER, "cut")
        if mine in program.cut_waits:
            (FOLDER / f"waits.{mine}").touch()
            self._agreement = Agreement.READY
            if comes(lambda: self._group.failed):
                self._group.check()
            self._agreement = Agreement.REACHED

    Shards.agree = cut


def comes(is_there: Callable[[], bool]) -> bool:
    """Wait until something is there; False if it does not come, since a worker has died before."""
    until = time.monotonic() + 10
    while not is_there() and time.monotonic() < until:
        time.sleep(0.001)
    return is_there()


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model that this worker holds, where they lie."""
    return [own_part(each).detach() for each in model.parameters()]


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model, whole if it is sharded; called by all workers together."""
    state = model.state_dict().items()
    return {n: each.full_tensor() if isinstance(each, DTensor) else each for n, each in state}


def checkpointer_of(job: elastane.Job) -> elastane.Checkpointer | None:
    """Return what saves the job, which goes on at its newest save; None if nothing does."""
    if not PROGRAM.saves:
        return None
    checkpointer = elastane.Checkpointer(FOLDER / "checkpoints", every_steps=PROGRAM.saves)
    restored = checkpointer.restore(job)
    if restored is not None:
        fence = (job.fence.round, job.fence.attempt)
        record(OWN, f"{restored.step}.restored", fence=fence, where=restored.where)
    return checkpointer


def main() -> None:
    """Train to the last epoch."""
    torch.set_num_threads(1)
    OWN.mkdir()
    with elastane.init(wait_for_place=PROGRAM.waits) as job:
        body = Body(job)
        if isinstance(PROGRAM, Sharding) and PROGRAM.cut:
            cut_off(PROGRAM, body)
        checkpointer = checkpointer_of(job)
        loader = loader_of(PROGRAM)
        ends = range(1, PROGRAM.epochs + 1) if PROGRAM.loops else [PROGRAM.epochs]
        for until in ends:
            more = {"accumulate": PROGRAM.micro, "verify_every": PROGRAM.verify}
            for step, _ in job.steps(loader, until_epoch=until, **more):
                with step:
                    body.make(step)
                if not step.committed:
                    continue
                body.write(step)
                if checkpointer is not None:
                    began = checkpointer.maybe_save(step)
                    record(OWN, f"{step.number + 1}.saved", fence=body.fence, began=began)
                if step.last_of_epoch:
                    value = job.retry(body.evaluated, step.number)
                    record(OWN, f"{step.number}.value", value=value)
        if checkpointer is not None:
            checkpointer.wait()
        final = job.retry(whole_weights, body.model)
        if job.rank == 0:
            torch.save(final, FOLDER / "final.pt")


main()
