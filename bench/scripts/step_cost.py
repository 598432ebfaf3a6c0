"""An ordinary DDP script that times its steps: rank 0 writes the seconds of each to FILE.

step_cost.py FILE STEPS MEGABYTES PAUSE_S

MEGABYTES of gradients; PAUSE_S is a pause before the backward pass, like the work of a device that
needs no CPU.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 500
LAYER_BYTES = 4 * WIDTH * WIDTH


def main() -> None:
    steps, megabytes, pause_s = int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    inputs, took_s = torch.randn(8, WIDTH), []
    for _ in range(steps):
        began_s = time.perf_counter()
        loss = ddp(inputs).square().mean()
        time.sleep(pause_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(took_s))
    dist.destroy_process_group()


main()
