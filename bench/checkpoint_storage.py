"""Writing and reading a checkpoint's file, compared with the disk's speed for plain bytes.

    python -m bench.checkpoint_storage [--mb N] [--folder PATH] [--reps N]

Each row writes a new file of N MB from memory that was touched before, durably (fsync of file and
folder). The ways take turns: the plain ones with O_DIRECT and through the page cache, in blocks of
16 MiB by one thread; and `storage`'s way, which also computes the digests, from aligned and from
unaligned memory. The ratio is the median over the turns, against the faster plain way of the same
turn. Then the same file is read and compared with its digests: from the page cache, and from the
disk.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import machine
from elastane.protocol.checkpoints import About, CheckpointPart, Key, folder_name
from elastane.storage import FoundCheckpoint, Repository, open_storage

BLOCK_BYTES = 16 << 20
GOAL = 0.85


def timed(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def plainly(path: Path, memory: memoryview, flags: int) -> None:
    """Write as dd does, and make it durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    for at in range(0, len(memory), BLOCK_BYTES):
        os.pwrite(descriptor, memory[at : at + BLOCK_BYTES], at)
    os.fsync(descriptor)
    os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


class Bench:
    """The memory for one file, and a folder on the measured disk."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.memory = mmap.mmap(-1, size_bytes + 4096)
        block = os.urandom(1 << 20)
        for at in range(0, size_bytes, len(block)):
            self.memory[at : at + len(block)] = block[: len(self.memory) - at]
        self.aligned = memoryview(self.memory)[:size_bytes]
        self.odd = memoryview(self.memory)[24 : 24 + size_bytes]
        self.repository = Repository(open_storage(str(folder / "place")))
        self.repository.storage.place()
        self.step = 0

    def next_folder(self) -> tuple[Key, str]:
        self.step += 1
        key = Key(0, 1, 0, self.step)
        return key, folder_name(key, "00c0ffee")

    def stored(self, memory: memoryview) -> None:
        """Write through `storage`."""
        _, folder = self.next_folder()
        self.repository.storage.write(f"{folder}/data", [memory])

    def writes(self) -> dict[str, Callable[[], None]]:
        """Return the ways, in the order of a turn."""
        return {
            "O_DIRECT, fsync": lambda: plainly(self.folder / "raw", self.aligned, os.O_DIRECT),
            "page cache, fsync": lambda: plainly(self.folder / "raw", self.aligned, 0),
            "storage, memory on pages": lambda: self.stored(self.aligned),
            "storage, memory that is not": lambda: self.stored(self.odd),
        }

    def turn(self) -> dict[str, float]:
        """Measure each way once; leaves no file."""
        took = {}
        for name, write in self.writes().items():
            took[name] = timed(write)
            (self.folder / "raw").unlink(missing_ok=True)
            for folder in self.repository.storage.folders():
                self.repository.storage.remove(folder)
            os.sync()
        return took

    def saved(self) -> FoundCheckpoint:
        key, folder = self.next_folder()
        record = self.repository.storage.write(f"{folder}/data", [self.aligned])
        about = About("bench", 1, 0.0, {}, "asked")
        self.repository.add_part(folder, CheckpointPart(0, 1, (record,), key, "00c0ffee", about))
        self.repository.publish_when_whole(folder, 1, wait_s=10)
        return self.repository.published()[0]

    def reads(self, reps: int) -> dict[str, list[float]]:
        found = self.saved()
        self.verified(found, fresh=False)
        return {
            "verify, page cache": [self.verified(found, fresh=False) for _ in range(reps)],
            "verify, disk": [self.verified(found, fresh=True) for _ in range(reps)],
        }

    def verified(self, found: FoundCheckpoint, *, fresh: bool) -> float:
        reasons = []
        took_s = timed(lambda: reasons.append(self.repository.verify(found, fresh=fresh)))
        assert reasons == [""], reasons
        return took_s


def told(name: str, seconds: list[float], size_bytes: int, ratio: str) -> None:
    median_s = statistics.median(seconds)
    pace = size_bytes / median_s / 1e9
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(f"| {name} | {median_s:.2f} s ({spread}) | {pace:.2f} GB/s | {ratio} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.checkpoint_storage")
    parser.add_argument("--mb", type=int, default=1000, help="size of the file (1000)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--reps", type=int, default=7, help="turns (7)")
    args = parser.parse_args()
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}, {about['date']}\n")
    print(f"| {args.mb} MB, fsync included | time | pace | of the plain way |\n|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(prefix="elastane-bench-", dir=args.folder))
    try:
        bench = Bench(folder, args.mb * 1_000_000)
        turns = [bench.turn() for _ in range(args.reps + 1)][1:]
        for name in turns[0]:
            plain = [min(each["O_DIRECT, fsync"], each["page cache, fsync"]) for each in turns]
            ratios = [best / each[name] for each, best in zip(turns, plain, strict=True)]
            goal = f" (goal {GOAL:.0%})" if name.startswith("storage") else ""
            ratio = f"{statistics.median(ratios):.0%}{goal}"
            told(name, [each[name] for each in turns], len(bench.aligned), ratio)
        for name, seconds in bench.reads(args.reps).items():
            told(name, seconds, len(bench.aligned), "")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
