"""A worker is killed: the time to the first step of the new attempt, and whether it always comes.

`python -m bench.recovery --reps 100` prints the table of 2, 3 and 4 workers on one and two nodes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from functools import partial

from bench.harness import CAP_S, ELASTANE, TORCHRUN, BenchJob, Launcher, Node, Sample, kill
from bench.harness import recovery_after as recovery
from bench.report import BenchResult, machine, run_alternating, summary, write_json

CASES = [(workers, nodes) for nodes in (1, 2) for workers in (2, 3, 4)]


def standalone_flags(workers: int) -> list[str]:
    """Return the flags of a job on one node, the same for both launchers."""
    return ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", "3"]


def node_flags(
    job: BenchJob, node: Node, nnodes: str, workers: int, endpoint: str = ""
) -> list[str]:
    """Return the flags of one of several nodes; elastane needs a name for each.

    All nodes share one host name.
    """
    flags = ["--nnodes", nnodes, "--nproc-per-node", str(workers), "--max-restarts", "3"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-id", "bench", "--local-addr", node.address]
    flags += ["--rdzv-endpoint", endpoint or f"127.0.0.1:{job.port}"]
    if job.launcher.is_elastane:
        flags += ["--node-id", node.name]
    return flags


def split(workers: int, nodes: int) -> list[int]:
    """Spread workers over nodes; the first node gets the remainder."""
    share, rest = divmod(workers, nodes)
    return [share + (1 if index < rest else 0) for index in range(nodes)]


def worker_kill(
    launcher: Launcher,
    workers: int = 2,
    nodes: int = 1,
    victim: int | None = None,
    number: int = signal.SIGKILL,
) -> Sample:
    """SIGKILL the worker of the highest rank; measure to the first step of a new worker."""
    with BenchJob(launcher) as job:
        names = ["a", "b"][:nodes]
        for index, (name, share) in enumerate(zip(names, split(workers, nodes), strict=True)):
            node = Node(name, f"127.0.0.{index + 1}")
            flags = (
                standalone_flags(workers)
                if nodes == 1
                else node_flags(job, node, str(nodes), share)
            )
            job.start(node, flags)
        job.wait_training(workers)
        rank = workers - 1 if victim is None else victim
        hit = next(line for line in reversed(job.steps()) if line.rank == rank)
        at = time.monotonic()
        kill([hit.pid], number)
        return recovery(job, at, cap_s=CAP_S)


def matrix(launchers: list[Launcher], reps: int) -> dict[str, dict[str, BenchResult]]:
    """Measure every case this many times, launchers alternating."""
    return {
        f"{workers} workers, {nodes} node{'s' if nodes > 1 else ''}": run_alternating(
            partial(worker_kill, workers=workers, nodes=nodes), launchers, reps
        )
        for workers, nodes in CASES
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", choices=("torchrun", "elastane"))
    options = parser.parse_args()
    launchers = [one for one in (TORCHRUN, ELASTANE) if options.only in (None, one.name)]
    about, measured = machine(), matrix(launchers, options.reps)
    print(f"{about['date']}, {about['cores']} cores of {about['cpu']}, torch {about['torch']}")
    failed = False
    for case, results in measured.items():
        for name, result in results.items():
            score = f"{result.recovered} of {options.reps}"
            print(f"{case:20} {name:10} {score:12} {summary(result)}", flush=True)
            failed = failed or (name == ELASTANE.name and result.recovered < options.reps)
    write_json("recovery", about, measured)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
