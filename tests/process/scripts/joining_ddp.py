"""A DDP script whose loop runs through an ElasticLoader, so that workers join it in place.

Usage: joining_ddp.py FOLDER [MODE]. It ends at the end of the first epoch after a file "enough"
exists; an epoch ends only with a file "go on". It writes its state after each step. The process
of a file PID.hold-X makes PID.held-X when it comes to X, and waits to be killed: X is read (of a
stream, in the thread that reads ahead), second (a stream's second round of a step) or last (the
last step of an epoch, before its backward pass). MODE:

- plain: nothing else
- accumulate: two batches to a step
- workers: two processes load the data
- stream: the samples are those of shards whose lengths are not known
- unnamed: the optimizer is not named
- early: a sum of all workers before the loop
- late: a worker of a later start waits, before its loop, for the file "now"
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from joining_data import BATCH, SAMPLES, STEPS, Numbers, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastane
from elastane.data import sources

FOLDER, MODE = Path(sys.argv[1]), "".join(sys.argv[2:]) or "plain"
EPOCHS_MAX = 10_000
# Of the shards of the stream.
FIRSTS = [0, 50, 50, 51, 141, 178, 202, SAMPLES]


def made():
    """Return a model."""
    inner = torch.nn.LayerNorm(32), torch.nn.ReLU()
    return torch.nn.Sequential(torch.nn.Linear(16, 32), *inner, torch.nn.Linear(32, 1))


def hold(where):
    """Wait to be killed, if the test asks for it."""
    if (FOLDER / f"{os.getpid()}.hold-{where}").exists():
        (FOLDER / f"{os.getpid()}.held-{where}").touch()
        signal.pause()


def opened(shard, start, _epoch):
    """Yield the samples of a shard."""
    is_ahead = threading.current_thread() is not threading.main_thread()
    if not is_ahead and start == 0:
        hold("second")
    for index in range(FIRSTS[shard] + start, FIRSTS[shard + 1]):
        if is_ahead:
            hold("read")
        yield Numbers()[index]


def data_of(mode):
    """Return the data, as an ElasticLoader takes them."""
    if mode == "stream":
        source = sources.ShardSource(range(len(FIRSTS) - 1), opened)
        return elastane.ElasticStream(source, BATCH, seed=1, lanes=4)
    sampler = elastane.ElasticBatchSampler(SAMPLES, BATCH, seed=1)
    return DataLoader(Numbers(), batch_sampler=sampler, num_workers=2 * (mode == "workers"))


def any_has(name):
    """Whether a file is there; all ranks decide alike."""
    there = torch.tensor([int((FOLDER / name).exists())])
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    return bool(there.item())


def main():
    """Train until the test has seen enough."""
    first_rank, first_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (first_rank, first_size)
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # DDP gives the first ones the same parameters.
    model = made()
    trained = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if MODE == "unnamed":
        del named["optimizer"]
    loader = elastane.ElasticLoader(data_of(MODE), accumulate=1 + (MODE == "accumulate"), **named)
    if MODE == "early":
        dist.all_reduce(torch.ones(1))
    (FOLDER / f"{os.getpid()}.ready").touch()
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:

        def say(what):
            where = {"step": loader.step, "epoch": loader.epoch}
            file.write(json.dumps({**where, **what}) + "\n")
            file.flush()

        seen = []
        for _ in loader.epochs(EPOCHS_MAX):
            for indices, inputs in loader:
                if loader.samples:
                    seen += indices.tolist()
                if loader.is_last:
                    number = scheduler.last_epoch + 1
                    world = dist.get_world_size()
                    say({"dealt": seen, "optimizer_steps": number, "of": world})
                time.sleep(0.01)
                hold("last" if loader.step % STEPS == STEPS - 1 else "other")
                delayed = contextlib.nullcontext() if loader.is_last else trained.no_sync()
                with delayed:
                    loss = (trained(inputs).squeeze(-1) - inputs.sum(1)).square().mean()
                    loader.backward(loss)
                if not loader.is_last:
                    continue
                contributed = dist.get_world_size()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                what = {
                    "optimizer_steps": scheduler.last_epoch,
                    "digest": digest(model, optimizer),
                    "rank": dist.get_rank(),
                    "world": dist.get_world_size(),
                    "contributed": contributed,
                    "at": time.time(),
                }
                seen = []
                say(what)
            if any_has("enough"):
                break
    dist.destroy_process_group()


main()
