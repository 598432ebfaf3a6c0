"""`elastane chaos`: injects faults into a job that runs on this machine, by a seed.

Each fault is logged as an event of the job, so that `explain` and the dashboard show it. Only
processes of this user are signalled.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from elastane.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from elastane.testing.chaos import RunningJob
    from elastane.testing.plans import Kind

# Option, kind of fault, and what it does.
_FAULTS: tuple[tuple[str, Kind, str], ...] = (
    ("--kill-worker", "kill-worker", "SIGKILL to a worker (the default)"),
    ("--hang", "stop-worker", "SIGSTOP to a worker, for good"),
    ("--slow", "slow-worker", "a worker gets half of its time, for 2 s"),
    ("--kill-agent", "kill-agent", "SIGKILL to an agent alone"),
    ("--kill-node", "kill-node", "a node loses power: its agent and workers are killed at once"),
    ("--stop-node", "stop-node", "SIGTERM to an agent, like a preemption"),
    ("--pause-node", "pause-node", "all processes of a node are stopped for 1 s"),
    ("--partition", "partition", "a node and the others here lose all packets, for 10 s"),
)
# Faults after which the world continues.
_HARMLESS = ("slow-worker", "pause-node")
_SEED_MAX = 1_000_000
# After the last fault the job has this long to train again.
_RECOVERY_S = 60.0
_POLL_S = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("job", metavar="JOB", help="name of a job whose agents run on this machine")
    for option, _, text in _FAULTS:
        add(option, action="store_true", help=text)
    add(
        "--every",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds from fault to fault, give or take half (%(default)g)",
    )
    add(
        "--duration",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds after which it injects no more faults (%(default)g)",
    )
    add("--seed", metavar="N", type=int, default=None, help="the same seed gives the same plan")
    add(
        "--keep",
        metavar="N",
        type=int,
        default=1,
        help="nodes of this machine that are never taken away (%(default)s); they do not come back",
    )


def main(args: argparse.Namespace) -> int:
    """Inject the faults; return 1 if the job failed, or does not train again."""
    from elastane.process import environment
    from elastane.process.files import JobRegistry, runtime_folder
    from elastane.testing.chaos import RunningJob
    from elastane.testing.plans import FaultPlan

    for name in ("every", "duration"):
        if getattr(args, name) <= 0:
            raise UsageError(
                f"--{name} {getattr(args, name):g}",
                slug="usage",
                expected="seconds above 0",
                next_step="elastane chaos JOB --kill-worker --every 30 --duration 600",
            )
    seed = random.randrange(_SEED_MAX) if args.seed is None else args.seed
    named = (option.removeprefix("--").replace("-", "_") for option, _, _ in _FAULTS)
    chosen = [kind for name, (_, kind, _) in zip(named, _FAULTS, strict=True) if vars(args)[name]]
    plan = FaultPlan.random(
        seed,
        args.duration,
        args.every,
        chosen or ["kill-worker"],
        back_s=None,
        keep=args.keep,
    )
    job = RunningJob(args.job, JobRegistry(runtime_folder(environment.snapshot())))
    print(f"seed {seed}: {len(plan.faults)} faults into {job.job}", flush=True)
    try:
        left_out = len(plan.faults) - len(plan.run(job, lambda text: print(text, flush=True)))
        if left_out:
            print(_left_out_line(left_out, args.keep), flush=True)
        is_well = _await_training(job)
    finally:
        job.close()
    print("\n".join(_summary(job)))
    return int(ExitCode.DONE if is_well else ExitCode.WORKER_FAILED)


def _left_out_line(count: int, keep: int) -> str:
    from elastane.protocol.words import counted

    few = f"fewer than {counted(keep, 'node')} would have been left here"
    return f"{counted(count, 'fault')} left out: no target was there, or {few}"


def _await_training(job: RunningJob) -> bool:
    """Wait until the job trains again or has ended; return False if it failed or does neither."""
    from elastane.observe.account import NOT_HERE
    from elastane.protocol.log_events import EventKind

    until_s = time.monotonic() + _RECOVERY_S
    while time.monotonic() < until_s:
        ended = job.events(EventKind.JOB_ENDED)
        if ended:
            return bool(ended[-1].data.get("ok"))
        if _trains(job):
            return True
        if not any(node.is_alive for node in job.nodes):
            print("no agent of the job is left on this machine")
            return False
        time.sleep(_POLL_S)
    if job.events(EventKind.ROUND_SETTLED):
        print(f"the job does not train again within {_RECOVERY_S:g} s of the last fault")
    else:
        print(f"whether the job trains again is not known: {NOT_HERE}")
    return False


def _trains(job: RunningJob) -> bool:
    """Whether the newest world trains, and is newer than each fault that ends a world.

    If the script reports no steps, its workers count as training from their start.
    """
    from elastane.protocol.log_events import EventKind

    begins = EventKind.WORKERS_TRAINING
    if not job.events(begins):
        begins = EventKind.WORKERS_STARTED
    waits: set[str] = set()
    is_settled = False
    for event in job.events(
        EventKind.FAULT_INJECTED, EventKind.INCIDENT, EventKind.ROUND_SETTLED, begins
    ):
        if event.kind == EventKind.ROUND_SETTLED:
            is_settled, waits = True, set(str(event.data.get("members", "")).split())
        elif event.kind == begins:
            waits.discard(event.node)
        elif event.kind == EventKind.INCIDENT or event.data.get("fault") not in _HARMLESS:
            is_settled = False
    return is_settled and not waits


def _summary(job: RunningJob) -> list[str]:
    from elastane.observe.account import account_lines, account_of
    from elastane.protocol.log_events import EventKind
    from elastane.protocol.words import counted

    events = job.events()
    kinds = Counter(event.kind for event in events)
    said = (
        counted(kinds[EventKind.INCIDENT], "incident"),
        f"{counted(kinds[EventKind.RESTART], 'restart')} of all workers",
        f"{counted(kinds[EventKind.REPLACEMENT], 'replacement')} of lost ones in place",
    )
    more = account_lines(account_of(events, time.time()))
    return [
        "",
        f"since the job began: {', '.join(said)}",
        *more,
        f"next: elastane explain {job.job}",
    ]
