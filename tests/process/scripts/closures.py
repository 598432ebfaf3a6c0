"""Training whose optimizer runs forward and backward by itself, in a closure.

Each step's beginning and each commit are lines in FOLDER/PID.jsonl, with a digest of parameters and
optimizer. The process that finds FOLDER/kill takes that file and dies in the middle of its next
backward. All stop after the step in which rank 0 finds FOLDER/enough.

    closures.py FOLDER adamw|lbfgs
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made
from torch.nn.parallel import DistributedDataParallel

import elastane
from elastane.comms.digest import state_digest

SAMPLES, BATCH = 4096, 64
X = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
Y = X.square().sum(1, keepdim=True)


class Death:
    """Kills this process in the middle of a backward."""

    def __init__(self, folder: Path, net: torch.nn.Module) -> None:
        self._told = folder / "kill"
        self._passes = 0
        net[0].weight.register_hook(self._die)

    def look(self, passes: int) -> None:
        """Die in the backward with this number from now on, if the test asked for it."""
        if self._told.exists():
            self._told.unlink()
            self._passes = passes

    def _die(self, _grad: torch.Tensor) -> None:
        self._passes -= 1
        if self._passes == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def mean_of_all(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks, by which LBFGS decides when to stop."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def optimizer_of(kind: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=4)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    with elastane.init() as job:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
        net = torch.nn.Sequential(*layers)
        # Several buckets: in the middle of a backward some are reduced and some are not.
        model = DistributedDataParallel(net, process_group=job.process_group, bucket_cap_mb=0.001)
        optimizer, death = optimizer_of(kind, net), Death(folder, net)
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)

        def say(what: str, step: int) -> None:
            digest = state_digest([net.state_dict(), optimizer.state_dict()])
            log.write(json.dumps({"what": what, "step": step, "digest": digest}) + "\n")

        for step, chosen in job.steps(loader, until_step=1_000_000):

            def closure(step: elastane.Step = step, chosen: torch.Tensor = chosen) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(X[chosen]) - Y[chosen]).square().mean()
                step.backward(loss)
                return mean_of_all(loss * step.weight) if kind == "lbfgs" else loss

            with step:
                say("begin", step.number)
                enough = torch.ones(1) * (job.rank == 0 and (folder / "enough").exists())
                dist.all_reduce(enough, group=job.process_group)
                if job.rank == 1:
                    death.look(3 if kind == "lbfgs" else 1)
                optimizer.step(closure)
            if step.committed:
                say("committed", step.number)
                if enough:
                    break


if __name__ == "__main__":
    main()
