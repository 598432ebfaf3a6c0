"""What a process holds: descriptors, threads and memory."""

from __future__ import annotations

import os
from pathlib import Path

# A worker that was a spare holds two descriptors and a thread more. One leaked a death is six.
SLACK = 4


def held_by_worker(pid):
    """Return the descriptors, threads and bytes of memory of a worker."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    counts = [len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")]
    return *counts, int(resident.split()[1]) << 10


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
