"""A script whose parameters are sharded over the workers: sharded.py (fsdp | tensor).

With `tensor` torch itself makes the process group, for the mesh of all workers.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
if sys.argv[1] == "fsdp":
    dist.init_process_group("gloo")
    fully_shard(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
model(torch.ones(2, 4)).sum().backward()
