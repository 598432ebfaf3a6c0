"""A node joins while two others train with 100 MB of state: the length of their pause.

    python -m bench.arrival [--times N] [--torchrun N]

The pause is the time between a survivor's last step in the old world and its first step in the new
one, less the median step of the new world. It is measured in four ways: with state through shared
memory; with a node that builds its model before it has a rank; over the process group alone, as
between two hosts; and under torchrun, which starts all workers again. Under torchrun no checkpoint
is read, which flatters it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.harness import TORCHRUN_UNSHARED, BenchError, free_port, kill, marked
from bench.report import machine
from elastane.testing import LocalCluster

SCRIPT = Path(__file__).parent / "scripts" / "arrival_train.py"
DEADLINE_S = 90.0
# The steps in each world before the next change.
SETTLED = 4
# Longer than torchrun's last call, which is as short as possible without losing the second node.
TORCHRUN_CONF = "last_call_timeout=2,join_timeout=60"


class Steps:
    """The steps that the workers have written, by process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[int, list[dict[str, float]]]:
        found = {}
        for path in self.folder.glob("*.jsonl"):
            whole = path.read_text().rpartition("\n")[0]
            found[int(path.stem)] = [json.loads(line) for line in whole.splitlines()]
        return found

    def wait_world(self, size: int, since_s: float) -> None:
        """Wait until a world of this many workers has made some steps."""

        def there() -> bool:
            done = [
                sum(line["world"] == size and line["at_s"] > since_s for line in lines)
                for lines in self.read().values()
            ]
            return sum(count >= SETTLED for count in done) == size

        wait(there, f"{SETTLED} steps of a world of {size}")


def wait(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise BenchError(f"no {what} within {DEADLINE_S:g} s")
        time.sleep(0.02)


def elastane_s(mode: str, times: int) -> list[float]:
    """Let a third node join and leave this often; return the pauses of the two others."""
    options = {"nnodes": "1:3", "nproc_per_node": 1, "max_restarts": 1, "tee": "0"}
    options["preload"] = "torch,torch.distributed,torch.optim"
    with tempfile.TemporaryDirectory() as name:
        steps = Steps(Path(name) / "steps")
        steps.folder.mkdir()
        script = [str(SCRIPT), str(steps.folder), mode]
        with LocalCluster(script, folder=Path(name) / "cluster", **options) as cluster:
            for node in "ab":
                cluster.start(node)
            steps.wait_world(2, 0.0)
            stay = set(steps.read())
            for _ in range(times):
                since_s = time.monotonic()
                third = cluster.start("c")
                steps.wait_world(3, since_s)
                since_s = time.monotonic()
                third.stop()
                steps.wait_world(2, since_s)
        return [
            pause for pid, lines in steps.read().items() if pid in stay for pause in pauses(lines)
        ]


def pauses(lines: list[dict[str, float]]) -> list[float]:
    """Return one worker's pause at each arrival, beyond a step."""
    rows = [(a["world"], b["world"], b["at_s"] - a["at_s"]) for a, b in pairwise(lines)]
    step_s = statistics.median(took for old, new, took in rows if old == new == 3)
    return [took - step_s for old, new, took in rows if (old, new) == (2, 3)]


def torchrun_s() -> float:
    """Let a third node join once; return the time from the old world's last step, less one step."""
    marker, port = f"elastane-bench-{uuid.uuid4().hex}", free_port()
    with tempfile.TemporaryDirectory() as name:
        steps = Steps(Path(name))

        def start(number: int) -> None:
            words = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "9"]
            words += ["--rdzv-backend", "c10d", "--rdzv-id", "arrival", "--rdzv-conf"]
            words += [TORCHRUN_CONF, "--rdzv-endpoint", f"127.0.0.1:{port}"]
            words += ["--local-addr", f"127.0.0.{number}", str(SCRIPT), name, "plain"]
            subprocess.Popen(
                [*TORCHRUN_UNSHARED.command, *words],
                env={**os.environ, **TORCHRUN_UNSHARED.env, "BENCH_JOB": marker},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

        try:
            start(1)
            start(2)
            steps.wait_world(2, 0.0)
            start(3)
            steps.wait_world(3, 0.0)
            lines = [line for each in steps.read().values() for line in each]
            last_s = max(line["at_s"] for line in lines if line["world"] == 2)
            mine = [[x["at_s"] for x in e if x["world"] == 3] for e in steps.read().values()]
            step_s = statistics.median(b - a for times in mine for a, b in pairwise(times))
            return min(min(times) for times in mine if times) - last_s - step_s
        finally:
            while pids := marked(marker):
                kill(pids)
                time.sleep(0.05)


def row(name: str, taken: list[float]) -> str:
    if not taken:
        return f"| {name} | not measured | - | 0 |"
    median, worst = statistics.median(taken), max(taken)
    return f"| {name} | {median * 1e3:.0f} ms | {worst * 1e3:.0f} ms | {len(taken)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.arrival")
    parser.add_argument("--times", type=int, default=10, help="arrivals; each is two pauses")
    parser.add_argument("--torchrun", type=int, default=3, help="arrivals under torchrun")
    options = parser.parse_args()
    about = machine()
    print(f"{about['date']}, {about['cores']} cores of {about['cpu']}, torch {about['torch']}")
    print("\nA node arrives, 100 MB of state: for how long the others pause, beyond a step.\n")
    print("| launcher | median | worst | n |")
    print("|---|---|---|---|")
    failed = False
    for name, measure in (
        ("elastane, same host", lambda: elastane_s("library", options.times)),
        ("elastane, wait_for_place=False", lambda: elastane_s("beside", options.times)),
        ("elastane, over the process group", lambda: elastane_s("group", options.times)),
        ("torchrun", lambda: [torchrun_s() for _ in range(options.torchrun)]),
    ):
        try:
            print(row(name, measure()), flush=True)
        except BenchError as error:
            failed = True
            print(f"| {name} | {error} | - | - |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
