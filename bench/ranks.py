"""A world of ranks without a launcher: each is a process of one of the tables' modules."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastane.comms.group import WorldGroup

DEADLINE_S = 300.0


def joined(rank: int, size: int, port: int) -> WorldGroup:
    """Return the process group of a rank, whose rank 0 serves the store at `port`."""
    from elastane.comms.group import Wiring, WorldGroup

    return WorldGroup(Wiring(rank, size, "127.0.0.1", port, "0.0", serves=rank == 0)).build()


def output_of_rank_0(module: str, size: int, words: Sequence[object]) -> bytes:
    """Run `python -m MODULE --worker RANK PORT WORDS` for each rank; return what rank 0 prints.

    Raises subprocess.TimeoutExpired after DEADLINE_S, and CalledProcessError if rank 0 fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = [sys.executable, "-m", module, "--worker"]
    commands = [[*start, *map(str, (rank, port, *words))] for rank in range(size)]
    others = [subprocess.Popen(command) for command in commands[1:]]
    try:
        return subprocess.check_output(commands[0], timeout=DEADLINE_S)
    finally:
        for other in others:
            other.kill()
            other.wait()
