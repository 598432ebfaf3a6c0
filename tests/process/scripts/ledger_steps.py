"""Training that counts its samples: how often each was in a committed step of each epoch.

The counts are a buffer of the model, so they belong to the state with which the job ends, whichever
workers made which step. Each worker that ends leaves them in FOLDER/PID.counts.

    ledger_steps.py FOLDER EPOCHS BATCH STEP_S
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made

import elastane

SAMPLES = 10_007


def main() -> None:
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    batch, step_s = int(sys.argv[3]), float(sys.argv[4])
    with elastane.init() as job:
        net = torch.nn.Linear(1, 1)
        net.register_buffer("seen", torch.zeros(epochs, SAMPLES, dtype=torch.int32))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = elastane.ElasticBatchSampler(SAMPLES, batch, seed=3)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)
        for step, samples in job.steps(loader, until_epoch=epochs):
            with step:
                counts = torch.zeros(SAMPLES, dtype=torch.int32)
                if step.samples:
                    counts[samples] += 1
                net.seen[step.epoch] += counts  # its own first: a lost step must put it back
                time.sleep(step_s)
                others = counts.clone()
                dist.all_reduce(others, group=job.process_group)
                net.seen[step.epoch] += others - counts
                optimizer.step()
            if step.committed and job.rank == 0:
                (folder / "step").write_text(str(step.number))
                (folder / "world").write_text(str(job.world_size))
        found = {"missing": int((net.seen == 0).sum()), "doubled": int((net.seen > 1).sum())}
        new = folder / f"{os.getpid()}.new"
        new.write_text(json.dumps(found))
        new.rename(new.with_suffix(".counts"))  # the worker may be killed as it writes


if __name__ == "__main__":
    main()
