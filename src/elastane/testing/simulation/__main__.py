"""python -m elastane.testing.simulation: play seeds, print the story of the first that fails."""

from __future__ import annotations

import argparse
import sys
import time

from elastane.testing.simulation.history import HistoryFailedError, run_seed


def main() -> int:
    """Play the seeds that the command line names; return 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m elastane.testing.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--mode", choices=("store", "endpoint"), default="store")
    options = parser.parse_args()
    began_s = time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        try:
            result = run_seed(seed, store_backed=options.mode == "store")
        except HistoryFailedError as fault:
            sys.stdout.write(f"{fault}\n")
            return 1
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"{options.count} histories held, in {took_s:.1f} s; the last: {result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
