"""What drawn scripts whose lost workers are replaced have in common: model, evaluation, records."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawn_program import Joining, Pair, evaluation_set, training_set
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import elastane
from elastane.data.sources import ShardSource


def record(own: Path, name: str, **what: object) -> None:
    """Write a record of this process, whole."""
    torch.save(what, own / "new")
    os.replace(own / "new", own / name)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | Pair) -> dict[str, object]:
    """Return a copy of the state of both."""
    return held({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def held(state: Any) -> Any:
    """Return a copy of a state; of a sharded tensor it has the part of this worker."""
    return copy.deepcopy(tree_map(own_part, state))


def own_part(leaf: Any) -> Any:
    """Return the part of a sharded tensor that this worker holds; anything else as it is."""
    return leaf.detach().to_local() if isinstance(leaf, DTensor) else leaf


def loader_of(program: Joining) -> Any:
    """Return what loads the samples of each step."""
    data = TensorDataset(*training_set(program))
    if not program.stream:
        sampler = elastane.ElasticBatchSampler(len(data), program.batch, seed=program.seed)
        return DataLoader(data, batch_sampler=sampler)
    shards = [range(15), range(15, 15), range(15, 16), range(16, 30), range(30, len(data))]

    def samples(shard: int, start: int, _epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return (data[number] for number in shards[shard][start:])

    source = ShardSource(range(len(shards)), samples)
    return elastane.ElasticStream(source, program.batch, seed=program.seed)


def wrapped(
    program: Joining, model: torch.nn.Module, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Return the model as it trains."""
    more: dict[str, Any] = {"bucket_cap_mb": 0.0006} if program.small_buckets else {}
    return DistributedDataParallel(
        model,
        process_group=group,
        static_graph=program.static,
        find_unused_parameters=program.unused,
        gradient_as_bucket_view=program.views,
        **more,
    )


def extra(op: str) -> None:
    """Make one more collective in the loop."""
    own = torch.ones(1, dtype=torch.float64)
    if op == "barrier":
        dist.barrier()
    elif op == "gather":
        dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)
    else:
        dist.all_reduce(own, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])


def evaluate(program: Joining, model: torch.nn.Module) -> float:
    """Return the mean loss over the dataset, of which this worker has a part."""
    inputs, labels = evaluation_set(program)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(inputs[mine]), labels[mine], reduction="none"
        )
    total = torch.stack((losses.sum(), torch.tensor(float(len(losses)), dtype=torch.float64)))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
