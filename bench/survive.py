"""A script like ImageNet's training, with four workers killed in each run: the damage that is left.

    python -m bench survive [--runs N] [--seed S]

Three workers, BatchNorm, StepLR, validation with all-reduced metrics and a checkpoint each epoch
(tests/process/scripts/epochs.py). Two of the four kills hit a worker during a validation, two at a
random time. A run is clean if the job ends well without a restart of all, no step is repeated or
left out, and all replicas have the same weights. The weights are compared with two runs without
faults, of three workers and of two: BatchNorm's statistics depend on how samples are assigned, and
so on the world.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.report import machine
from elastane.testing import LocalCluster
from elastane.testing.cluster import ClusterError, LocalNode

SCRIPT = Path(__file__).parent.parent / "tests" / "process" / "scripts" / "epochs.py"
EPOCHS, PER_EPOCH, STEP_S, WORKERS, KILLS = 40, 8, 0.02, 3, 4
DEADLINE_S = 150.0


@dataclass
class Run:
    """The result of one run."""

    took_s: float
    problem: str
    weights: list[float]
    accuracy: float


class SurvivalJob:
    """One run: a cluster of one node, and the files of its workers in a folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.said, self.workers = folder / "said", workers
        self.killed_s = 0.0
        self.said.mkdir()
        script = [str(SCRIPT), str(self.said), str(EPOCHS), str(STEP_S), "behind"]
        self.cluster = LocalCluster(
            script,
            folder=folder / "cluster",
            nnodes="1",
            nproc_per_node=workers,
            min_workers=1,
            max_restarts=100,
            preload="torch,torch.distributed,torch.optim,torch._dynamo",
        )

    def lines(self, what: str) -> dict[int, list[dict[str, float]]]:
        found = {}
        for path in self.said.glob("*.jsonl"):
            whole = path.read_text().rpartition("\n")[0]
            lines = [json.loads(line) for line in whole.splitlines()]
            found[int(path.stem)] = [line for line in lines if line["what"] == what]
        return found

    def is_whole(self, node: LocalNode) -> bool:
        """Whether all workers have made a step in a full world since the last kill."""
        now, pids = self.lines("committed"), node.workers()
        last = [now[pid][-1] for pid in pids if now.get(pid)]
        whole = [e for e in last if e["world"] == self.workers and e["at_s"] > self.killed_s]
        return len(whole) == len(pids) == self.workers

    def kill(self, node: LocalNode, rng: random.Random, number: int) -> None:
        """Kill one worker once the last one is replaced; every other kill during a validation."""
        self.cluster.wait(
            lambda: self.is_whole(node) or not node.is_alive, "a whole world", DEADLINE_S
        )
        time.sleep(rng.uniform(0.0, 0.5))
        if number % 2:
            node.kill_worker(rng.randrange(self.workers))
            self.killed_s = time.monotonic()
            return
        before = len([*self.said.glob("died-*")])
        (self.said / "die").touch()
        self.cluster.wait(
            lambda: len([*self.said.glob("died-*")]) > before or not node.is_alive,
            "a validation",
            DEADLINE_S,
        )
        self.killed_s = time.monotonic()

    def problem(self, kills: int) -> str:
        """Return the fault of a job that has ended; "" if there is none."""
        ends = self.cluster.events("job-ended")
        if not ends or ends[-1].data["ok"] is not True:
            return "the job failed"
        if self.cluster.events("restart"):
            return "all workers started again"
        killed = len(self.cluster.events("replacement"))
        if killed != kills:
            return f"{killed} of {kills} kills"
        steps = {pid: [line["step"] for line in e] for pid, e in self.lines("committed").items()}
        if any(made != sorted(set(made)) for made in steps.values()):
            return "a worker made a step twice"
        if {step for made in steps.values() for step in made} != {*range(EPOCHS * PER_EPOCH)}:
            return "a step is missing"
        weights = [final["weights"] for final in self.finals()]
        return "" if all(each == weights[0] for each in weights) else "replicas differ"

    def finals(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in self.said.glob("*.final")]


def run(workers: int, kills: int, seed: int) -> Run:
    """Train once."""
    rng, began_s = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        job = SurvivalJob(Path(name), workers)
        try:
            with job.cluster:
                node = job.cluster.start("a")
                for number in range(kills):
                    job.kill(node, rng, number)
                job.cluster.wait(lambda: not node.is_alive, "the end of the job", DEADLINE_S)
            problem = job.problem(kills)
        except ClusterError as error:
            problem = f"hung: {str(error).partition(chr(10))[0]}"
        finals = job.finals()
    best = max(finals, key=lambda final: len(final["values"]), default=None)
    if best is None:
        return Run(time.monotonic() - began_s, problem or "no result", [], 0.0)
    return Run(time.monotonic() - began_s, problem, best["weights"], best["values"][-1])


def apart(one: list[float], other: list[float]) -> float:
    """Return the distance of two runs' weights, relative to their size."""
    norm = sum(weight * weight for weight in one) ** 0.5
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 / norm


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench survive")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    about = machine()
    print(f"{about['date']}, {about['cores']} cores of {about['cpu']}, torch {about['torch']}")
    three, again, two = run(WORKERS, 0, 0), run(WORKERS, 0, 0), run(WORKERS - 1, 0, 0)
    for name, other in (("three workers again", again), ("two workers", two)):
        print(f"undisturbed, {name}: apart {apart(three.weights, other.weights):.2e}")
    print(f"\n{KILLS} kills in each run of {EPOCHS} epochs; `apart` is from the undisturbed run.\n")
    print("| run | seconds | outcome | apart | accuracy |")
    print("|---|---|---|---|---|")

    def row(name: str, it: Run) -> str:
        distance = f"{apart(three.weights, it.weights):.2e}" if it.weights else "-"
        outcome = it.problem or "clean"
        return f"| {name} | {it.took_s:.0f} | {outcome} | {distance} | {it.accuracy:.3f} |"

    print(row("undisturbed", three))
    bad = 0
    for number in range(options.runs):
        found = run(WORKERS, KILLS, options.seed + number)
        bad += bool(found.problem)
        print(row(str(options.seed + number), found), flush=True)
    print(f"\n{options.runs - bad} of {options.runs} runs are clean.")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
