"""A data-parallel script whose rank 1 is slow in each step, in the way of its argument."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, part_s = sys.argv[1], 0.015


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if how == "loader" and rank == 1:
            time.sleep(part_s)
        return torch.ones(8)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(Samples()):
    time.sleep(part_s * (2 if how == "sleep" and rank == 1 else 1))
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
