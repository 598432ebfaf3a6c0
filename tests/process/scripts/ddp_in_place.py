"""DistributedDataParallel in place: a net with buffers, and a forward without gradients per step.

Each committed step is a line in FOLDER/PID.jsonl, with the sum of all parameters. All workers stop
after the step in which rank 0 finds FOLDER/enough.

PLANT=sync: once, in the first world of three, the workers that trained before do not broadcast
buffers, as torch 2.13 leaves a DDP behind a forward without gradients.

    ddp_in_place.py FOLDER STEPS STEP_S
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SAMPLES, BATCH, WIDTH = 252, 12, 16  # of each batch two samples or more for BatchNorm


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import elastane

    folder, steps, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    plant = os.environ.get("PLANT", "")
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    with elastane.init() as job:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1)
        )
        model = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=3)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)
        made = 0
        for step, samples in job.steps(loader, until_step=steps):
            with step:
                if plant and job.world_size == 3:
                    model.require_forward_param_sync = made == 0
                    plant = ""
                step.backward(model(data[samples]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(step_s)
            if not step.committed:
                continue
            made += 1
            with torch.no_grad():
                model(data[:4])
            enough = torch.tensor([int(job.rank == 0 and (folder / "enough").exists())])
            dist.all_reduce(enough, group=job.process_group)
            total = sum(p.detach().double().sum().item() for p in net.parameters())
            place = {"rank": job.rank, "world": job.world_size, "round": job.fence.round}
            said = {"what": "committed", "step": step.number, **place, "total": total}
            log.write(json.dumps({**said, "at_s": time.monotonic()}) + "\n")
            if enough:
                break


if __name__ == "__main__":
    main()
