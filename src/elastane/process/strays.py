"""Processes that workers left behind: they lost their parent, and the agent adopted them.

The agent is a subreaper. A descendant that made its own session or forked twice becomes the agent's
child once its parent is gone. After a worker group has ended, every child that the agent did not
start is such a stray. The kernel's list of children makes this cheap: no scan of /proc.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from elastane.process.process import is_ours, reap_orphans

# The children of a killed stray become strays in turn; no deeper tree than this is expected.
_ROUNDS_MAX = 50
_PAUSE_S = 0.002


def strays() -> list[int]:
    """Return the pids of children that this process did not start."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text(encoding="ascii")
        except OSError:
            continue  # a thread that ended meanwhile, or a kernel without this list
        found += [pid for pid in map(int, text.split()) if not is_ours(pid)]
    return found


async def kill_strays() -> int:
    """Kill all strays and their children in turn; return how many there were."""
    killed: set[int] = set()
    for _ in range(_ROUNDS_MAX):
        reap_orphans()
        left = strays()
        if not left:
            break
        for pid in left:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(_PAUSE_S)
    return len(killed)
