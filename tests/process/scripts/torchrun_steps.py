"""A training loop under a stock torchrun: writes down each step, and ends well after the last.

Arguments: file, steps. FAIL_AFTER: the step after which rank 0 fails in every attempt.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

out, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
facts = f"{world} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['NODE']} {os.getpid()}"
log = out.open("a", buffering=1)
for step in range(1, steps + 1):
    dist.all_reduce(torch.ones(1))
    log.write(f"{rank} {step} {facts} {time.monotonic():.4f}\n")
    if rank == 0 and step == int(os.environ.get("FAIL_AFTER", "0")):
        sys.exit(3)
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
