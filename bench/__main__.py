"""Entry point: `python -m bench` prints every table, `python -m bench TABLE ...` one of them.

python -m bench
python -m bench in-place --rows kill --kills 20
python -m bench --rows drain          (rows of the first table)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from bench.harness import POLL_S, kill, marked

# Each process of a table inherits this variable.
RUN_VARIABLE = "BENCH_RUN"
# In which a table that is interrupted removes its folders and networks.
END_S = 30.0


@dataclass(frozen=True)
class BenchTable:
    """One table: its name here, the module that prints it, and its heading."""

    name: str
    module: str
    heading: str


TABLES = (
    BenchTable("restart", "bench.table", "Any torchrun script: restarts, beside torchrun"),
    BenchTable("in-place", "bench.in_place", "Scripts that recover in place, beside their peers"),
    BenchTable("frameworks", "bench.frameworks", "Kills in the loops of frameworks, and step cost"),
    BenchTable("survive", "bench.survive", "A script of epochs, with four kills in each run"),
    BenchTable("arrival", "bench.arrival", "A node arrives at 100 MB of state"),
    BenchTable("data", "bench.permutation", "The order of elastic data"),
    BenchTable("ring", "bench.collective_ring", "The record of a collective"),
    BenchTable("reduction", "bench.reduction", "The sum that does not depend on the world"),
    BenchTable("slow-worker", "bench.slow_worker", "Virtual shards beside a slow worker"),
    BenchTable("checkpoints", "bench.checkpoints", "Saving, and getting back, beside torch's ways"),
    BenchTable("storage", "bench.checkpoint_storage", "A checkpoint's file, written and verified"),
    BenchTable("joining", "bench.joining", "Nodes that join one rendezvous, and the next round"),
    BenchTable(
        "kubernetes", "bench.kubernetes", "ElasticJobs: made, at rest, and a coordinator lost"
    ),
    BenchTable("long-log", "bench.long_log", "The log of a thousand nodes after a week, read"),
    BenchTable(
        "crowd", "bench.crowd", "A thousand agents without workers; a hundred die and come back"
    ),
)


def run(table: BenchTable, words: list[str]) -> int:
    """Print a table in a separate process, because some tables open thousands of connections.

    No process of the table outlives this call, also if it ends by SIGTERM.
    """
    print(f"\n{table.heading}:\n", flush=True)
    mark = uuid.uuid4().hex
    env = {**os.environ, RUN_VARIABLE: mark}
    process = subprocess.Popen([sys.executable, "-m", table.module, *words], env=env)
    try:
        return process.wait()
    except SystemExit:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
        raise
    finally:
        while pids := marked(f"{RUN_VARIABLE}={mark}"):
            kill(pids)
            process.poll()
            time.sleep(POLL_S)


def exit_by(number: int, _: FrameType | None) -> NoReturn:
    """End this process as a shell reports a signal."""
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, exit_by)
    # Tables inherit an ignored signal, as of a shell's background job, and not a handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = sys.argv[1:]
    named = {table.name: table for table in TABLES}
    if words and words[0] in named:
        return run(named[words[0]], words[1:])
    if words[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\ntables: {', '.join(named)}")
        return 0
    if "--rows" in words:
        return run(TABLES[0], words)
    codes = [run(table, words if table is TABLES[0] else []) for table in TABLES]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
