"""Training with AdamW whose result is exact despite faults; it records received states.

Gradients are sums of integers. The optimizer is tracked before the model, whose layers are alike,
and a part of the model is frozen. What each taker of state got is a line in FOLDER/PID.jsonl, and
so is each step. A process that finds FOLDER/WHAT.once takes that file and does it: `kill-giver`,
`kill-taker`, `stop-giver` in the middle of a handover, `PID.flip` one bit of a weight.

    healed.py FOLDER memory|group VERIFY_EVERY
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import uncompiled  # noqa: F401 - before the optimizer is made

SAMPLES, BATCH, SIDE, STEP_S = 1009, 8, 8, 0.03
COUNT = 2 * SIDE * SIDE


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(512, 512).requires_grad_(False)
        self.a, self.b = (torch.nn.Linear(SIDE, SIDE, bias=False).double() for _ in "ab")


def made() -> tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW([net.a.weight, net.b.weight], lr=0.1)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def gradient(step: int, samples: list[int]) -> torch.Tensor:
    """Return the contribution of these samples at a step; it differs for others."""
    places = torch.arange(COUNT) * 1299709 + step * 7919
    rows = torch.tensor(samples, dtype=torch.int64).reshape(-1, 1) * 104729
    return ((rows + places) % 65537 - 32768).sum(dim=0).double()


def update(net: Net, optimizer: torch.optim.Optimizer, schedule: object, grad: torch.Tensor):
    net.a.weight.grad, net.b.weight.grad = grad[:COUNT].reshape(2, SIDE, SIDE).clone().unbind()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def digest(net: Net, optimizer: torch.optim.Optimizer, schedule: object) -> str:
    from elastane.comms.digest import state_digest

    parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    return state_digest({**parts, "schedule": schedule.state_dict()})


def undisturbed(steps: int) -> str:
    """Return the state after training without a fault."""
    import elastane

    parts = made()
    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3).bind(0, 1)
    while batches.next_step < steps:
        for samples in batches:
            if batches.next_step < steps:
                update(*parts, gradient(batches.next_step, list(samples)))
                batches.commit()
    return digest(*parts)


def watch(folder: Path, say) -> None:
    """Record handovers of state, and show the fault of a file in the middle of one."""
    from elastane.comms import transfer
    from elastane.worker import comparison, healing

    fold, plain = transfer.fold, healing.transfer.take
    now = {"taking": False}

    def folding(data):
        role = "taker" if now["taking"] else "giver"
        for how, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            told = folder / f"{how}-{role}.once"
            try:
                told.unlink()
            except FileNotFoundError:
                continue
            say(f"{how}-{role}", 0)
            os.kill(os.getpid(), number)
        return fold(data)

    def taking(channels, *args, **more):
        now["taking"] = True
        try:
            found = plain(channels, *args, **more)
        finally:
            now["taking"] = False
        say("taken", found.bytes_sent, by=type(channels[0]).__name__, givers=len(channels))
        return found

    transfer.fold, transfer.take = folding, taking
    assert healing.transfer is transfer and comparison.take is healing.take


def flip(folder: Path, net: Net) -> None:
    told = folder / f"{os.getpid()}.flip"
    if told.exists():
        told.unlink()
        net.b.weight.data.view(torch.int64)[3, 4] ^= 1 << 17


def main() -> None:
    import torch.distributed as dist

    import elastane
    from elastane.comms import near

    folder, how, verify_every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if how == "group":
        near.machine = lambda: 0
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def say(what: str, step: int, **more: object) -> None:
        place = {"rank": job.rank, "world": job.world_size, "at_s": time.monotonic()}
        log.write(json.dumps({"what": what, "step": step, **place, **more}) + "\n")

    watch(folder, say)
    with elastane.init(backend=os.environ.get("GPU_BACKEND", "")) as job:
        net, optimizer, schedule = made()
        net.to(job.device)
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(optimizer=optimizer, schedule=schedule, net=net)
        for step, samples in job.steps(loader, until_step=10**6, verify_every=verify_every):
            with step:
                mine = gradient(step.number, samples.tolist() if step.samples else [])
                enough = job.rank == 0 and (folder / "enough").exists()
                total = torch.cat([mine, torch.tensor([float(enough)], dtype=torch.float64)])
                total = total.to(job.device)
                time.sleep(STEP_S)
                dist.all_reduce(total, group=job.process_group)
                update(net, optimizer, schedule, total)
            if step.committed:
                say("committed", step.number)
                if total[COUNT]:
                    break
                flip(folder, net)
        found = {"steps": job.committed, "digest": digest(net, optimizer, schedule)}
        (folder / f"{os.getpid()}.final").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
