"""Kills of workers in loops that elastane does not own, and what a step of such a loop costs.

    python -m bench frameworks [--rows ROW ...] [--kills N] [--few N] [--seed S]

Lightning's `Trainer.fit()`, Transformers' `Trainer.train()`, a loop with Accelerate and a plain DDP
loop, each under `--in-place`. A worker of a random rank is killed at a random instant; the result
is the time until all survivors have made a step of the optimizer in the world that is left. A job
whose workers join has all kills, one after another; an unmodified script, which grows by restarts
only, has one kill in each job. After each step the survivors' weights and moments are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.harness import ELASTANE, TORCHRUN_UNSHARED, BenchError, Launcher, Sample, kill
from bench.report import BenchResult, cell, installed, machine, measured_by, write_json
from bench.trainers import SCRIPTS, Commit, Trainers
from elastane.observe.events import read_events
from elastane.protocol.log_events import EventKind

WORKERS = 4
FRAMEWORKS = ("lightning", "transformers", "accelerate")
NEVER_S = 60.0
# The import of a framework by four workers on a busy machine.
START_S = 120.0
# A kill comes at a random instant within this from the first step of a whole world.
INSTANT_S = 2.0
OPTIONS = ("--standalone", "--in-place", "--ranks-may-change")
# The budget of replacements; without one, an unmodified script does not grow.
RESTARTS = {"joining": "100000", "plain": "0"}
# Imported once for the workers of a job, so that its start takes less of a busy machine.
PRELOAD = "torch,torch.distributed,torch.optim,torch._dynamo"
PRELOADS = {
    "loop_ddp.py": PRELOAD,
    "loop_lightning.py": f"{PRELOAD},lightning",
    "loop_transformers.py": f"{PRELOAD},transformers.trainer",
    "loop_accelerate.py": f"{PRELOAD},transformers.trainer,accelerate",
}
# The first steps of a run prepare memory and connections.
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Setting:
    """The extent of the measurement. `few`: kills of torchrun, and pairs of timed runs."""

    kills: int
    few: int
    seed: int


@dataclass
class LoopKills:
    """The kills of one job, and what the workers have recorded."""

    job: Trainers
    rng: random.Random
    samples: list[Sample] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def world(self) -> dict[int, Commit]:
        """Wait for a step of a whole world; return the workers' last steps."""
        here = self.job.wait(self._whole, f"a world of {WORKERS}", START_S)
        time.sleep(self.rng.random() * INSTANT_S)  # at a random moment of a step
        return here

    def _whole(self) -> dict[int, Commit]:
        here = {
            pid: done[-1]
            for pid, done in self.job.watch.poll().items()
            if done and pid not in self.lost and not self._is_old(done[-1])
        }
        return here if len(here) == WORKERS else {}

    @staticmethod
    def _is_old(commit: Commit) -> bool:
        return commit.world != WORKERS or time.monotonic() - commit.at_s > 1.0

    def once(self) -> None:
        """Kill one worker of a whole world."""
        here = self.world()
        pid = self.rng.choice(sorted(here))
        at_s = time.monotonic()
        kill([pid])
        self.lost.add(pid)
        stay = here.keys() - {pid}
        took_s = self.job.wait(
            lambda: self._stepped(stay, here.keys(), at_s),
            f"a step of {sorted(stay)}, without {pid} of rank {here[pid].rank}",
            NEVER_S,
        )
        self.samples.append(Sample(took_s))
        if took_s > 0.5:
            print(f"bench: {took_s:.2f} s without {pid}, {at_s=}", file=sys.stderr, flush=True)

    def _stepped(self, pids: Collection[int], before: Collection[int], since_s: float) -> float:
        """Return the seconds until all have stepped without the lost worker; 0: not yet.

        Such a step is of a smaller world, or a replacement made it too. `before`: the pids of the
        world in which the worker was killed.
        """
        said, firsts = self.job.watch.poll(), []
        old = self.lost | set(before)
        joined = min(
            (done[0].step for pid, done in said.items() if done and pid not in old),
            default=math.inf,
        )
        for pid in pids:
            later = [c for c in said[pid] if c.at_s > since_s]
            without = [c for c in later if c.world < WORKERS or c.step >= joined]
            firsts.append(without[0].at_s - since_s if without else 0.0)
        return max(firsts) if all(firsts) else 0.0

    def judge(self) -> None:
        """Raise BenchError if a step was repeated, replicas differ, or all restarted."""
        wrong = faults(self.job.watch.poll(), self.lost)
        [log] = (self.job.folder / "logs").iterdir()
        kinds = (EventKind.RESTART, EventKind.GROWTH)
        wrong += [f"{each.kind}: {each.reason}" for each in read_events(log) if each.kind in kinds]
        if wrong:
            raise BenchError(f"{'; '.join(wrong)}; kept: {self.job.folder}")


def faults(said: dict[int, list[Commit]], lost: Collection[int]) -> list[str]:
    """Return what is wrong with the steps that all workers have recorded, those lost included."""
    wrong, states = [], defaultdict(set)
    for pid, done in said.items():
        for early, late in itertools.pairwise(done):
            if late.step != early.step + 1:
                wrong.append(f"process {pid} made step {late.step} after step {early.step}")
        # A worker may be killed within the step in which the others lose it.
        for commit in done[:-1] if pid in lost else done:
            states[commit.step].add(commit.digest)
    differing = sorted(step for step, digests in states.items() if len(digests) > 1)
    return [*wrong, f"REPLICAS DIFFER after steps {differing}"] if differing else wrong


def killed(setting: Setting, script: str, way: str) -> BenchResult:
    """Kill workers of a loop under elastane, in one job or, if none join, in a job each."""
    result, rng = BenchResult(), random.Random(setting.seed)
    tries, steps_s = 0, []
    while tries < setting.kills:
        among = setting.kills - tries if way == "joining" else 1
        begun = len(result.samples)
        try:
            with Trainers() as job:
                loop = LoopKills(job, rng, result.samples)
                words = [str(SCRIPTS / script), str(job.folder), way]
                options = (*OPTIONS, "--max-restarts", RESTARTS[way])
                job.start_script(WORKERS, words, *options, "--preload", PRELOADS[script])
                for _ in range(among):
                    loop.once()
                loop.judge()
                steps_s += whole_steps_s(job.watch.commits)
        except BenchError as error:
            print(f"bench: {script} {way}: FAILED: {error}", file=sys.stderr, flush=True)
            result.errors.append(str(error))
            tries += 1
        tries += len(result.samples) - begun
    if steps_s:
        note = f"steps of {1000 * statistics.median(steps_s):.0f} ms"
        result.samples = [replace(sample, note=note) for sample in result.samples]
    return result


def whole_steps_s(said: dict[int, list[Commit]]) -> list[float]:
    """Return the times between two steps of a worker in a whole world."""
    return [
        late.at_s - early.at_s
        for done in said.values()
        for early, late in itertools.pairwise(done)
        if early.world == late.world == WORKERS
    ]


def torchrun_killed(setting: Setting, script: str) -> BenchResult:
    """Kill workers of the plain script under torchrun; return the time to a step of all."""
    result, rng = BenchResult(), random.Random(setting.seed)
    with Trainers() as job:
        words = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "1000"]
        script_words = [str(SCRIPTS / script), str(job.folder), "plain"]
        job.start([*TORCHRUN_UNSHARED.command, *words, *script_words], TORCHRUN_UNSHARED.env)
        loop = LoopKills(job, rng)
        for _ in range(setting.few):
            here = loop.world()
            at_s = time.monotonic()
            kill([rng.choice(sorted(here))])
            loop.lost |= here.keys()
            try:
                job.wait(lambda at=at_s: _all_new(job, at), "a new attempt", NEVER_S)
            except BenchError:
                result.samples.append(Sample(None))
                break
            said = job.watch.poll()
            new = [done for done in said.values() if done[0].at_s > at_s]
            done_before = max(said[pid][-1].step for pid in here)
            redone = done_before - min(done[0].step for done in new) + 1
            result.samples.append(Sample(max(done[0].at_s for done in new) - at_s, redone))
    return result


def _all_new(job: Trainers, since_s: float) -> bool:
    return sum(done[0].at_s > since_s for done in job.watch.poll().values() if done) == WORKERS


def step_cost(
    setting: Setting, steps: int, megabytes: float, pause_s: float
) -> dict[str, BenchResult]:
    """Time the steps of a script of two workers under both launchers, in turns."""
    pairs = []
    for _ in range(setting.few):
        words = (str(steps), str(megabytes), str(pause_s))
        plain_s, own_s = step_s(TORCHRUN_UNSHARED, words), step_s(ELASTANE, words, "--in-place")
        print(f"bench: step: {plain_s=:.4f}, {own_s=:.4f}", file=sys.stderr, flush=True)
        pairs.append((plain_s, own_s))
    plain_s = statistics.median(plain for plain, _ in pairs)
    more_s = statistics.median(own - plain for plain, own in pairs)
    note = f"{1000 * more_s:.2f} ms of {1000 * plain_s:.2f} ms"
    over = [Sample(own / plain, note=note) for plain, own in pairs]
    return {"torchrun": BenchResult([Sample(1.0)]), "elastane": BenchResult(over)}


def step_s(launcher: Launcher, words: tuple[str, ...], *options: str) -> float:
    """Run the script once; return the median time of its steps."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "took_s"
        command = [*launcher.command, "--standalone", "--nproc-per-node", "2", *options]
        script = [str(SCRIPTS / "step_cost.py"), str(file), *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **launcher.env}
        subprocess.run([*command, *script], check=True, stderr=subprocess.DEVNULL, env=env)
        return statistics.median(json.loads(file.read_text())[WARM_UP_STEPS:])


@dataclass(frozen=True)
class LoopRow:
    """One line of the table; `unit` is the unit of its results."""

    key: str
    title: str
    measure: Callable[[Setting], dict[str, BenchResult]]
    unit: str = "s"


def kills_of(script: str, way: str) -> Callable[[Setting], dict[str, BenchResult]]:
    """Return the measurement of a script under elastane and, if it is unmodified, torchrun."""

    def measure(setting: Setting) -> dict[str, BenchResult]:
        peers = {} if way == "joining" else {"torchrun": torchrun_killed(setting, script)}
        return {**peers, "elastane": killed(setting, script, way)}

    return measure


ROWS = (
    LoopRow(
        "lightning",
        "Lightning `Trainer.fit()`, ElasticStrategy",
        kills_of("loop_lightning.py", "joining"),
    ),
    LoopRow(
        "lightning-plain",
        'Lightning `Trainer.fit()`, `strategy="ddp"`',
        kills_of("loop_lightning.py", "plain"),
    ),
    LoopRow(
        "transformers",
        "Transformers `Trainer.train()`, ElasticTrainer",
        kills_of("loop_transformers.py", "joining"),
    ),
    LoopRow(
        "transformers-plain",
        "Transformers `Trainer.train()`, unmodified",
        kills_of("loop_transformers.py", "plain"),
    ),
    LoopRow(
        "accelerate",
        "a loop with Accelerate, adopted",
        kills_of("loop_accelerate.py", "joining"),
    ),
    LoopRow(
        "accelerate-plain",
        "a loop with Accelerate, unmodified",
        kills_of("loop_accelerate.py", "plain"),
    ),
    LoopRow("ddp", "a DDP loop, unmodified", kills_of("loop_ddp.py", "plain")),
    LoopRow(
        "step-large",
        "a step of two workers, 100 MB of gradients and a pause of 50 ms: over torchrun",
        partial(step_cost, steps=60, megabytes=100.0, pause_s=0.05),
        unit="ratio",
    ),
    LoopRow(
        "step-small",
        "the same, 1 MB of gradients and no pause",
        partial(step_cost, steps=1000, megabytes=1.0, pause_s=0.0),
        unit="ratio",
    ),
)


def cell_of(row: LoopRow, results: dict[str, BenchResult]) -> str:
    """Return the cells of one row, of the peer and of elastane."""
    return " | ".join(
        cell(results[name], row.unit) if name in results else ""
        for name in ("torchrun", "elastane")
    )


def introduction(about: dict[str, str], seed: int) -> str:
    """Return the conditions of the figures, in words."""
    versions = ", ".join(f"{name} {installed(name)}" for name in FRAMEWORKS)
    return (
        f"{measured_by('frameworks', about, f' (CPU, gloo), {versions}')} Seed {seed}. SIGKILL of"
        f" any one of {WORKERS} workers, to the next step of all survivors. Medians; never: not"
        f" within {NEVER_S:g} s. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; its"
        " times are to the first step of all workers of the new attempt."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench frameworks", description=__doc__)
    keys = [row.key for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=keys, metavar="ROW", help=", ".join(keys))
    parser.add_argument("--kills", type=int, default=100, help="of elastane's workers (100)")
    parser.add_argument("--few", type=int, default=3, help="of torchrun; pairs of runs (3)")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and instants (1)")
    args = vars(parser.parse_args())
    chosen = args.pop("rows")
    about, measured = machine(), {}
    for row in ROWS:
        if chosen and row.key not in chosen:
            continue
        measured[row.key] = row.measure(Setting(**args))
        print(f"bench: {row.key}: {cell_of(row, measured[row.key])}", file=sys.stderr, flush=True)
    print(f"\n{introduction(about, args['seed'])}\n")
    print("| loop | torchrun | elastane |\n|---|---|---|")
    for row in ROWS:
        if row.key in measured:
            print(f"| {row.title} | {cell_of(row, measured[row.key])} |")
    write_json("frameworks", about, measured)
    return int(any(each.errors for results in measured.values() for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
