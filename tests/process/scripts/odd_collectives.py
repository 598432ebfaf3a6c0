"""From step 3 on, rank 0 calls a different collective, which gloo pairs with the others'."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made

import elastane

SAMPLES = 1024


def main() -> None:
    warnings.simplefilter("ignore")  # the coalesced form is deprecated
    with elastane.init() as job:
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = elastane.ElasticBatchSampler(SAMPLES, 32, seed=0)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)
        for step, _ in job.steps(loader, until_step=10):
            with step:
                total = torch.ones(8)
                if job.rank == 0 and step.number >= 3:
                    dist.all_reduce_coalesced([total])
                else:
                    dist.all_reduce(total)
                assert total[0] == job.world_size
                net.weight.grad = total[:1].reshape(1, 1)
                optimizer.step()
            print("committed", step.number, flush=True)


if __name__ == "__main__":
    main()
