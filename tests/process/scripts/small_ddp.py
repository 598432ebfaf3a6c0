"""An ordinary DDP script that starts fast: a line of JSON after each step, until FOLDER/enough.

small_ddp.py FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(sys.argv[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    with (FOLDER / f"{os.getpid()}.jsonl").open("w", buffering=1) as log:
        enough, step = torch.zeros(1), 0
        while not enough.item():
            step += 1
            time.sleep(0.01)
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=data)).square().mean().backward()
            optimizer.step()
            state = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
            line = {"step": step, "digest": state.hex(), "world": dist.get_world_size()}
            log.write(json.dumps(line | {"rank": dist.get_rank()}) + "\n")
            enough = torch.tensor([float((FOLDER / "enough").exists())])
            dist.all_reduce(enough, op=dist.ReduceOp.MAX)


main()
