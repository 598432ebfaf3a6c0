"""A small model under DDP, with elastane's steps or in a plain loop.

    in_place_train.py FOLDER library|exact|plain [STEPS [STEP_S]]

With STEPS 0 it goes on until FOLDER/enough is there (`exact`; else for ever), and each committed
step is a line in FOLDER/PID.jsonl. With others, rank 0 leaves the median time of a step in
FOLDER/step_s. STEP_S is a pause in the body, for the work of a device that needs no CPU. `exact`
is deterministic: rank 0 leaves steps and the hash of the weights in FOLDER/final.
"""

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH, WIDTH = 100_000, 256, 256
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


def with_library(
    folder: Path, steps: int, step_s: float, exact: bool = False
) -> tuple[list[float], int]:
    import elastane

    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end
    took, again, enough = [], 0, torch.zeros(1)
    with elastane.init(deterministic=exact) as job:
        net = model()
        ddp = DistributedDataParallel(net, process_group=job.process_group)
        optimizer = torch.optim.AdamW(net.parameters())
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0)
        loader = torch.utils.data.DataLoader(Samples(), batch_sampler=batches, collate_fn=pick)
        job.track(net=net, optimizer=optimizer)
        began_s = time.perf_counter()
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
            now_s = time.perf_counter()
            took.append(now_s - began_s)
            began_s = now_s
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
        return took, job.rank


def fingerprint(net: torch.nn.Module) -> str:
    state = sorted(net.state_dict().items())
    return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in state)).hexdigest()


def plain(steps: int) -> tuple[list[float], int]:
    import torch.distributed as dist

    import elastane

    dist.init_process_group("gloo")
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0)
    loader = torch.utils.data.DataLoader(Samples(), batch_sampler=batches, collate_fn=pick)
    took, done = [], 0
    began_s = time.perf_counter()
    while done < steps:
        for x, y in loader:
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches.commit()
            now_s = time.perf_counter()
            took.append(now_s - began_s)
            began_s = now_s
            done += 1
            if done == steps:
                break
    rank = dist.get_rank()
    dist.barrier()
    return took, rank


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    step_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    if mode == "plain":
        took, rank = plain(steps)
    else:
        took, rank = with_library(folder, steps, step_s, exact=mode == "exact")
    if rank == 0:
        (folder / "step_s").write_text(str(statistics.median(took[len(took) // 10 :])))
    if mode == "plain":
        os._exit(0)  # torch's own teardown of a group may hang; it is not what is measured


if __name__ == "__main__":
    main()
