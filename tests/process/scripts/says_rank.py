"""A job of which each worker prints its rank and process at each step. MODE of `says_rank.py MODE`:

- init: a loop of elastane.init()
- in-place: an unmodified DDP script with an ElasticLoader
- restart: an unmodified DDP script
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - it spares torch its compiler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastane

SAMPLES = 1 << 12
STEP_S = 0.03


def batches():
    """Return the batches of all ranks."""
    sampler = elastane.ElasticBatchSampler(SAMPLES, 12, seed=1)
    return DataLoader(TensorDataset(torch.ones(SAMPLES, 2)), batch_sampler=sampler)


def say(rank):
    """Print a line of this rank, and take as long as a step does."""
    print(f"rank {rank} of {os.getpid()}", flush=True)
    time.sleep(STEP_S)


def with_init():
    with elastane.init() as job:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        job.track(net=net, optimizer=optimizer)
        model = DistributedDataParallel(net, process_group=job.process_group)
        for step, (batch,) in job.steps(batches(), until_epoch=1 << 30):
            with step:
                say(job.rank)
                step.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()


def model_of():
    dist.init_process_group("gloo")
    net = torch.nn.Linear(2, 1)
    return net, DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)


def in_place():
    net, model, optimizer = model_of()
    loader = elastane.ElasticLoader(batches(), model=net, optimizer=optimizer)
    for _ in loader.epochs(1 << 30):
        for (batch,) in loader:
            say(dist.get_rank())
            loader.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()


def restart():
    _, model, optimizer = model_of()
    for _ in range(1 << 30):
        for (batch,) in batches():
            say(dist.get_rank())
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


{"init": with_init, "in-place": in_place, "restart": restart}[sys.argv[1]]()
