"""`elastane demo`: train a real model while workers and nodes die, and show what it cost.

Two agents on this machine, with two workers each, run a script of elastane.examples that recovers
in place. With --restart they run its digits.py, which does not use elastane. At set points of the
training a worker is killed, then a node with its agent, then a new node arrives. With --chaos these
faults come at instants from a seed, and the final weights are compared with those of an undisturbed
run.

Exit code 0: the job ended alone, reached its promised result, and with --chaos has equal weights.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from elastane.cli._demo_story import (
    EXAMPLES,
    RESTART,
    STORY,
    Comparison,
    DemoPlan,
    DemoResult,
    Example,
    chaos,
)
from elastane.errors import ConfigurationError, ElastaneError, ExitCode, UsageError

# The time limit of the demo: longer than a slow machine needs, so a job that takes longer hangs.
TIMEOUT_S = 300.0
# Rounds of faults with --chaos, in the normal and in the short training.
CHAOS_ROUNDS, CHAOS_ROUNDS_FAST = 2, 1
SEEDS = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--example", choices=[*EXAMPLES], help="model to train (default: digits)")
    add(
        "--chaos",
        action="store_true",
        help="inject faults at random times and compare the final weights",
    )
    add("--seed", type=int, metavar="N", help="seed for the times of --chaos (default: random)")
    add("--fast", action="store_true", help="train half as long")
    add(
        "--restart",
        action="store_true",
        help="use a script without elastane: all workers restart after a fault",
    )
    add("--json", action="store_true", help="print the result as JSON, and progress on stderr")
    add(
        "--keep", metavar="DIR", help="create this folder and keep data, logs and checkpoints in it"
    )
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="give up after this many seconds (%(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; return its exit code."""
    example, plan, seed = chosen(args)
    check_packages(example)
    from elastane.cli._demo_show import Show, cluster_of
    from elastane.observe.screen import face_for

    stream = sys.stderr if args.json else sys.stdout
    begun = time.monotonic()
    with working_folder(args.keep) as folder, ending_on_signals():
        script = example.command(folder, fast=args.fast)
        if args.chaos:
            script = example.exact(folder, fast=args.fast, delays=True)
        with cluster_of(folder, script) as cluster:
            show = Show(cluster, plan)
            with face_for(stream, "elastane demo") as face:
                show.play(face.show, args.timeout)
            total_s = time.monotonic() - begun
            result = DemoResult(
                example=example,
                learned=show.learned(),
                steps=show.view.step,
                total_s=total_s,
                acts=show.costs(),
                comparison=compare(folder, example, args, stream, seed) if args.chaos else None,
                kept=args.keep or "",
            )
    print(result.as_json() if args.json else result.as_text())
    return int(ExitCode.DONE if result.ok else ExitCode.WORKER_FAILED)


def chosen(args: argparse.Namespace) -> tuple[Example, DemoPlan, int]:
    """Return the training, the plan of faults, and the plan's seed."""
    if args.restart and (args.chaos or args.example):
        raise UsageError(
            "demo: --restart with --chaos or --example",
            slug="usage",
            expected="--restart alone, which has its own example and faults",
            next_step="elastane demo --restart, or leave --restart out",
        )
    if args.seed is not None and not args.chaos:
        raise UsageError(
            f"demo: --seed {args.seed} without --chaos",
            slug="usage",
            expected="--chaos, whose random faults follow from the seed",
            next_step=f"elastane demo --chaos --seed {args.seed}",
        )
    if args.restart:
        return RESTART, STORY, 0
    example = EXAMPLES[args.example or "digits"]
    if not args.chaos:
        return example, STORY, 0
    seed = random.randrange(SEEDS) if args.seed is None else args.seed
    return example, chaos(seed, CHAOS_ROUNDS_FAST if args.fast else CHAOS_ROUNDS), seed


def compare(
    done: Path, example: Example, args: argparse.Namespace, stream: TextIO, seed: int
) -> Comparison:
    """Train once more undisturbed, and compare the ends with those in the folder `done`."""
    from elastane.cli._demo_show import endings, run_undisturbed

    print("the same training once more, undisturbed, to compare:", file=stream, flush=True)
    folder = done / "undisturbed"
    script = example.exact(folder, fast=args.fast, delays=False)
    run_undisturbed(folder, script, args.timeout)
    return Comparison(seed, endings(done), endings(folder))


def check_packages(example: Example) -> None:
    """Raise ConfigurationError if the script's own packages are not installed."""
    if missing := example.missing():
        raise ConfigurationError(
            f"demo: {', '.join(missing)} cannot be imported",
            slug="demo-packages",
            where=sys.executable,
            expected="the packages of elastane's extra `demo`",
            next_step="pip install 'elastane[demo]'",
        )


@contextmanager
def working_folder(keep: str | None) -> Iterator[Path]:
    """Yield a folder to keep, or one that is removed at the end if all went well."""
    if keep is not None:
        folder = Path(keep)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"demo: --keep {keep}: {error.strerror}",
                slug="demo-folder",
                expected="a folder that can be made and does not exist yet",
            ) from error
        yield folder.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="elastane-demo-"))
    try:
        yield folder
    except ElastaneError:
        raise  # The folder is kept, since the error names files in it.
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise like Ctrl-C, so that every context of the demo exits."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
