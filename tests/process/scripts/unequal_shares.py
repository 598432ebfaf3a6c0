"""Trains under DDP with steps of fewer samples than ranks; rank 0 writes its place and weights.

Runs under a launcher and, as a world of one, without any.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastane import ElasticBatchSampler
from elastane.data.feed import Feed

N, BATCH, EPOCHS = 11, 2, 2


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, 4).double(), torch.randn(N, 1).double())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = model.double()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = ElasticBatchSampler(N, BATCH, seed=5, micro_batches=2)
    with Feed(DataLoader(data, batch_sampler=batches)) as feed:
        for _ in range(EPOCHS):
            for portion in feed:
                inputs, targets = portion.batch
                loss = torch.nn.functional.mse_loss(model(inputs), targets) * portion.weight
                loss.backward()
                if portion.share.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    feed.commit(portion.step)
    if batches.world[0] == 0:
        weights = [value.flatten().tolist() for value in model.state_dict().values()]
        Path(sys.argv[1]).write_text(json.dumps([batches.world, batches.place, weights]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
