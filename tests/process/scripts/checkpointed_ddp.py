"""An ordinary DDP script that uses nothing of elastane but elastane.Checkpointer.

Usage: checkpointed_ddp.py FOLDER. It ends once a file "enough" is there. It writes where it began
and what it has after each step. A worker dies between two saves once a file "die.PID" is there.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastane

FOLDER = Path(sys.argv[1])
STEPS_MAX = 100_000


def digest(model):
    """Return a digest of all parameters."""
    state = [each.detach().numpy().tobytes() for each in model.parameters()]
    return hashlib.sha1(b"".join(state)).hexdigest()


def is_enough():
    """Whether the test has seen enough; all ranks decide alike."""
    enough = torch.tensor([int((FOLDER / "enough").exists())])
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    return bool(enough.item())


def main():
    """Train until the test has seen enough."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    checkpointer = elastane.Checkpointer(FOLDER / "checkpoints", every_steps=10)
    restored = checkpointer.restore({"model": model, "optimizer": optimizer})
    begin = restored.step if restored else 0
    trained = DistributedDataParallel(model)
    data = torch.Generator().manual_seed(dist.get_rank())
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:

        def say(step):
            what = {"step": step, "digest": digest(model), "world": dist.get_world_size()}
            file.write(json.dumps(what) + "\n")
            file.flush()

        say(begin)
        for step in range(begin + 1, STEPS_MAX):
            if step % 10 == 5 and (FOLDER / f"die.{os.getpid()}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(8, 16, generator=data)
            time.sleep(0.01)
            optimizer.zero_grad()
            (trained(inputs).squeeze(-1) - inputs.sum(1)).square().mean().backward()
            optimizer.step()
            say(step)
            checkpointer.maybe_save(step)
            if is_enough():
                break
    checkpointer.wait()
    dist.destroy_process_group()


main()
