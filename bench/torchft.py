"""torchft compared with elastane: four replicas of one worker each, and a lighthouse.

Each replica is under torchrun, as in torchft's README, and torchrun restarts a dead one. The model
is in its PureDistributedDataParallel: in torchft 0.2.0 over torch 2.13, survivors in the other
wrapper die of an assertion when a collective fails. Needs an interpreter that can import torchft;
nothing else of the project does.
"""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness import BenchError, Sample, free_port, kill
from bench.report import BenchResult
from bench.trainers import SCRIPTS, Trainers

REPLICAS = 4
NEVER_S = 60.0


@dataclass(frozen=True)
class TorchftOptions:
    """The lighthouse's arguments, and the timeout of a replica's operations."""

    lighthouse: tuple[str, ...]
    timeout_s: float


SETTINGS = {
    "as its README": TorchftOptions(
        ("--join_timeout_ms", "10000", "--quorum_tick_ms", "100"), 60.0
    ),
    # Heartbeats come each 100 ms: five may be late. Two seconds for an operation are few already.
    "tuned": TorchftOptions(
        (
            *("--join_timeout_ms", "1000", "--quorum_tick_ms", "20"),
            *("--heartbeat_timeout_ms", "500"),
        ),
        2.0,
    ),
}


def worker_lost(
    python: str, options: TorchftOptions, number: int, victim: int | None, times: int
) -> BenchResult:
    """Inject a fault into a replica's worker; return the seconds to the others' next step."""
    rng, result = random.Random(1), BenchResult()
    for _ in range(times):
        with Trainers() as job:
            start(job, python, options)
            here = job.wait_world(REPLICAS)
            pid = rng.choice(sorted(here)) if victim is None else sorted(here)[victim]
            at_s = time.monotonic()
            kill([pid], number)
            try:
                took_s = job.next_step_s(here.keys() - {pid}, at_s, NEVER_S)
            except BenchError:
                result.samples.append(Sample(None))
                continue
            result.samples.append(Sample(took_s))
    return result


def version(python: str) -> str:
    """Return the version of the torchft that an interpreter has."""
    ask = "import importlib.metadata as m; print(m.version('torchft'))"
    return subprocess.check_output([python, "-c", ask], text=True).strip()


def start(job: Trainers, python: str, options: TorchftOptions) -> None:
    """Start the lighthouse and the replicas."""
    port = free_port()
    lighthouse = str(Path(python).with_name("torchft_lighthouse"))
    job.start([lighthouse, "--min_replicas", "1", "--bind", f"[::]:{port}", *options.lighthouse])
    for number in range(REPLICAS):
        env = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        env |= {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(REPLICAS)}
        words = ["--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "1000"]
        words += ["--master-port", str(free_port())]
        script = [str(SCRIPTS / "torchft_train.py"), str(job.folder), str(options.timeout_s)]
        job.start([python, "-m", "torch.distributed.run", *words, *script], env)
