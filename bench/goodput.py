"""Goodput: the share of wall time in steps that count, while a worker dies every 10 s.

A useful step was committed and not repeated. Its worth is the median step time of all workers over
the whole run, so that other load on the machine affects both. A step has a pause of 50 ms, like a
device that computes while the CPU is idle. Elastane's training is deterministic, so its weights are
compared with those of a run without faults.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import TORCHRUN_UNSHARED, BenchError, BenchJob, Node, Sample, kill
from bench.recovery import standalone_flags
from bench.report import BenchResult
from bench.trainers import SCRIPTS, Trainers

STEP_S = 0.05
FAULT_EVERY_S = 10.0
BEFORE_S = 10.0


def of_elastane(workers: int, minutes: float) -> BenchResult:
    """Kill a worker every 10 s for this many minutes."""
    rng, faults = random.Random(1), round(60 * minutes / FAULT_EVERY_S)
    with Trainers() as job:
        job.start_agent(workers, "--standalone", mode="exact", step_s=STEP_S)
        here = job.wait_world(workers)
        time.sleep(BEFORE_S)  # the measured time, not a wait for a condition
        job.watch.poll()
        one = next(iter(here))
        begun_s, first = time.monotonic(), job.watch.commits[one][-1].step
        for number in range(faults):
            _until(begun_s + number * FAULT_EVERY_S)
            now_s = time.monotonic()
            said = job.watch.poll()
            alive = [pid for pid, done in said.items() if done and now_s - done[-1].at_s < 1.0]
            if not alive:
                raise BenchError(f"nobody trains; kept: {job.folder}")
            kill([rng.choice(alive)])
        _until(begun_s + 60 * minutes)
        wall_s = time.monotonic() - begun_s
        said = job.watch.poll()
        last = max(done[-1].step for done in said.values() if done)
        typical_s = statistics.median(
            late.at_s - early.at_s
            for done in said.values()
            for early, late in itertools.pairwise(done)
            if early.world == workers and early.round == late.round
        )
        (job.folder / "enough").touch()
        job.wait((job.folder / "final").exists, "the end of the training")
        steps, weights = json.loads((job.folder / "final").read_text())
        same = "the same" if weights == undisturbed(steps) else "NOT the same"
        note = f"{faults} faults in {wall_s / 60:.1f} minutes, {job.judge()}, {same} weights after"
        note += f" {steps} steps as without faults"
    return BenchResult([Sample((last - first) * typical_s / wall_s, note=note)])


def undisturbed(steps: int) -> str:
    """Return the hash of the weights after this many steps of one worker."""
    with tempfile.TemporaryDirectory() as name:
        script = [str(SCRIPTS / "in_place_train.py"), name, "exact", str(steps)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *script], check=True, env=env)
        done, weights = json.loads((Path(name) / "final").read_text())
        assert done == steps
        return str(weights)


def of_torchrun(workers: int, minutes: float) -> BenchResult:
    """Measure torchrun the same way; its script checkpoints every 10 steps."""
    rng, faults = random.Random(1), round(60 * minutes / FAULT_EVERY_S)
    with BenchJob(TORCHRUN_UNSHARED, script_args=f"--step-s {STEP_S}") as job:
        flags = standalone_flags(workers)
        flags[flags.index("--max-restarts") + 1] = "100000"
        job.start(Node("a"), flags)
        job.wait_training(workers)
        _until(time.monotonic() + BEFORE_S)
        begun_s, first = time.monotonic(), job.steps()[-1].step
        for number in range(faults):
            _until(begun_s + number * FAULT_EVERY_S)
            recent = {line.rank: line.pid for line in job.lines()[-4 * workers :]}
            kill([rng.choice(sorted(recent.values()))])
        _until(begun_s + 60 * minutes)
        wall_s = time.monotonic() - begun_s
        steps = job.steps()
        last = max(line.step for line in steps)
        typical_s = statistics.median(
            late.at - early.at
            for early, late in itertools.pairwise(line for line in steps if line.rank == 0)
            if early.pid == late.pid
        )
        note = f"{faults} faults in {wall_s / 60:.1f} minutes"
        return BenchResult([Sample((last - first) * typical_s / wall_s, note=note)])


def _until(at_s: float) -> None:
    """Let time pass, which is what is measured."""
    time.sleep(max(0.0, at_s - time.monotonic()))
