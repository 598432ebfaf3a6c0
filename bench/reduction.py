"""The mean that does not depend on the world, against plain all-reduce, in the same processes.

    python -m bench.reduction [--floats N]

For each world: the median seconds of gloo's all-reduce of N floats, and of the mean over already
summed blocks (one to three for each rank) on every rank. Both take turns over the same connections.
The ratio is the median of the ratios of each turn. Its target is 1.3 if the world divides the
shards, and 2 otherwise. The other ratio is that of the processor time of rank 0, which other work
on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

from bench.ranks import joined, output_of_rank_0

SHARDS = 8
REPEATS = 25
FLOATS = (2_000_000, 20_000_000)
WORLDS = (2, 3, 4, 5)


def worker(rank: int, port: int, size: int, floats: int) -> None:
    """Run one rank; rank 0 prints each turn's seconds, of wall time and of processor time."""
    import torch

    from elastane.comms.elastic import ElasticGroup
    from elastane.comms.mean import Mean
    from elastane.data.ledger import dealt_evenly

    torch.set_num_threads(1)
    group = ElasticGroup()
    group.replace(joined(rank, size, port))
    vector = torch.ones(floats)
    mean = Mean(floats, torch.float32, torch.device("cpu"), SHARDS)

    def all_reduce() -> tuple[float, float]:
        return timed(lambda: group.allreduce([vector]).wait())

    def tree() -> tuple[float, float]:
        dealt = dealt_evenly(SHARDS, size)
        total = mean.begin(rank, dealt)
        for _ in dealt[rank]:
            total.add(lambda into, adds: into.add_(1.0) if adds else into.fill_(1.0))
        return timed(lambda: mean.finish(group))

    def timed(action: Callable[[], object]) -> tuple[float, float]:
        group.barrier().wait()
        begun = time.perf_counter(), time.process_time()
        action()
        group.barrier().wait()
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    turns = [(*all_reduce(), *tree()) for _ in range(REPEATS + 1)][1:]
    if rank == 0:
        print(json.dumps(turns))
    group.barrier().wait()
    sys.stdout.flush()
    os._exit(0)  # As in the other scripts: the order of exits is not measured.


def measured(size: int, floats: int) -> tuple[float, float, float, float]:
    """Return the median seconds of all-reduce and of the mean, and the medians of both ratios."""
    turns = json.loads(output_of_rank_0("bench.reduction", size, (size, floats)))
    plain_s, _, mean_s, _ = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(turn[2] / turn[0] for turn in turns)
    return plain_s, mean_s, ratio, statistics.median(turn[3] / turn[1] for turn in turns)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.reduction")
    parser.add_argument("--floats", type=int, nargs="+", default=FLOATS)
    parser.add_argument("--worker", type=int, nargs=4, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
    heads = ("floats", "world", "all-reduce", f"mean of {SHARDS} shards", "ratio", "target")
    print(f"| {' | '.join(heads)} | of processor time |")
    print("|---|---|---|---|---|---|---|")
    for floats in args.floats:
        for size in WORLDS:
            plain_s, mean_s, ratio, busy = measured(size, floats)
            target = 1.3 if SHARDS % size == 0 else 2.0
            print(
                f"| {floats:,} | {size} | {plain_s * 1e3:.1f} ms | {mean_s * 1e3:.1f} ms |"
                f" {ratio:.2f} | {target:g} | {busy:.2f} |"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
