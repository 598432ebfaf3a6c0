"""An unmodified script that saves, restores, trains and evaluates, for a known time each."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - optimizers need no compiler here
from torch.nn.parallel import DistributedDataParallel

STATE, SLOW_S, LOOKS = Path(sys.argv[1]), float(sys.argv[2]), 15


class Slow:
    """Takes its time to be saved, and to be loaded."""

    def __reduce__(self):
        time.sleep(SLOW_S)
        return slow, ()


def slow():
    time.sleep(SLOW_S)
    return Slow()


def train(model, optimizer, steps):
    for step in range(steps):
        if step % 3 == 0:
            model.module[1].eval()  # a part of it is not trained, which is no evaluation
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.save(Slow(), STATE)
    dist.barrier()
    torch.load(STATE, weights_only=False)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 40)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "slow": Slow()}, STATE)
    dist.barrier()
    model.eval()
    with torch.no_grad():
        for _ in range(LOOKS):
            model.module(torch.ones(2, 4))
            time.sleep(SLOW_S / LOOKS)
    model.train()
    train(model, optimizer, 80)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
