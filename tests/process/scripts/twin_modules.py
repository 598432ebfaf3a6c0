"""An ordinary script with two modules of one shape in each backward pass, and a count of samples.

Usage: twin_modules.py FOLDER, with three workers. Rank 1 dies in a pass. The gradients of the
second module are zero. Each of the others writes RANK.json: the largest gradients of that module,
and the counts that it has summed over the workers while it trains and in evaluations.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, DIES_AT, SAMPLES = 6, 3, 8


def count():
    """Return how many samples all workers have, and as many counts for each of nine classes."""
    total, classes = torch.tensor([SAMPLES, 1]), torch.full((9,), SAMPLES)
    for counts in (total, classes):
        dist.all_reduce(counts)
    return total[0].item(), classes[0].item()


def main():
    """Train both modules for some steps."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    modules = [DistributedDataParallel(torch.nn.Linear(16, 1)) for _ in range(2)]
    parameters = [each for module in modules for each in module.parameters()]
    optimizer = torch.optim.SGD(parameters, 1e-3)
    said = {"gradients": [], "trained": [], "evaluated": []}
    for step in range(STEPS):
        inputs = torch.randn(SAMPLES, 16)
        said["trained"].append(count())
        first, second = (module(inputs) for module in modules)
        loss = first.square().sum() + 0 * second.sum()
        if (step, rank) == (DIES_AT, 1):
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        said["gradients"].append(modules[1].module.weight.grad.abs().max().item())
        with torch.no_grad():
            for module in modules:
                module.eval()
            said["evaluated"].append(count())
            for module in modules:
                module.train()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


main()
