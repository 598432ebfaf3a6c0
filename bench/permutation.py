"""The order of elastic data compared with torch's sampler: rate, start, resume, and memory.

Each start and each resume of an epoch is measured in a separate process, from before the sampler is
made to its first index. Memory is the process's largest growth meanwhile. torch's is measured at
10^7 only: at 10^9 it would take 50 GB. Run: python -m bench.permutation
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

N_OURS = 10**9
N_TORCH = 10**7
BATCH = 4_096
REPETITIONS = 5
BLOCKS = (64, 1_024, 4_096, 8_192, 65_536)
SIZES = (10_007, 10**6, 10**9, 2**40)
RATE_S = 0.5


def rate(n: int, block: int) -> float:
    """Return the indices for each second of a core's time, in blocks of one size."""
    from elastane.data.permutation import Permutation

    order, size = Permutation(n, 1, 2), min(block, n)
    starts = n - size + 1
    begun, calls = time.process_time(), 0
    while time.process_time() - begun < RATE_S:
        start = calls * 982_451_653 % starts
        order.block(start, start + size)
        calls += 1
    return calls * size / (time.process_time() - begun)


def ours(n: int, part: float) -> list[int]:
    from elastane.data.sampler import ElasticBatchSampler

    sampler = ElasticBatchSampler(n, BATCH, seed=1).bind(1, 8)
    samples = int(n * part) // BATCH * BATCH
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "samples": samples})
    return next(iter(sampler))


def torchs(n: int, part: float) -> list[int]:
    """Resume as a script does with torch's sampler: skip the indices."""
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(range(n), 8, 1, seed=1)  # type: ignore[arg-type,var-annotated]
    sampler.set_epoch(3)
    indices = iter(sampler)
    for _ in range(int(n * part) // 8):
        next(indices)
    return [next(indices) for _ in range(BATCH // 8)]


WAYS = {"elastane": ours, "torch": torchs}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def begin(way: str, n: int, part: float) -> None:
    """Print seconds and bytes of one start; imports, and one small start, come before it."""
    WAYS[way](100_000, part)
    before = peak_bytes()
    begun = time.perf_counter()
    WAYS[way](n, part)
    seconds = time.perf_counter() - begun
    print(json.dumps([seconds, peak_bytes() - before]))


def begun(way: str, n: int, part: float) -> tuple[float, float]:
    """Return median seconds and largest growth in bytes, over separate processes."""
    command = [sys.executable, "-m", "bench.permutation", way, str(n), str(part)]
    found = [json.loads(subprocess.check_output(command)) for _ in range(REPETITIONS)]
    return statistics.median(one[0] for one in found), max(one[1] for one in found)


def main() -> int:
    if len(sys.argv) > 1:
        begin(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
        return 0
    print("| n | " + " | ".join(f"blocks of {block:,}" for block in BLOCKS) + " |")
    print("|---|" + "---|" * len(BLOCKS))
    for n in SIZES:
        cells = [f"{rate(n, block) / 1e6:.0f} M/s" for block in BLOCKS]
        print(f"| {n:,} | {' | '.join(cells)} |")
    print("\n| to the first batch of rank 1 of 8 | n | seconds | memory |\n|---|---|---|---|")
    for way, n in (("elastane", N_OURS), ("torch", N_TORCH)):
        for what, part in (("start of an epoch", 0.0), ("resume half-way", 0.5)):
            seconds, grown = begun(way, n, part)
            print(f"| {way}: {what} | {n:,} | {seconds:.6f} | {grown / 2**20:.1f} MiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
