"""An ordinary DDP script, which knows no launcher: it saves each 50 steps, and resumes from there.

loop_ddp.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loop_parts import LEARNING_RATE, PER_WORKER, SAVE_EVERY, Classifier, Texts, record_steps
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

FOLDER = Path(sys.argv[1])
CHECKPOINT = FOLDER / "checkpoint.pt"


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{CHECKPOINT}.new")
        os.replace(f"{CHECKPOINT}.new", CHECKPOINT)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    trained = DistributedDataParallel(model)
    record_steps(FOLDER, optimizer)
    data = Texts()
    loader = DataLoader(data, PER_WORKER, sampler=DistributedSampler(data))
    while True:
        for batch in loader:
            optimizer.zero_grad()
            trained(**batch).backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(model, optimizer, step)


main()
