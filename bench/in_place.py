"""Recovery in place: the cost of a lost, hung or leaving worker to the survivors, and of a step.

    python -m bench.in_place [--rows ROW ...] [--kills N] [--minutes N] [--torchft PYTHON]

Elastane and its peers in one run; prints Markdown, and writes bench/results/ as JSON. `--torchft`
names an interpreter that can import torchft (with its own environment); without it those cells are
empty. No row reads a checkpoint, because none exists.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from bench import goodput, nodes, recovery, torchft
from bench.harness import TORCHRUN_UNSHARED, BenchError, Sample, free_port, kill, tree_of
from bench.report import BenchResult, cell, machine, measured_by, write_json
from bench.trainers import RECENT_S, SCRIPTS, Trainers
from elastane.observe.events import read_events
from elastane.protocol.log_events import EventKind

WORKERS = 4
NEVER_S = 60.0
LONG_MINUTES = 10.0
# Steps of each kind for the first allocations, and for what torch prepares on first use.
WARM_UP_BLOCKS = 2
# Servers of stores, each with a port of this machine and a folder.
STORE_SERVERS = {
    "etcd": (
        *("etcd", "--data-dir", "{folder}/etcd", "--log-level", "error"),
        *("--listen-client-urls", "http://127.0.0.1:{port}"),
        *("--advertise-client-urls", "http://127.0.0.1:{port}"),
        *("--listen-peer-urls", "http://127.0.0.1:0"),
    ),
    "redis": ("redis-server", "--port", "{port}", "--dir", "{folder}", "--appendonly", "yes"),
}
# Between two faults: each finds the processes prepared that the one before has used.
APART_S = 1.0
# From the start of a spare until it waits, on a machine that is busy with four workers.
SPARE_READY_S = 6.0


@dataclass(frozen=True)
class Setting:
    """The extent of the measurement. `few`: the repetitions if a single one takes half a minute."""

    kills: int
    few: int
    steps: int
    minutes: float
    torchft: str


def times(setting: Setting, victim: int | None, number: int) -> int:
    """Return the number of repetitions: a worker that hangs is away for seconds each time."""
    if number != signal.SIGKILL:
        return 5 * setting.few
    return setting.kills if victim is None else max(1, setting.kills // 4)


def worker_lost(
    setting: Setting, victim: int | None = None, number: int = signal.SIGKILL
) -> BenchResult:
    """Inject a fault into a worker; return the seconds to the next step of all the others."""
    rng, result = random.Random(1), BenchResult()
    with Trainers() as job:
        job.start_agent(WORKERS, "--standalone")
        for _ in range(times(setting, victim, number)):
            job.wait_world(WORKERS)
            time.sleep(APART_S + rng.random() * 0.2)  # at a random moment of a step
            here = job.wait_world(WORKERS)
            hit = [pid for pid, last in here.items() if victim in (None, last.rank)]
            pid = rng.choice(hit)
            at_s = time.monotonic()
            kill([pid], number)
            took_s = job.next_step_s(here.keys() - {pid}, at_s, NEVER_S)
            result.samples.append(Sample(took_s))
        note = f"{job.judge()}, no survivor's process changed"
    result.samples = [replace(sample, note=note) for sample in result.samples]
    return result


def replaced(setting: Setting, *options: str) -> BenchResult:
    """SIGKILL any one of 4 workers; return the seconds until a world of 4 has stepped again."""
    rng, result = random.Random(1), BenchResult()
    with Trainers() as job:
        job.start_agent(WORKERS, "--standalone", *options)
        for _ in range(setting.few * 3):
            former = job.wait_world(WORKERS)
            time.sleep(SPARE_READY_S)  # a spare that took a rank has been replaced by then
            at_s = time.monotonic()
            kill([rng.choice(sorted(former))])
            time.sleep(RECENT_S)  # the dead worker's last step is no longer recent
            here = job.wait_world(WORKERS)
            number = next(iter(here.values())).round
            firsts = [
                next(commit.at_s for commit in job.watch.commits[pid] if commit.round == number)
                for pid in here
            ]
            result.samples.append(Sample(max(firsts) - at_s))
    return result


def spares(setting: Setting) -> dict[str, BenchResult]:
    return {
        "elastane without spares": replaced(setting),
        "elastane": replaced(setting, "--spares-per-node", "1"),
    }


def drained(setting: Setting) -> BenchResult:
    """SIGTERM one of two agents with two workers each; return the pause of the others' steps."""
    result = BenchResult()
    for _ in range(setting.few):
        with Trainers() as job:
            endpoint = f"127.0.0.1:{free_port()}"
            flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench")
            agents = [job.start_agent(2, *flags, "--node-id", name) for name in "ab"]
            here = job.wait_world(WORKERS)
            before = sum(commit.again for commit in here.values())
            at_s = time.monotonic()
            kill([agents[1]], signal.SIGTERM)
            stay = job.wait_world(2)
            result.samples.append(
                Sample(
                    _pause_s(job, stay.keys(), at_s),
                    redone=sum(commit.again for commit in stay.values()) - before,
                    note=job.judge(),
                )
            )
    return result


def coordinator_killed(setting: Setting) -> dict[str, BenchResult]:
    """SIGKILL the node that coordinates, with each store whose server is installed."""
    found = {"elastane": _coordinators_killed(setting, "file")}
    for backend in STORE_SERVERS:
        if shutil.which(STORE_SERVERS[backend][0]):
            found[f"elastane, {backend}"] = _coordinators_killed(setting, backend)
    return found


def _coordinators_killed(setting: Setting, backend: str) -> BenchResult:
    """Kill agent and worker of the coordinator's node; return the others' time to a next step."""
    result, rng, port = BenchResult(), random.Random(1), free_port()
    with Trainers() as job:
        endpoint = f"127.0.0.1:{port}" if backend in STORE_SERVERS else f"{job.folder}/store"
        if backend in STORE_SERVERS:
            words = (word.format(port=port, folder=job.folder) for word in STORE_SERVERS[backend])
            job.start([*words])
        meeting = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "bench")
        flags = (*meeting, "--nnodes", "2:3")
        for name in "abc":
            job.start_agent(1, *flags, "--node-id", name)
        for _ in range(setting.few * 5):
            here = job.wait_world(3)
            time.sleep(rng.random())  # at a random moment of a lease
            log = read_events(job.folder / "logs" / "bench")
            last = [each for each in log if each.kind == EventKind.COORDINATOR_STARTED][-1]
            victims = tree_of(last.pid)
            at_s = time.monotonic()
            kill(victims)
            took_s = job.next_step_s(here.keys() - victims, at_s, NEVER_S)
            result.samples.append(Sample(took_s))
            job.start_agent(1, *flags, "--node-id", last.node)
        note = f"{job.judge()}, no survivor's process changed"
    result.samples = [replace(sample, note=note) for sample in result.samples]
    return result


def _pause_s(job: Trainers, pids: Collection[int], since_s: float) -> float:
    """Return the longest time between two steps of the others since the signal."""
    gaps = []
    for pid, done in job.watch.poll().items():
        if pid in pids:
            times = [commit.at_s for commit in done if commit.at_s > since_s - 0.5]
            gaps += [late - early for early, late in itertools.pairwise(times)]
    return max(gaps)


def step_times(setting: Setting) -> dict[str, BenchResult]:
    """Measure steps of two workers, with the library and with plain DDP."""
    return _over("plain DDP", setting, workers=2, shard=0)


def sharded_step_times(setting: Setting) -> dict[str, BenchResult]:
    """Measure steps of two replicas of two workers, over the job's mesh and over torch's."""
    return _over("plain fully_shard()", setting, workers=4, shard=2)


def _over(peer: str, setting: Setting, *, workers: int, shard: int) -> dict[str, BenchResult]:
    """Measure steps with and without the library by turns in one run.

    The result is each block with the library relative to the plain blocks before and after it.
    Differences between runs, such as memory placement, and drift over minutes then affect both.
    """
    with tempfile.TemporaryDirectory() as name:
        size = ["--nproc-per-node", str(workers)]
        words = ["run", "--standalone", *size, "--log-dir", f"{name}/logs"]
        script = [str(SCRIPTS / "in_place_train.py"), name, "paired", str(setting.steps)]
        command = [sys.executable, "-m", "elastane", *words, *script, str(shard)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        blocks = json.loads((Path(name) / "blocks").read_text())
    plain, library = blocks["plain"][WARM_UP_BLOCKS:], blocks["library"][WARM_UP_BLOCKS:]
    around = [(before + after) / 2 for before, after in itertools.pairwise(plain)]
    more = statistics.median(own - other for own, other in zip(library, around, strict=False))
    note = f"{1000 * more:.2f} ms of {1000 * statistics.median(plain):.2f} ms"
    over = [Sample(own / other, note=note) for own, other in zip(library, around, strict=False)]
    return {peer: BenchResult([Sample(1.0)]), "elastane": BenchResult(over)}


def torchrun_kill(setting: Setting, victim: int) -> BenchResult:
    """Kill a worker of torchrun, with the setting with which an attempt can recover."""
    result = BenchResult()
    for _ in range(setting.few):
        sample = recovery.worker_kill(TORCHRUN_UNSHARED, workers=WORKERS, victim=victim)
        result.samples.append(sample)
    return result


def torchrun_stopped(_: Setting) -> BenchResult:
    """Stop a worker of torchrun, which gloo does not detect for half an hour."""
    return BenchResult([recovery.worker_kill(TORCHRUN_UNSHARED, WORKERS, number=signal.SIGSTOP)])


def torchrun_drained(setting: Setting) -> BenchResult:
    return BenchResult([nodes.node_drained(TORCHRUN_UNSHARED) for _ in range(setting.few)])


def peers(setting: Setting, victim: int | None, number: int) -> dict[str, BenchResult]:
    """Measure torchft, if there is one, with its own README's settings and with tuned ones."""
    if not setting.torchft:
        return {}
    return {
        f"torchft, {name}": torchft.worker_lost(
            setting.torchft, options, number, victim, setting.few
        )
        for name, options in torchft.SETTINGS.items()
    }


def kill_any(setting: Setting) -> dict[str, BenchResult]:
    return {
        "torchrun": torchrun_kill(setting, WORKERS - 1),
        **peers(setting, None, signal.SIGKILL),
        "elastane": worker_lost(setting),
    }


def kill_first(setting: Setting) -> dict[str, BenchResult]:
    return {
        "torchrun": torchrun_kill(setting, 0),
        "elastane": worker_lost(setting, victim=0),
    }


def stop_any(setting: Setting) -> dict[str, BenchResult]:
    return {
        "torchrun": torchrun_stopped(setting),
        **peers(setting, None, signal.SIGSTOP),
        "elastane": worker_lost(setting, number=signal.SIGSTOP),
    }


def drain(setting: Setting) -> dict[str, BenchResult]:
    return {"torchrun": torchrun_drained(setting), "elastane": drained(setting)}


def goodputs(setting: Setting) -> dict[str, BenchResult]:
    return {
        "torchrun": goodput.of_torchrun(WORKERS, min(setting.minutes, 2.0)),
        "elastane": goodput.of_elastane(WORKERS, setting.minutes),
    }


@dataclass(frozen=True)
class StepRow:
    """One line of the table; `unit` is the unit of its results."""

    key: str
    title: str
    target: str
    measure: Callable[[Setting], dict[str, BenchResult]]
    unit: str = "s"


ROWS = (
    StepRow(
        "kill",
        "SIGKILL of any one of 4 workers: to the next committed step of all others",
        "median 250 ms, 99th percentile 1 s, no step lost",
        kill_any,
    ),
    StepRow("kill-rank-0", "the same, always rank 0", "the same", kill_first),
    StepRow("stop", "SIGSTOP of any one of 4 workers: the same", "3 s", stop_any),
    StepRow(
        "coordinator",
        "SIGKILL of the agent with the coordinator and of its worker, one of 3 nodes with the file"
        " store: to the next committed step of the others",
        "500 ms",
        coordinator_killed,
    ),
    StepRow(
        "drain", "SIGTERM to an agent: how long the others are blocked", "no step redone", drain
    ),
    StepRow(
        "spare",
        "SIGKILL of one of 4 workers, with a warm spare: to the first step of 4 workers again",
        "500 ms",
        spares,
    ),
    StepRow(
        "step",
        "time of a step of two workers, by turns in one run: over plain DDP",
        "within 1%",
        step_times,
        unit="ratio",
    ),
    StepRow(
        "sharded-step",
        "the same with fully_shard(), two replicas of two workers: over a mesh of torch's",
        "within 1%",
        sharded_step_times,
        unit="ratio",
    ),
    StepRow(
        "goodput",
        "a worker of 4 killed each 10 s: useful time over wall time",
        "90%",
        goodputs,
        unit="%",
    ),
)


def line_of(row: StepRow, results: dict[str, BenchResult]) -> str:
    """Return a row of the table, in Markdown."""
    own = results.pop("elastane")
    others = "<br>".join(f"{name}: {cell(result, row.unit)}" for name, result in results.items())
    return f"| {row.title} | {others} | {row.target} | {cell(own, row.unit)} |"


def introduction(about: dict[str, str], python: str) -> str:
    """Return the conditions of the figures, in words."""
    peers = f", torchft {torchft.version(python)}" if python else ""
    return (
        f"{measured_by('in-place', about, f' (CPU, gloo){peers}')} Medians; never: not within"
        f" {NEVER_S:g} s. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which"
        " its attempts often do not recover; its times are to the first step of the new attempt,"
        " whose checkpoint is one number."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.in_place", description=__doc__)
    keys = [row.key for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=keys, metavar="ROW", help=", ".join(keys))
    parser.add_argument("--kills", type=int, default=200, help="of elastane's workers (200)")
    parser.add_argument("--few", type=int, default=3, help="times, where one takes long (3)")
    parser.add_argument("--steps", type=int, default=2000, help="of the run that times them")
    parser.add_argument("--minutes", type=float, default=LONG_MINUTES, help="of goodput (10)")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="one that has torchft")
    args = vars(parser.parse_args())
    chosen = args.pop("rows")
    about, measured, failed = machine(), {}, False
    for row in ROWS:
        if chosen and row.key not in chosen:
            continue
        try:
            measured[row.key] = row.measure(Setting(**args))
        except BenchError as error:
            print(f"bench: {row.key}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        for name, result in measured[row.key].items():
            print(
                f"bench: {row.key}: {name}: {cell(result, row.unit)}", file=sys.stderr, flush=True
            )
    print(f"\n{introduction(about, args['torchft'])}\n")
    print("| what | others here | to reach | elastane |\n|---|---|---|---|")
    for row in ROWS:
        if row.key in measured:
            print(line_of(row, dict(measured[row.key])))
    write_json("in-place", about, measured)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
