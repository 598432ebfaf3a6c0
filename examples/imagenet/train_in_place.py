"""Rung 3: the same script with elastane's steps: who is left keeps its process.

    elastane run --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 ... train_in_place.py DATA
    python train_in_place.py DATA

A worker that dies costs the others the step in hand, one that comes gets its state from who is
there, and the checkpoint is for when nobody is. The lines marked (3) are those that differ from
train_checkpoints.py.
"""

from __future__ import annotations

import torch
from common import (
    Ledger,
    accuracy,
    datasets,
    keep_best,
    parse,
    resnet,
    set_rate,
    sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastane


def main() -> None:
    """Train from the newest state on that anybody has."""
    args = parse(__doc__)
    ledger = Ledger(args)
    with elastane.init() as job:  # (3)
        torch.manual_seed(args.seed)
        train, held_out = datasets(args)
        net = resnet(args.arch, train.classes, args.width, args.image_size).to(job.device)  # (3)
        model = DistributedDataParallel(net, process_group=job.process_group)  # (3)
        optimizer = sgd(net, args)
        batches = elastane.ElasticBatchSampler(len(train), args.batch_size, seed=args.seed)  # (3)
        train.sampler = batches
        loader = DataLoader(train, batch_sampler=batches, num_workers=args.workers)  # (3)

        job.track(net=net, optimizer=optimizer)  # (3)
        checkpointer = elastane.Checkpointer(
            args.checkpoint,
            every_steps=args.every_steps,
            every_s=None if args.every_steps else "auto",
        )
        restored = checkpointer.restore(job)  # (3)
        ledger.begins(
            job.rank, restored.step if restored else 0, restored.where if restored else ""
        )

        for step, (images, labels, samples) in job.steps(loader, until_epoch=args.epochs):  # (3)
            world = f"round {job.fence.round} attempt {job.fence.attempt}"
            place = {"rank": job.rank, "world": world, "epoch": step.epoch, "step": step.number + 1}
            with step:  # (3) all of it happens, on all workers, or none of it
                set_rate(optimizer, args, step.epoch)
                output = model(images.to(job.device))
                loss = nn.functional.cross_entropy(output, labels.to(job.device))
                step.backward(loss)  # (3)
                ledger.did(place, samples[: step.samples], loss)
                optimizer.step()
                optimizer.zero_grad()
            if not step.committed:  # (3)
                continue
            ledger.committed(place)
            checkpointer.maybe_save(step)
            if batches.epoch > step.epoch and job.rank == 0:  # (3) that was the epoch's last
                reached = accuracy(net, held_out, job.device)
                ledger.tested(step.epoch, reached)
                keep_best(args, net, reached, step.number + 1)

        checkpointer.save(job.committed)  # (3)
        checkpointer.wait()
        checkpointer.close()
        ledger.ends(job.rank, job.committed, net)


if __name__ == "__main__":
    main()
