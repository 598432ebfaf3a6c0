"""A small model under DDP, with elastane's steps, or alternating with a plain loop.

    in_place_train.py FOLDER library|exact [STEPS [STEP_S]]
    in_place_train.py FOLDER paired STEPS [SHARD]

With STEPS 0 it runs until FOLDER/enough exists (`exact`; otherwise for ever). Each committed step
is a line in FOLDER/PID.jsonl. STEP_S is a pause in the body, like the work of a device that needs
no CPU. `exact` is deterministic: rank 0 writes steps and the hash of the weights to FOLDER/final.
`paired`: rank 0 writes the seconds of each block of steps to FOLDER/blocks; with SHARD,
fully_shard() spreads the model over that many workers of a replica.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH, WIDTH = 100_000, 256, 256
BLOCK = 50  # steps of one kind before the other's turn
X = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(4096) % 10


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices) % 4096


def pick(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return X[chosen], Y[chosen]


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)]
    return torch.nn.Sequential(*layers)


def loader_of(batches: object) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Samples(), batch_sampler=batches, collate_fn=pick)


def with_library(folder: Path, steps: int, step_s: float, exact: bool = False) -> None:
    import elastane

    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    again, enough = 0, torch.zeros(1)
    with elastane.init(deterministic=exact) as job:
        net = model()
        ddp = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.AdamW(net.parameters())
        loader = loader_of(elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0))
        job.track(net=net, optimizer=optimizer)
        for step, _ in job.steps(loader, until_step=steps or 10**9):
            with step:
                if step_s:
                    time.sleep(step_s)
                for x, y in step.batches:
                    step.backward(torch.nn.functional.cross_entropy(ddp(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if exact:
                    enough = torch.ones(1) * (job.rank == 0 and (folder / "enough").exists())
                    torch.distributed.all_reduce(enough, group=job.process_group)
            again += not step.committed
            if step.committed and not steps:
                place = {"world": job.world_size, "round": job.fence.round, "rank": job.rank}
                line = {"at_s": time.monotonic(), "step": step.number, "again": again, **place}
                log.write(json.dumps(line) + "\n")
            if step.committed and enough:
                break
        if exact and job.rank == 0:
            (folder / "final.new").write_text(json.dumps([job.committed, fingerprint(net)]))
            (folder / "final.new").replace(folder / "final")


def fingerprint(net: torch.nn.Module) -> str:
    state = sorted(net.state_dict().items())
    return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in state)).hexdigest()


def sharded(mesh: object) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net


def library_steps(job: object, steps: int, shard: int) -> Iterator[None]:
    """Yield after each step of the library."""
    import elastane

    net = sharded(job.device_mesh(shard=shard)) if shard else model()
    ddp = net if shard else DistributedDataParallel(net, process_group=job.process_group)
    optimizer = torch.optim.AdamW(net.parameters())
    loader = loader_of(elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0))
    job.track(net=net, optimizer=optimizer)
    for step, _ in job.steps(loader, until_step=steps):
        with step:
            for x, y in step.batches:
                step.backward(torch.nn.functional.cross_entropy(ddp(x), y))
            optimizer.step()
            optimizer.zero_grad()
        yield


def plain_steps(group: torch.distributed.ProcessGroup, shard: int) -> Iterator[None]:
    """Yield after each step of plain DDP, or fully_shard(), over a group of torch's."""
    import elastane

    if shard:
        shape, names = (group.size() // shard, shard), ("replicate", "shard")
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        net = ddp = sharded(mesh)
    else:
        net = model()
        ddp = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.AdamW(net.parameters())
    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0)
    batches.bind(group.rank(), group.size())
    loader = loader_of(batches)
    while True:
        for x, y in loader:
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches.commit()
            yield


def paired(folder: Path, steps: int, shard: int) -> None:
    """Run blocks of steps of both kinds by turns, so that changes of the machine affect both."""
    import torch.distributed as dist

    import elastane

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    with elastane.init() as job:
        kinds = {
            "plain": plain_steps(group, shard),
            "library": library_steps(job, steps, shard),
        }
        blocks: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(steps // BLOCK // len(kinds)):
            for kind, makes in kinds.items():
                dist.barrier(group)
                began_s = time.perf_counter()
                for _ in range(BLOCK):
                    next(makes)
                blocks[kind].append((time.perf_counter() - began_s) / BLOCK)
        if job.rank == 0:
            (folder / "blocks").write_text(json.dumps(blocks))
        dist.barrier(group)
        kinds["library"].close()
    os._exit(0)  # torch's own teardown of a group may hang, and is not measured


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    last = sys.argv[4] if len(sys.argv) > 4 else "0"
    if mode == "paired":
        paired(folder, steps, shard=int(last))
    else:
        with_library(folder, steps, step_s=float(last), exact=mode == "exact")


if __name__ == "__main__":
    main()
