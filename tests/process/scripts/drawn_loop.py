"""Run the training program of a seed, without elastane, and record each step.

Usage: drawn_loop.py FOLDER SEED [outside]. Each process writes FOLDER/ROUND.ATTEMPT.RANK/STEP.pt
after each step. Each death happens once: its file in FOLDER says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from drawn_program import (
    Program,
    batch_of,
    deaths_at,
    evaluation_set,
    from_outside,
    losses_of,
    model_of,
    optimizer_of,
    uses_other,
)
from torch.nn.parallel import DistributedDataParallel

FOLDER, PROGRAM = Path(sys.argv[1]), Program.drawn(int(sys.argv[2]))
if sys.argv[3:]:
    PROGRAM = from_outside(PROGRAM)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OWN = FOLDER / f"{os.environ['ELASTANE_ROUND']}.{os.environ['ELASTANE_ATTEMPT']}.{RANK}"


def passed(step: int, place: str) -> None:
    """Die here if the program says so."""
    deaths_at(FOLDER, PROGRAM.deaths, RANK, step, place)


def size() -> int:
    """Return the world size, as the script asks for it or keeps it."""
    return SIZE if PROGRAM.keeps_size else dist.get_world_size()


def _summed_beside(own: torch.Tensor) -> torch.Tensor:
    """Return a mean by two sums, of which the first is waited for last."""
    work = dist.all_reduce(own, async_op=True)
    other = torch.ones(1, dtype=torch.float64)
    dist.all_reduce(other)
    work.wait()
    return own / other


def _gathered(own: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(size())]
    dist.all_gather(parts, own)
    return torch.stack(parts).mean(0)


def _gathered_objects(own: torch.Tensor) -> torch.Tensor:
    parts = [0.0] * size()
    dist.all_gather_object(parts, own.item())
    return torch.tensor([sum(parts) / len(parts)])


def _in_place(own: torch.Tensor, call: Callable[..., object], *args: object) -> torch.Tensor:
    call(own, *args)
    return own


EXTRAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda own: _in_place(own, dist.all_reduce, dist.ReduceOp.AVG),
    "sum": lambda own: _in_place(own, dist.all_reduce) / size(),
    "max": lambda own: _in_place(own, dist.all_reduce, dist.ReduceOp.MAX),
    "count": lambda _: _in_place(torch.tensor([4]), dist.all_reduce) / size(),
    "broadcast": lambda own: _in_place(own, dist.broadcast, 0),
    "broadcast last": lambda own: _in_place(own, dist.broadcast, SIZE - 1),
    "async sum": _summed_beside,
    "gather": _gathered,
    "object": _gathered_objects,
    # Their results are not equal on all workers.
    "barrier": lambda _: _in_place(torch.zeros(1), lambda _: dist.barrier()),
    "reduce": lambda own: _in_place(own, dist.reduce, 0) * 0,
}


def extra(op: str, step: int) -> tuple[str, float]:
    """Make one more collective; return its name and what it gave."""
    own = torch.tensor([float(RANK + 1) + step], dtype=torch.float64)
    return op, EXTRAS[op](own).item()


def evaluate(model: torch.nn.Module) -> float:
    """Return the mean loss over the dataset, of which this worker has a part."""
    inputs, labels = evaluation_set(PROGRAM)
    mine = slice(dist.get_rank(), None, size())
    model.eval()
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(inputs[mine]), labels[mine], reduction="none"
        )
    model.train()
    if PROGRAM.evaluates == "pair":
        pair = torch.stack((losses.sum(), torch.tensor(float(len(losses)), dtype=torch.float64)))
        dist.all_reduce(pair)
        return (pair[0] / pair[1]).item()
    if PROGRAM.evaluates == "two":
        total, count = losses.sum(), torch.tensor(float(len(losses)))
        dist.all_reduce(total)
        dist.all_reduce(count)
        return (total / count).item()
    mean = losses.mean()
    dist.all_reduce(mean)
    return (mean / size()).item()


def save(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save on rank 0."""
    if dist.get_rank() == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, FOLDER / "checkpoint.new")
        os.replace(FOLDER / "checkpoint.new", FOLDER / "checkpoint.pt")
    if PROGRAM.save_barrier:
        dist.barrier()


def record(step: int, **what: object) -> None:
    """Write what this worker has after a step."""
    torch.save({"step": step, **what}, OWN / "new")
    os.replace(OWN / "new", OWN / f"{step}.pt")


def train(step: int, trained: torch.nn.Module, model: torch.nn.Module) -> list[tuple[float, int]]:
    """Make the passes of one step; return what each divided its loss by, and the size then."""
    divisors = []
    for micro in range(PROGRAM.micro):
        batch = batch_of(PROGRAM, RANK, step, micro)
        passed(step, "forward")
        last = micro == PROGRAM.micro - 1
        quiet = PROGRAM.no_sync and not last and PROGRAM.by == "ddp"
        with trained.no_sync() if quiet else contextlib.nullcontext():
            losses = losses_of(trained, batch, other=uses_other(PROGRAM, step))
            if last:
                losses.register_hook(lambda _: passed(step, "backward"))
            total, now = losses.sum(), size()
            if PROGRAM.norm:
                count = torch.tensor(len(losses))
                count = count.double() if PROGRAM.norm == "float" else count
                passed(step, "norm")
                dist.all_reduce(count)
                divisor = count.item() / now
            else:
                divisor = float(len(losses))
            divisors.append((divisor, now))
            (total / divisor / PROGRAM.micro).backward()
    if PROGRAM.by != "ddp":
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            if PROGRAM.by == "avg":
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size()
    return divisors


def main() -> None:
    """Train from the checkpoint to the last step."""
    torch.set_num_threads(1)
    OWN.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    model = model_of(PROGRAM)
    optimizer = optimizer_of(PROGRAM, model)
    trained: torch.nn.Module = model
    if PROGRAM.by == "ddp":
        more = {"bucket_cap_mb": 0.0006} if PROGRAM.small_buckets else {}
        trained = DistributedDataParallel(
            model,
            static_graph=PROGRAM.static,
            find_unused_parameters=PROGRAM.unused,
            gradient_as_bucket_view=PROGRAM.views,
            **more,
        )
    first = 0
    if (FOLDER / "checkpoint.pt").exists():
        state = torch.load(FOLDER / "checkpoint.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    record(first, model=model.state_dict(), optimizer=optimizer.state_dict(), size=SIZE)
    for step in range(first + 1, PROGRAM.steps + 1):
        time.sleep(PROGRAM.pause_s)
        optimizer.zero_grad()
        divisors = train(step, trained, model)
        passed(step, "reduced")
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if PROGRAM.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        passed(step, "updated")
        said = []
        for op in PROGRAM.extras:
            passed(step, "extra")
            said.append(extra(op, step))
            passed(step, "extra made")
        value = None
        if PROGRAM.evaluate_every and step % PROGRAM.evaluate_every == 0:
            passed(step, "evaluate")
            value = evaluate(model)
            passed(step, "evaluated")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        record(step, **state, grads=grads, divisors=divisors, said=said, value=value)
        if PROGRAM.save_every and step % PROGRAM.save_every == 0:
            passed(step, "save")
            save(step, model, optimizer)
            passed(step, "saved")
    if dist.get_rank() == 0:
        torch.save({"step": PROGRAM.steps, "model": model.state_dict()}, FOLDER / "final.pt")
    dist.destroy_process_group()


main()
