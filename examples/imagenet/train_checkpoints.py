"""Rung 2: the same script with a sampler and checkpoints that know what a step is.

    torchrun     --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 ... train_checkpoints.py DATA
    elastane run --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 ... train_checkpoints.py DATA

It continues in the middle of an epoch, in a world of any size. The lines marked (2) are those that
differ from train_plain.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import (
    Ledger,
    accuracy,
    datasets,
    device_of_process,
    keep_best,
    name_of_world,
    parse,
    resnet,
    set_rate,
    sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastane  # (2)


def main() -> None:
    """Train from the newest checkpoint on."""
    args = parse(__doc__)
    ledger = Ledger(args)
    device = device_of_process()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size, world = dist.get_rank(), dist.get_world_size(), name_of_world()
    torch.manual_seed(args.seed)
    train, held_out = datasets(args)
    net = resnet(args.arch, train.classes, args.width, args.image_size).to(device)
    model = DistributedDataParallel(net)
    optimizer = sgd(net, args)
    train.sampler = elastane.ElasticSampler(train, seed=args.seed)  # (2)
    loader = DataLoader(
        train, args.batch_size // world_size, sampler=train.sampler, num_workers=args.workers
    )

    checkpointer = elastane.Checkpointer(  # (2)
        args.checkpoint,
        every_steps=args.every_steps,
        every_s=None if args.every_steps else "auto",
    )
    restored = checkpointer.restore(  # (2)
        {"net": net, "optimizer": optimizer, "sampler": train.sampler}
    )
    step = restored.step if restored else 0  # (2)
    ledger.begins(rank, step, restored.where if restored else "")

    for epoch in range(train.sampler.epoch, args.epochs):  # (2)
        train.sampler.set_epoch(epoch)
        set_rate(optimizer, args, epoch)
        for images, labels, samples in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            place = {"rank": rank, "world": world, "epoch": epoch, "step": step}
            ledger.did(place, samples, loss)
            train.sampler.commit(args.batch_size // world_size * world_size)  # (2)
            checkpointer.maybe_save(step)  # (2)
            while elastane.should_checkpoint():  # (2) this node is told to leave
                checkpointer.save(step)  # (2)
                checkpointer.wait()  # (2)
        if rank == 0:
            reached = accuracy(net, held_out, device)
            ledger.tested(epoch, reached)
            keep_best(args, net, reached, step)  # (2)

    checkpointer.save(step)  # (2)
    checkpointer.wait()  # (2)
    checkpointer.close()  # (2)
    ledger.ends(rank, step, net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
