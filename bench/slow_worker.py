"""Throughput beside a slow worker, with virtual shards dealt evenly and by speed.

    python -m bench.slow_worker [--slower F ...]

Four workers compute 16 virtual shards a step. A shard takes 10 ms of sleep, and F times as long on
the slow worker, so that the workers do not compete for the cores. The best rate is that without a
slow worker, times the workers' mean speed: what dealing parts of shards would reach. The rates are
those of the last 60 of 120 steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from bench.ranks import joined, output_of_rank_0

WORKERS, SHARDS, SHARD_S = 4, 16, 0.01
STEPS, MEASURED = 120, 60
SLOWER = (1.3, 1.5, 2.0, 3.0)


def worker(rank: int, port: int, slower: float, by_speed: bool) -> None:
    """Train in a world of four; rank 0 prints the steps per second."""
    import torch

    import elastane
    from elastane.worker import shard_speeds
    from elastane.worker.job import Job
    from elastane.worker.mode import Deterministic

    torch.set_num_threads(1)
    if not by_speed:
        shard_speeds.GAIN = 1.0  # no deal is that much faster
    job = Job(None, Deterministic(SHARDS, 0), None).join()
    job.process_group.replace(joined(rank, WORKERS, port))
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job.track(net=net, optimizer=optimizer)
    batches = elastane.ElasticBatchSampler(100_000, 64, seed=0)
    loader = torch.utils.data.DataLoader(torch.randn(100_000, 8), batch_sampler=batches)
    shard_s = SHARD_S * (slower if rank == WORKERS - 1 else 1.0)
    begun_s = 0.0
    for step, _ in job.steps(loader, until_step=STEPS):
        if step.number == STEPS - MEASURED:
            begun_s = time.perf_counter()
        with step:
            for batch in step.batches:
                time.sleep(shard_s)
                step.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(MEASURED / (time.perf_counter() - begun_s))
    sys.stdout.flush()
    torch.distributed.barrier(group=job.process_group)
    os._exit(0)  # The order of exits is not measured.


def rate(slower: float, *, by_speed: bool) -> float:
    """Return the steps per second of a job whose last worker is slower by this factor."""
    return float(output_of_rank_0("bench.slow_worker", WORKERS, (slower, int(by_speed))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.slow_worker")
    parser.add_argument("--slower", type=float, nargs="+", default=SLOWER)
    parser.add_argument("--worker", type=float, nargs=4, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        rank, port, slower, by_speed = args.worker
        worker(int(rank), int(port), slower, bool(by_speed))
    alike = rate(1.0, by_speed=True)
    print(f"four workers alike: {alike:.2f} steps/s\n")
    print("| slower by | evenly | by speed | best | by speed of best | of the loss regained |")
    print("|---|---|---|---|---|---|")
    for slower in args.slower:
        even, dealt = (rate(slower, by_speed=each) for each in (False, True))
        best = alike * (WORKERS - 1 + 1 / slower) / WORKERS
        print(
            f"| {slower:g} | {even:.2f} steps/s | {dealt:.2f} steps/s | {best:.2f} steps/s |"
            f" {dealt / best:.0%} | {(dealt - even) / (best - even):.0%} |"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
