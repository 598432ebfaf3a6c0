"""Rank 1 calls one more collective after its update of step 3, before the act of the argument.

surplus_collective.py end|retry|save|verify FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - before the optimizer is made

import elastane

SAMPLES = 1024


def main() -> None:
    then, folder = sys.argv[1:]
    with elastane.init() as job:
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = elastane.ElasticBatchSampler(SAMPLES, 32, seed=0)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_sampler=batches)
        job.track(net=net, optimizer=optimizer)
        checkpointer = elastane.Checkpointer(folder, every_steps=1000) if then == "save" else None
        if checkpointer is not None:
            checkpointer.restore(job)
        for step, _ in job.steps(
            loader, until_step=4 if then == "end" else 6, verify_every=4 * (then == "verify")
        ):
            if step.number == 4:
                print(f"went on to {then}", flush=True)
            with step:
                total = torch.ones(8)
                dist.all_reduce(total)
                net.weight.grad = total[:1].reshape(1, 1)
                optimizer.step()
                if job.rank == 1 and step.number == 3:
                    # As if it had been paired with what another rank makes next.
                    job.process_group.pairing.tally.note("broadcast", [torch.ones(8)])
            print("committed", step.number, flush=True)
            if step.number == 3 and then == "retry":
                job.retry(print, f"went on to {then}", flush=True)
            if step.number == 3 and checkpointer is not None:
                checkpointer.save(step)
                print(f"went on to {then}", flush=True)
    print(f"went on to {then}", flush=True)


if __name__ == "__main__":
    main()
