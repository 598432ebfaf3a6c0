"""An unmodified script: DDP over gloo, in which a rank shows a fault on request.

The file named by CULPRIT names the fault and the rank: "sleep 2". The rank continues once the file
is gone, if the fault can end. A rank writes its step to CULPRIT.RANK now and then.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - it spares torch its compiler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOLD = Path(os.environ["CULPRIT"])
STEPS = int(os.environ.get("CULPRIT_STEPS", str(1 << 40)))
# Longer than any test waits for the verdict, and no longer than one waits for the next fault.
LOCK_S = int(os.environ.get("CULPRIT_LOCK_S", "8"))
POLL_S = 0.02


def told():
    """Return the fault that this rank has to show, or an empty text."""
    with contextlib.suppress(OSError, ValueError):
        fault, rank = TOLD.read_text().split()
        if int(rank) == dist.get_rank():
            return fault
    return ""


class Samples(Dataset):
    """Samples, one of which may take long."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        while told() == "loader":
            time.sleep(POLL_S)
        return torch.full((4,), float(index % 7))


def loop(_total):
    while TOLD.exists():
        pass


def sleep(_total):
    while TOLD.exists():
        time.sleep(POLL_S)


def lock(_total):
    """Call a C function that does not release the interpreter's lock."""
    ctypes.PyDLL(None).sleep(LOCK_S)


def disk(_total):
    """Read from a FIFO to which the test writes only at its end."""
    with TOLD.with_name("slow-disk").open("rb", buffering=0) as file:
        file.read(1)


def stop(_total):
    os.kill(os.getpid(), signal.SIGSTOP)


# The lines at which steps call their collective: what passed at a line is reported later there.
LINES = [compile("\n" * line + "dist.all_reduce(total)", "reduce.py", "exec") for line in range(90)]
PASSES = [compile("\n" * line + "loss.backward()", "backward.py", "exec") for line in range(90)]


def other(total):
    dist.broadcast(total, src=(dist.get_rank() + 1) % dist.get_world_size())


def extra(total):
    dist.broadcast(total, src=dist.get_rank())
    dist.all_reduce(total)


def large(_total):
    """Reduce more than the others: gloo ends a rank that receives it."""
    dist.all_reduce(torch.ones(1000))


def small(_total):
    """Reduce less than the others, which then wait for the rest."""
    dist.all_reduce(torch.ones(3))


def killed(_total):
    TOLD.unlink()  # or the worker that replaces this one would show the fault as well
    os.kill(os.getpid(), signal.SIGKILL)


def raised(_total):
    TOLD.unlink()
    raise RuntimeError("planted")


def lingers(_total):
    TOLD.unlink()
    threading.Thread(target=time.sleep, args=(3600,)).start()
    raise RuntimeError("planted")


def exited(_total):
    TOLD.unlink()
    sys.exit(3)


WAITS = (loop, sleep, lock, disk, stop, other, extra, large, small)
FAULTS = {each.__name__: each for each in (*WAITS, killed, raised, lingers, exited)}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Several buckets: two of gloo's threads then complete reductions beside each other.
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Samples(), batch_size=1))
    for step in range(STEPS):
        loss = model(next(batches)).sum()
        optimizer.zero_grad()
        exec(PASSES[step % len(PASSES)], {"loss": loss})
        optimizer.step()
        total = torch.ones(7)
        fault = FAULTS.get(told())
        if fault is not None:
            fault(total)
        exec(LINES[step % len(LINES)], {"dist": dist, "total": total})
        time.sleep(POLL_S)  # so long does a step take
        if step % 10 == 0:
            TOLD.with_name(f"step-{rank}").write_text(f"{os.getpid()} {step}")
    dist.destroy_process_group()


main()
