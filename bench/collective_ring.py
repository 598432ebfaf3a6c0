"""What the record of a collective costs, and what the thread beside the script does.

A collective that does nothing is called through torch's decorator's place, plainly, with recording
turned off, and with it. Processor time of the best of some runs, so that another program on the
machine counts little. The last rows are one look at torch's counts, and one read of all its 2,000
records. Run: python -m bench.collective_ring
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

CALLS = 100_000
RUNS = 7
FLIGHT_RECORDS = 2_000


def best_us(work: Callable[[], object], calls: int) -> float:
    """Return the least processor time of one call, in microseconds."""
    found = []
    for _ in range(RUNS):
        begun_s = time.process_time()
        for _ in range(calls):
            work()
        found.append((time.process_time() - begun_s) / calls)
    return min(found) * 1e6


def main() -> None:
    """Print the table."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as native

    from elastane.process import collectives
    from elastane.process.status_page import StatusPage, WorkerPage

    def nothing(_tensor: Any, *_args: Any) -> None:
        """Reduce nothing."""

    recorded = collectives._recording(nothing, "all_reduce", 1)
    tensor = torch.ones(7)

    def plain() -> None:  # torch's decorator is a frame of its own
        nothing(tensor)

    def wrapped() -> None:
        recorded(tensor)

    bare_us = best_us(plain, CALLS)
    rows = [("record, turned off", best_us(wrapped, CALLS) - bare_us)]
    page = StatusPage.create()
    collectives.begin(WorkerPage.open(os.dup(page.fd)))
    rows.append(("record", best_us(wrapped, CALLS) - bare_us))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(FLIGHT_RECORDS):
        dist.all_reduce(tensor)
    dump: Any = native._dump_fr_trace_json
    rows.append(("one look at torch's counts", best_us(lambda: dump(False, False), 2_000)))
    rows.append(("one read of torch's records", best_us(lambda: dump(True, False), 3)))
    print("| what | microseconds |\n|---|---|")
    for what, cost_us in rows:
        print(f"| {what} | {cost_us:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
