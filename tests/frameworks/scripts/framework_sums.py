"""Sums parts that were divided by the world size, while worker 1 is lost between the two.

Usage: framework_sums.py FOLDER accelerate|fabric, with three workers. The first time worker 1 dies
before its sum. Each of the others appends what it has to FOLDER/sums.
"""

import os
import signal
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.argv[1])


def of_accelerate():
    """Return the world size, and how Accelerate sums."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.num_processes, lambda part: accelerator.reduce(part, "sum")


def of_fabric():
    """Return the world size, and how Fabric sums."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=3, strategy="ddp")
    fabric.launch()
    return fabric.world_size, lambda part: fabric.all_reduce(part, reduce_op="sum")


torch.set_num_threads(1)
size, summed = {"accelerate": of_accelerate, "fabric": of_fabric}[sys.argv[2]]()
part = torch.tensor(1.0) / size
if os.environ["RANK"] == "1" and not (FOLDER / "died").exists():
    (FOLDER / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
total = summed(part).item()
with (FOLDER / "sums").open("a") as file:
    file.write(f"{total:.3f}\n")
