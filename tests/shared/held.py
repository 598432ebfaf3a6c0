"""What a process holds: descriptors, threads and memory."""

from __future__ import annotations

import os
from pathlib import Path

from joining import kill

# A worker that was a spare holds two descriptors and a thread more. One leaked a death is six.
SLACK = 4


def held_by_worker(pid):
    """Return the descriptors, threads and bytes of memory of a worker."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    counts = [len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")]
    return *counts, int(resident.split()[1]) << 10


def outlives(job, survivor, few, many):
    """Kill workers of three one by one; the survivor then holds what it held after the first few.

    Another worker joins before the next one is killed.
    """
    for number in range(many):
        if number == few:
            before = held_by_worker(survivor)
        kill({max(job.wait_size(3, count=1) - {survivor})})
        job.passes_size(2)
    job.wait_size(3)
    holds_again(job, survivor, before)


def holds_again(job, pid, before):
    """Wait until a worker holds what it held; it has old process groups until a garbage collection.

    A hundred groups would be as many threads, and four hundred descriptors.
    """
    slack = (SLACK, 1, 16 << 20)
    job.cluster.wait(
        lambda: all(
            after <= few + more
            for after, few, more in zip(held_by_worker(pid), before, slack, strict=True)
        ),
        f"the survivor holds {before} again",
    )
