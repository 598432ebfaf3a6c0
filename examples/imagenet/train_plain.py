"""Rung 1: train a ResNet on a folder of images as a user of torchrun does, without elastane.

    torchrun     --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 ... train_plain.py DATA
    elastane run --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 ... train_plain.py DATA

A checkpoint is saved after each epoch, by one worker of each node; the lines marked (1) are what
the other two scripts do without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Ledger,
    accuracy,
    datasets,
    device_of_process,
    name_of_world,
    parse,
    resnet,
    set_rate,
    sgd,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train from the last whole epoch on."""
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
    train.sampler = DistributedSampler(train, seed=args.seed)  # (1)
    loader = DataLoader(
        train, args.batch_size // world_size, sampler=train.sampler, num_workers=args.workers
    )

    checkpoint = Path(args.checkpoint) / "checkpoint.pt"  # (1)
    state = load(checkpoint, device)  # (1)
    epoch, step, best = 0, 0, 0.0  # (1)
    if state is not None:  # (1)
        epoch, step, best = state["epoch"], state["step"], state["best"]  # (1)
        net.load_state_dict(state["net"])  # (1)
        optimizer.load_state_dict(state["optimizer"])  # (1)
    ledger.begins(rank, step)

    for epoch in range(epoch, args.epochs):  # noqa: B020 - from where it was
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
        reached = 0.0
        if rank == 0:
            reached = accuracy(net, held_out, device)
            ledger.tested(epoch, reached)
        if int(os.environ["LOCAL_RANK"]) == 0:  # (1)
            best = max(best, reached)  # (1)
            state = {"epoch": epoch + 1, "step": step, "best": best}  # (1)
            state |= {"net": net.state_dict(), "optimizer": optimizer.state_dict()}  # (1)
            save(checkpoint, state)  # (1)
            if rank == 0 and reached == best:
                save(checkpoint.with_name("best.pt"), state)

    ledger.ends(rank, step, net)
    dist.destroy_process_group()


def save(path: Path, state: dict[str, Any]) -> None:  # (1)
    """Save so that a reader finds the old one or the new one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    torch.save(state, new)
    new.replace(path)


def load(path: Path, device: torch.device) -> dict[str, Any] | None:  # (1)
    """Return the newest state that any worker has: a node that is new has none."""
    state = torch.load(path, "cpu", weights_only=True) if path.exists() else None
    epochs: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(epochs, state["epoch"] if state else 0)
    if not any(epochs):
        return None
    newest = max(range(len(epochs)), key=lambda rank: epochs[rank])
    told = [state]
    dist.broadcast_object_list(told, newest, device=device)
    return told[0]


if __name__ == "__main__":
    main()
