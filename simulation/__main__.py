"""`python -m simulation`: plays a history from each seed, and explains the first that fails.

Owns the options and the output. It opens no socket, starts no worker and writes no file.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from elastane.cli.parser import VerbParser
from elastane.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from simulation import Cut, HistoryFailedError, HistorySetup

_MODES = {"store": (True,), "endpoint": (False,), "both": (True, False)}


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    description = "play the control plane of whole clusters in virtual time, faults and all"
    parser = VerbParser(prog="python -m simulation", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--seed", metavar="N", type=int, default=0, help="the first seed (default: 0)")
    add("--seeds", metavar="N", type=int, default=1, help="how many seeds (default: 1)")
    add("--mode", choices=[*_MODES], default="both", help="jobs with a store, without, or both")
    add("--in-place", action="store_true", help="jobs whose workers recover in place")
    of_kind: dict[str, Any] = {"dest": "kind", "action": "store_const", "default": ""}
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--shrinks", **of_kind, const="shrinks", help="of these, such as run an unmodified script")
    kind(
        "--planned", **of_kind, const="planned", help="of these, with boundaries where workers join"
    )
    kind(
        "--fails",
        **of_kind,
        const="fails",
        help="a worker of the script raises an error at one step",
    )
    what = "the same, where workers join at boundaries"
    kind("--planned-fails", **of_kind, const="planned-fails", help=what)
    what = "of these, such as shard their state over replicas of N nodes"
    add("--span", metavar="N", type=int, default=0, help=what)
    add("--story", action="store_true", help="tell what happened, also where all held")
    add("--jobs", metavar="N", type=int, default=1, help="processes (default: 1)")
    add("--without", metavar="N,N", default="", help="leave these faults of the plan out")
    add("--nodes", metavar="N", type=int, default=0, help="at most so many nodes at the begin")
    add("--transcript", metavar="FILE", default="", help="play the commands of a page of the docs")
    return parser


def main(words: list[str] | None = None) -> int:
    """Play, and print an error as `elastane` does."""
    try:
        return _main(_parser().parse_args(words))
    except UsageError as error:
        print(f"simulation: {error}", file=sys.stderr)
        return int(error.exit_code)


def _main(args: argparse.Namespace) -> int:
    """Play histories; return 1, after printing the story, if one breaks an invariant."""
    if args.transcript:
        return _transcript(args.transcript)
    if min(args.seeds, args.jobs) < 1 or min(args.nodes, args.seed, args.span) < 0:
        raise UsageError(
            f"--seed {args.seed} --seeds {args.seeds} --jobs {args.jobs} --nodes {args.nodes}"
            f" --span {args.span}",
            slug="usage",
            expected="a seed from 0 on, at least one seed and one process, nodes of a replica",
        )
    if args.story or args.without or args.nodes:
        return _tell(args)
    return _play(args)


def _play(args: argparse.Namespace) -> int:
    from simulation.batch import play

    began_s = time.monotonic()
    seeds = range(args.seed, args.seed + args.seeds)
    tally = play(seeds, _MODES[args.mode], args.jobs, **_drawn(args))
    took_s = time.monotonic() - began_s
    if tally.failed is not None:
        return _explain(*tally.failed, **_drawn(args))
    sys.stdout.write(
        f"{tally.histories} histories held, in {took_s:.1f} s"
        f" ({tally.histories / max(took_s, 1e-9):.0f} a second): {tally.worlds} worlds,"
        f" {tally.restarts} restarts, {tally.messages} messages, {tally.steps} steps of training\n"
    )
    return 0


def _tell(args: argparse.Namespace) -> int:
    """Tell the story of each seed, and stop at one that fails."""
    from simulation import History, HistoryFailedError, setup_of

    cut = _cut(args)
    for seed in range(args.seed, args.seed + args.seeds):
        for store_backed in _MODES[args.mode]:
            setting = setup_of(seed, store_backed=store_backed, **_drawn(args))
            history = History(setting, cut)
            try:
                result = history.run()
            except HistoryFailedError as failure:
                sys.stdout.write(f"{failure}\n")
                return int(ExitCode.WORKER_FAILED)
            sys.stdout.write(f"{history.cluster.story.text()}\n\n{result}\n")
    return 0


def _drawn(args: argparse.Namespace) -> dict[str, Any]:
    """Return what kind of jobs are drawn."""
    return {"in_place": args.in_place or args.span > 0, "span": args.span, "kind": args.kind}


def _explain(seed: int, store_backed: bool, **drawn: Any) -> int:
    """Tell the smallest history found that fails as this one does."""
    from simulation import Cut, setup_of
    from simulation.shrink import shrunk

    setting = setup_of(seed, store_backed=store_backed, **drawn)
    failure = _failure(setting)
    sys.stdout.write(f"seed {seed} ({setting.mode}) fails; looking for less that fails as well\n\n")
    sys.stdout.flush()
    sys.stdout.write(f"{shrunk(setting, Cut(), failure)}\n")
    return int(ExitCode.WORKER_FAILED)


def _failure(setting: HistorySetup) -> HistoryFailedError:
    from simulation import Cut, History, HistoryFailedError

    try:
        History(setting, Cut()).run()
    except HistoryFailedError as failure:
        return failure
    raise AssertionError(f"seed {setting.seed} failed once and held once: not one history")


def _cut(args: argparse.Namespace) -> Cut:
    from simulation.kept import cut_of

    try:
        return cut_of(args.without, args.nodes)
    except ValueError as error:
        raise UsageError(
            f"--without {args.without}: {error}",
            slug="usage",
            expected="numbers of faults, as the replay command of a story has them",
        ) from error


def _transcript(name: str) -> int:
    """Print a page with the output of its commands as it is now."""
    from pathlib import Path

    from simulation.transcript import replayed

    try:
        text = Path(name).read_text("utf-8")
    except OSError as error:
        raise UsageError(f"--transcript {name}: {error.strerror}", slug="usage") from error
    sys.stdout.write(replayed(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
