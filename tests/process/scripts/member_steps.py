"""A training loop that writes down each step: what the tests of membership look at.

Arguments: file, steps. MODE: `plain`, `drain` (asks should_checkpoint(), and exits then), `park`
(asks, saves and asks again), `term` (catches SIGTERM and agrees on a step by a collective), `alone`
(no torch, no process group). SWALLOWS: `ignores` or `handles` SIGTERM without ending.
"""

import os
import signal
import sys
import time
from pathlib import Path

out, steps = Path(sys.argv[1]), int(sys.argv[2])
mode = os.environ.get("MODE", "plain")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
checkpoint = out.with_suffix(".ck")
asked_to_go = []
if os.environ.get("SWALLOWS") == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif os.environ.get("SWALLOWS") == "handles":
    signal.signal(signal.SIGTERM, lambda *_: None)
if mode == "term":
    signal.signal(signal.SIGTERM, lambda *_: asked_to_go.append(1))


def saved() -> int:
    return int(checkpoint.read_text()) if checkpoint.exists() else 0


def save(step: int) -> None:
    if rank == 0:
        new = checkpoint.with_suffix(".new")
        new.write_text(str(step))
        new.replace(checkpoint)


def is_leaving(flag: float) -> bool:
    if mode == "drain":
        import elastane

        return elastane.should_checkpoint()
    return mode == "term" and flag > 0


if mode == "park":
    import elastane
if mode == "alone":
    first = saved()
else:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    place = torch.tensor([saved()])
    dist.broadcast(place, 0)
    first = int(place)

log = out.open("a", buffering=1)
facts = (
    f"{world} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['ELASTANE_ROUND']}"
    f" {os.environ['ELASTANE_ATTEMPT']} {os.environ['ELASTANE_NODE']} {os.getpid()}"
)
for step in range(first + 1, steps + 1):
    votes = 0.0
    if mode != "alone":
        vote = torch.tensor([float(len(asked_to_go))])
        dist.all_reduce(vote)
        votes = float(vote)
    log.write(f"{rank} {step} {facts} {time.time():.4f}\n")
    time.sleep(0.02)
    while mode == "park" and elastane.should_checkpoint():
        save(step)  # The next call waits until this worker is stopped.
    if is_leaving(votes):
        save(step)
        sys.exit(0)
    if step % 10 == 0:
        save(step)
if mode != "alone":
    dist.barrier()
    dist.destroy_process_group()
