"""A model with 100 MB of state and steps of 0.2 s, for bench.arrival.

    arrival_train.py FOLDER library|beside|group|plain

The state is weights and AdamW's two moments. The steps leave the processors mostly idle, as a GPU's
would. Each step is a line in FOLDER/PID.jsonl. `beside`: as `library`, and a joining worker builds
its model before it has a rank. `group`: as `library`, and state goes over the process group only,
as between two hosts. `plain`: a loop without elastane; a worker that is started again begins from
zero, as if a checkpoint cost no time to read.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

LAYERS, WIDTH, SAMPLES, BATCH, STEP_S = 12, 832, 1_000_000, 24, 0.2


class ArrivalSamples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, group: object = None) -> None:
    """Perform one step, in which every number of the state changes."""
    import torch.distributed as dist

    time.sleep(STEP_S)
    dist.all_reduce(torch.ones(8), group=group)
    for parameter in net.parameters():
        parameter.grad = parameter.detach()
    optimizer.step()
    optimizer.zero_grad()


def with_library(say: Callable[[int, int], None], *, waits: bool) -> None:
    import elastane

    with elastane.init(wait_for_place=waits) as job:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        batches = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=0)
        loader = torch.utils.data.DataLoader(
            ArrivalSamples(), batch_sampler=batches, collate_fn=lambda indices: indices
        )
        job.track(net=net, optimizer=optimizer)
        for step, _ in job.steps(loader, until_step=10**9):
            with step:
                train(net, optimizer, job.process_group)
            if step.committed:
                say(step.number, job.world_size)


def plain(say: Callable[[int, int], None]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    step = 0
    while True:
        train(net, optimizer)
        say(step, dist.get_world_size())
        step += 1


def main() -> None:
    torch.set_num_threads(1)
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    log = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - to the end

    def say(step: int, world: int) -> None:
        line = {"at_s": time.monotonic(), "step": step, "world": world}
        log.write(json.dumps(line) + "\n")

    if mode == "group":
        from elastane.comms import near

        near.machine = lambda: 0  # No two workers share memory.
    if mode == "plain":
        plain(say)
    else:
        with_library(say, waits=mode != "beside")


if __name__ == "__main__":
    main()
