"""Trains and saves after each step, in one of three ways, till FOLDER/enough is there.

    checkpointed.py FOLDER WHERE objects|sharded|job|exact [STEP_S [EVERY [behind]]]

`{node}` in WHERE is this node's id. Each process appends to FOLDER/PID.jsonl what it restored and
each step with its weights. With FOLDER/enough, all end at one step, and rank 0 leaves FOLDER/final:
steps and weights (those of other ranks are the same, or parts of them). The weights of `objects`
and `sharded` depend only on the steps and the world's size, those of `job` only on the steps, if
no more than two add up. `exact` is a `job` in deterministic mode, of any size up to SHARDS. A
`job` saves after each EVERY steps; with `behind` storage has not accepted the save before.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastane

WIDTH, SHARDS = 64, 4
torch.set_num_threads(1)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 300), torch.nn.Dropout(0.1), torch.nn.Linear(300, WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH))


class Told:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, what: str, **more: object) -> None:
        self._file.write(json.dumps({"what": what, "at_s": time.monotonic(), **more}) + "\n")


def fingerprint(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()


def leave(folder: Path, steps: int, weights: str) -> None:
    (folder / "final.new").write_text(json.dumps({"steps": steps, "weights": weights}))
    (folder / "final.new").replace(folder / "final")


def may_die(folder: Path) -> None:
    """Have this process killed where it would keep its part, while FOLDER/torn has letters left."""
    from elastane.snapshots.client import SnapshotClient

    keep = SnapshotClient.keep

    def dies(self: SnapshotClient, *args: object, **more: object) -> None:
        left = (folder / "torn").read_text() if (folder / "torn").exists() else ""
        if left:
            (folder / "torn").write_text(left[:-1])
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, *args, **more)

    SnapshotClient.keep = dies


def alone(folder: Path, where: str, step_s: float, sharded: bool) -> None:
    """Train with a process group of the script's own."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    net, told = model(), Told(folder)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        net = torch.nn.Sequential(net[0], net[2])  # dropout has streams of each rank's own
        for layer in net:
            fully_shard(layer, mesh=mesh)
        run = fully_shard(net, mesh=mesh)
    else:
        run = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    checkpointer = elastane.Checkpointer(where, every_steps=1)
    restored = checkpointer.restore({"model": net, "optimizer": optimizer})
    step = restored.step if restored else 0

    def weights() -> str:
        whole = [p.full_tensor() if sharded else p for p in net.parameters()] + [*net.buffers()]
        return fingerprint(whole)

    where = restored.where if restored else ""
    told("restored", step=step, where=where, rank=rank, weights=weights())
    if rank == 1:
        may_die(folder)
    enough = torch.zeros(1)
    while not enough:
        generator = torch.Generator().manual_seed(step * 100 + rank)
        run(torch.randn(8, WIDTH, generator=generator)).pow(2).mean().backward()
        time.sleep(step_s)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        saver = getattr(checkpointer, "_saver", None)
        copied = ()
        with contextlib.suppress(OSError):  # The snapshot server may be gone, or stand still.
            copied = saver.server.progress().copied if saver else ()
        told("step", step=step, rank=rank, copied=copied, weights=weights())
        checkpointer.maybe_save(step)
        enough = torch.ones(1) * (rank == 0 and (folder / "enough").exists())
        dist.all_reduce(enough)
    if not checkpointer.maybe_save(step):
        checkpointer.save(step)
    checkpointer.wait()
    checkpointer.close()
    last = weights()
    if rank == 0:
        leave(folder, step, last)
    dist.barrier()
    dist.destroy_process_group()


def in_place(
    folder: Path, where: str, step_s: float, every: int = 1, *, exact: bool = False
) -> None:
    """Train as a job that recovers in place."""
    if not exact:  # torch's deterministic algorithms read the compiler's settings
        import uncompiled  # noqa: F401 - before the optimizer is made

    told = Told(folder)
    mode = {"deterministic": True, "shards": SHARDS} if exact else {}
    with elastane.init(backend=os.environ.get("GPU_BACKEND", ""), **mode) as job:
        net = torch.nn.Sequential(*[layer for n, layer in enumerate(model()) if n in (0, 2)])
        net.to(job.device)
        run = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        data = torch.randn(997, WIDTH, generator=torch.Generator().manual_seed(1))
        batches = elastane.ElasticBatchSampler(len(data), 8, seed=0)
        loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
        job.track(model=net, optimizer=optimizer)
        checkpointer = elastane.Checkpointer(where, every_steps=every)
        restored = checkpointer.restore(job)
        told("restored", step=restored.step if restored else 0, where=restored and restored.where)
        enough = torch.zeros(1)
        for step, _ in job.steps(loader, until_step=10**6):
            with step:
                for batch in step.batches:
                    step.backward(run(batch.to(job.device)).pow(2).mean())
                time.sleep(step_s)
                optimizer.step()
                optimizer.zero_grad()
                enough = torch.ones(1) * (job.rank == 0 and (folder / "enough").exists())
                dist.all_reduce(enough, group=job.process_group)
            if step.committed:
                weights = fingerprint([*net.parameters()])
                told("step", step=step.number + 1, rank=job.rank, weights=weights)
                checkpointer.maybe_save(step)
                if enough:
                    break
        checkpointer.wait()
        checkpointer.close()
        if job.rank == 0:
            leave(folder, job.committed, fingerprint([*net.parameters()]))


if __name__ == "__main__":
    said, place, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    pause_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    place = place.replace("{node}", os.environ.get("ELASTANE_NODE", "none"))
    if mode in ("job", "exact"):
        if sys.argv[6:] == ["behind"]:
            from elastane.checkpoint.saving import Saver

            Saver._is_busy = lambda self: True
        every = int(sys.argv[5]) if len(sys.argv) > 5 else 1
        in_place(said, place, pause_s, every, exact=mode == "exact")
    else:
        alone(said, place, pause_s, sharded=mode == "sharded")
