"""Recovery in place: a worker is killed, and the others' next step; and what a step costs.

    python -m bench.in_place [--kills N]

Four workers of one node, `--min-workers 1`: at random instants one of them gets SIGKILL. Told is
the time from the kill to the first step that a survivor commits afterwards in a smaller or equal
world, and whether any process of a survivor changed. Then the time of a step with the library and
without, in turn, of the same model over the same kind of process group.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SCRIPT = Path(__file__).parent / "scripts" / "in_place_train.py"
WORKERS = 4
DEADLINE_S = 60.0


def lines(folder: Path) -> dict[int, list[dict[str, float]]]:
    """Return what each process has committed, by pid."""
    found = {}
    for path in folder.glob("*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]
        found[int(path.stem)] = [json.loads(line) for line in whole.splitlines()]
    return found


def wait(condition: Callable[[], T], what: str) -> T:
    """Return the first true value of `condition`."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise TimeoutError(what)


def kills(count: int, seed: int) -> list[float]:
    """Kill a worker `count` times; returns the seconds to the survivors' next step."""
    rng, took = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["run", "--standalone", "--nproc-per-node", str(WORKERS), "--min-workers", "1"]
        words += ["--max-restarts", "100000", "--rdzv-conf", "crash_loop=0,gather=0.2"]
        words += ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "elastane", *words, str(SCRIPT), str(folder), "library"],
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(count):
                alive = wait(lambda: _full_world(folder), "a world of all workers")
                time.sleep(rng.random() * 0.2)
                victim = rng.choice(alive)
                os.kill(victim, signal.SIGKILL)
                killed_s = time.monotonic()
                others = [pid for pid in alive if pid != victim]
                took.append(_next_step(folder, others, killed_s))
        finally:
            agent.terminate()
            agent.wait(30)
    return took


def _next_step(folder: Path, pids: list[int], killed_s: float) -> float:
    return wait(lambda: _after(folder, pids, killed_s), "the next step")


def _full_world(folder: Path) -> list[int]:
    """Return the processes of a world of all workers, once each has stepped in it just now."""
    now_s = time.monotonic()
    here = [
        pid
        for pid, done in lines(folder).items()
        if done and done[-1]["world"] == WORKERS and now_s - done[-1]["at_s"] < 1.0
    ]
    rounds = {lines(folder)[pid][-1]["round"] for pid in here}
    return here if len(here) == WORKERS and len(rounds) == 1 else []


def _after(folder: Path, pids: list[int], killed_s: float) -> float:
    """Return when all survivors had committed a step in another round, after the kill."""
    said, firsts = lines(folder), []
    for pid in pids:
        rounds = [line["round"] for line in said[pid] if line["at_s"] < killed_s]
        later = [line["at_s"] for line in said[pid] if line["round"] > rounds[-1]]
        if not later:
            return 0.0
        firsts.append(later[0] - killed_s)
    return max(firsts)


def step_s(mode: str, steps: int) -> float:
    """Return the median seconds of a step of two workers."""
    with tempfile.TemporaryDirectory() as name:
        words = ["run", "--standalone", "--nproc-per-node", "2", "--log-dir", f"{name}/logs"]
        command = [sys.executable, "-m", "elastane", *words, str(SCRIPT), name, mode, str(steps)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return float((Path(name) / "step_s").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.in_place")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    took = sorted(kills(args.kills, 1))
    print("| what | median | 99th percentile | worst |")
    print("|---|---|---|---|")
    print(
        f"| SIGKILL of one of {WORKERS} workers, {len(took)} times: to the others' next step |"
        f" {statistics.median(took) * 1e3:.0f} ms | {took[int(len(took) * 0.99)] * 1e3:.0f} ms |"
        f" {took[-1] * 1e3:.0f} ms |"
    )
    with_s, without_s = [], []
    for _ in range(args.turns):
        without_s.append(step_s("plain", args.steps))
        with_s.append(step_s("library", args.steps))
    ratio = statistics.median(with_s) / statistics.median(without_s)
    print(
        f"\nA step of two workers: {statistics.median(with_s) * 1e3:.3f} ms with the library,"
        f" {statistics.median(without_s) * 1e3:.3f} ms with plain DDP: ratio {ratio:.3f}"
        f" (medians of {args.turns} runs of {args.steps} steps in turn)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
