"""Whether this NCCL lets several ranks share a GPU, and whether an abort of it returns.

nccl_probe.py RANK WORLD PORT
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=40))
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:7.3f} s  rank {rank}: {what}", flush=True)

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=30)
    group = dist.ProcessGroupNCCL(dist.PrefixStore("a", store), rank, world, options)
    tensor = torch.full((1 << 20,), float(rank + 1), device="cuda")
    group.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    say(f"NCCL {torch.cuda.nccl.version()}: sum {tensor[0].item()} of {world} ranks")
    for size in (1 << 10, 1 << 20, 1 << 24):
        tensor = torch.ones(size, device="cuda")
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(10):
            group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        say(f"all-reduce of {4 * size} bytes: {(time.monotonic() - start) * 100:.2f} ms")
    if rank == world - 1:
        say("does not take part in the next one")
        time.sleep(12)
        os._exit(0)
    group.allreduce([tensor])
    event = torch.cuda.current_stream().record_event()
    time.sleep(1)
    say(f"the collective is done: {event.query()}")
    start = time.monotonic()
    thread = threading.Thread(target=group.abort, daemon=True)
    thread.start()
    thread.join(8)
    say(f"abort returned: {not thread.is_alive()} after {time.monotonic() - start:.3f} s")
    torch.cuda.synchronize()
    say("the device is free")
    again = dist.ProcessGroupNCCL(dist.PrefixStore("b", store), rank, world - 1, options)
    tensor = torch.ones(1 << 10, device="cuda")
    again.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    say(f"another communicator of {world - 1}: sum {tensor[0].item()}")
    os._exit(0)


if __name__ == "__main__":
    main()
