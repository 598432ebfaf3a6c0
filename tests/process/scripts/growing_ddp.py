"""An ordinary DDP script with checkpoints, which knows nothing of elastane.

Usage: growing_ddp.py FOLDER [EVERY]. It saves each EVERY steps, 0 for never; the file "save" lets
it save at the next step; with a file "never-load" it reads no checkpoint. It ends once a file
"enough" is there. It writes where it began and what it has after each step.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER, EVERY = Path(sys.argv[1]), int("".join(sys.argv[2:]) or 0)
STEPS_MAX = 100_000


def digest(model):
    """Return a digest of all parameters."""
    state = [each.detach().numpy().tobytes() for each in model.parameters()]
    return hashlib.sha1(b"".join(state)).hexdigest()


def any_has(name):
    """Whether a file is there; all ranks decide alike."""
    there = torch.tensor([int((FOLDER / name).exists())])
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    return bool(there.item())


def save(model, optimizer, step):
    """Write the checkpoint; wait in the middle while a file "hold" exists."""
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, FOLDER / "new.pt")
        (FOLDER / "saves").write_text(str(os.getpid()))
        (FOLDER / "saves").rename(FOLDER / "saving")
        while (FOLDER / "hold").exists():
            time.sleep(0.01)
        (FOLDER / "new.pt").rename(FOLDER / "last.pt")
        (FOLDER / "saving").unlink()
        (FOLDER / "save").unlink(missing_ok=True)
    dist.barrier()


def main():
    """Train until it is enough."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    begin = 0
    if (FOLDER / "last.pt").exists() and not (FOLDER / "never-load").exists():
        state = torch.load(FOLDER / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"] + 1
    trained = DistributedDataParallel(model)
    data = torch.Generator().manual_seed(dist.get_rank())
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:

        def say(step):
            what = {"step": step, "digest": digest(model), "world": dist.get_world_size()}
            file.write(json.dumps(what) + "\n")
            file.flush()

        say(begin - 1)
        for step in range(begin, STEPS_MAX):
            inputs = torch.randn(8, 16, generator=data)
            time.sleep(0.01)
            optimizer.zero_grad()
            (trained(inputs).squeeze(-1) - inputs.sum(1)).square().mean().backward()
            optimizer.step()
            say(step)
            if any_has("save") or (EVERY and step % EVERY == EVERY - 1):
                save(model, optimizer, step)
            if any_has("enough"):
                break
    dist.destroy_process_group()


main()
