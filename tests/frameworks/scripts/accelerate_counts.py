"""An Accelerate script that keeps its world size, and in which two workers kill themselves.

Usage: accelerate_counts.py FOLDER, with three workers. The first time worker 1 dies after a step.
The next time the worker of rank 0 dies in the block in which it goes first. The worker that has
rank 0 at the end writes the gradient of each step, and what the block saw, to said.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

FOLDER = Path(sys.argv[1])
FIRST_RANK = int(os.environ["RANK"])


def die():
    """End this worker."""
    os.kill(os.getpid(), signal.SIGKILL)


def go_first(accelerator):
    """Lose the first worker in the block; append what each one sees there."""
    place, done, seen = FOLDER / "place", FOLDER / "done", FOLDER / "seen"
    with accelerator.main_process_first():
        # Whether another worker is in the block, and whether one has completed it.
        with seen.open("a") as file:
            file.write(f"{FIRST_RANK} {place.exists()} {done.exists()}\n")
        if not done.exists():
            place.touch()
            if FIRST_RANK == 0:
                die()
            time.sleep(0.5)  # the time in which others could come
            place.unlink()
            done.touch()


def main():
    """Make steps whose losses are divided by a gathered count."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    net = torch.nn.Linear(1, 1, bias=False)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
    said = {"gradients": []}

    def train(asks=False):
        count = accelerator.gather(torch.tensor(2)).sum()
        workers = accelerator.num_processes if asks else size
        accelerator.backward(net(torch.ones(2, 1)).sum() * workers / count)
        said["gradients"].append(round(float(next(net.parameters()).grad), 3))
        optimizer.step()
        optimizer.zero_grad()

    train()
    lost = FOLDER / "lost"
    if not lost.exists():
        accelerator.wait_for_everyone()
        if FIRST_RANK == 1:
            lost.touch()
            die()
        train()
    go_first(accelerator)
    train(asks=True)
    if accelerator.is_main_process:
        said["seen"] = [line.split() for line in (FOLDER / "seen").read_text().splitlines()]
        (FOLDER / "said.json").write_text(json.dumps(said))


main()
