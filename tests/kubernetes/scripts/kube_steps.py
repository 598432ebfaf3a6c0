"""A worker that recovers in place: a line for each committed step, as jobs.Step reads it.

Arguments: file, steps, and a folder for checkpoints, where there are any: they are only made when
all workers leave. In the place of its process number, which is the same in each container,
stands when it was born. The trained state is one number, which counts the steps.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import elastane

out, steps = sys.argv[1], int(sys.argv[2])
born = time.time_ns()
node, restarts = os.environ["ELASTANE_NODE"], os.environ["TORCHELASTIC_RESTART_COUNT"]

with elastane.init() as job, open(out, "a", buffering=1) as log:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    job.track(net=net, optimizer=optimizer)
    checkpointer = elastane.Checkpointer(sys.argv[3], every_steps=10**9) if sys.argv[3:] else None
    if checkpointer:
        checkpointer.restore(job)
    batches = elastane.ElasticBatchSampler(1000, 10)
    loader = torch.utils.data.DataLoader(range(1000), batch_sampler=batches)
    for step, _ in job.steps(loader, until_step=steps):
        with step:
            total = torch.ones(1)
            dist.all_reduce(total, group=job.process_group)
            net.weight.grad = -(total / job.world_size).reshape(1, 1)
            optimizer.step()
            time.sleep(0.02)
        if step.committed:
            assert net.weight.item() == step.number + 1
            place = f"{job.fence.round} {job.fence.attempt} {node} {born}"
            log.write(
                f"{job.rank} {step.number + 1} {job.world_size} {restarts} {place}"
                f" {time.time():.4f}\n"
            )
        if checkpointer:
            checkpointer.maybe_save(step)
