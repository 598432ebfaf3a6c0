"""Makes, trains, destroys and leaves DDP worlds, one after the other, as a plain script does.

The interpreter's lock is never given up but by who waits. Whatever needs it in the moment between
the last backward and the end of the model gets it, if at all, while the model is freed.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WORLDS, STEPS = 20, 2


def train(store):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


def main():
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A launcher says whether it serves the store; without one, the worker of rank 0 does.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = not served and os.environ["RANK"] == "0"
    store = dist.TCPStore(address, port, is_master=serves, wait_for_workers=False)
    sys.setswitchinterval(1000.0)
    for world in range(WORLDS):
        train(dist.PrefixStore(str(world), store))
        print(f"world {world} is left", flush=True)


if __name__ == "__main__":
    main()
