"""The cost of an agent while its workers train: its own resident memory and CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness import BenchJob, Launcher, Node, Sample
from bench.recovery import standalone_flags

WINDOW_S = 10.0
WORKERS = 2


@dataclass(frozen=True)
class AgentCost:
    """One measurement of an agent: its share of one core, and its resident memory at the end."""

    cpu_percent: float
    resident_bytes: int


def agent_cost(launcher: Launcher, window_s: float = WINDOW_S) -> AgentCost:
    """Measure the agent of a job of two workers over a period."""
    with BenchJob(launcher) as job:
        node = Node("a")
        job.start(node, standalone_flags(WORKERS))
        job.wait_training(WORKERS)
        begun, used = time.monotonic(), cpu_seconds(node.pid)
        job.wait_for(lambda: time.monotonic() - begun >= window_s, "window", 2 * window_s)
        spent = cpu_seconds(node.pid) - used
        return AgentCost(100 * spent / (time.monotonic() - begun), resident_bytes(node.pid))


def cpu_sample(launcher: Launcher) -> Sample:
    """Return the agent's CPU in percent of one core, as seconds; memory as the note."""
    cost = agent_cost(launcher)
    return Sample(cost.cpu_percent, note=f"{cost.resident_bytes / 2**20:.0f} MB resident")


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
