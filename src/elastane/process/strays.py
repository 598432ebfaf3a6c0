"""What workers left behind: processes that lost their parent and were adopted by the agent.

The agent is a subreaper, so a descendant that made its own session or forked twice becomes its
child once its own parent is gone. After a worker group has ended, every child that is not the
agent's own is such a stray. The kernel's list of children makes this cheap: no scan of /proc.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from elastane.process.process import is_ours, reap_orphans

# Strays of strays show up once their parents are gone; deeper trees than this are not met.
_ROUNDS_MAX = 50
_PAUSE_S = 0.002


def strays() -> list[int]:
    """Return the pids of children that nobody here started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "children").read_text(encoding="ascii")
        except OSError:
            continue  # A thread that ended meanwhile, or a kernel without this list.
        found += [pid for pid in map(int, text.split()) if not is_ours(pid)]
    return found


async def kill_strays() -> int:
    """Kill all strays and what they leave behind in turn; return how many there were."""
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
