"""The output of a job's workers, read back from its folder: which files there are, their lines
with times, merged.

It owns reading and order; who wrote a file is in the folder's worker.jsonl, when each line was
written in the file's time index (see runtime.streams.index). It only reads, holds a bounded
piece of each file, and leaves out what cannot be read.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.process.streams.bounds import LINE_BYTES_MAX
from elastane.process.streams.files import WORKER_FILE
from elastane.process.streams.index import TimeIndex
from elastane.process.streams.kept import earlier
from elastane.process.streams.plan import parse_rank_dir
from elastane.protocol.model import Fence
from elastane.protocol.unreadable import UNREADABLE

# One piece of a file: a job of a thousand workers is merged within 64 MB.
_CHUNK_BYTES = 32 << 10
_STD_NAMES = ("stdout", "stderr")
assert _CHUNK_BYTES <= LINE_BYTES_MAX


@dataclass(frozen=True)
class Selection:
    """Which output is wanted; an empty set means all."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    rounds: frozenset[int] = frozenset()
    attempts: frozenset[int] = frozenset()
    stds: frozenset[str] = frozenset()

    def takes_fence(self, fence: Fence, rank: int) -> bool:
        """Tell whether a worker of this fence and rank is wanted."""
        wanted = (
            (self.ranks, rank),
            (self.rounds, fence.round),
            (self.attempts, fence.attempt),
        )
        return all(not chosen or value in chosen for chosen, value in wanted)

    def takes_worker(self, worker: WorkerNote) -> bool:
        """Tell whether the worker's node, by its name or its host's, is wanted."""
        return not self.nodes or worker.node in self.nodes or worker.host in self.nodes


class WorkerNote(msgspec.Struct, frozen=True):
    """Who wrote the files of a folder, as the agent noted it."""

    node: str = ""
    host: str = ""
    role: str = ""
    local_rank: int = -1


@dataclass(frozen=True)
class StreamFile:
    """One log file and whose it is."""

    path: Path
    fence: Fence
    rank: int
    std: str
    worker: WorkerNote

    @property
    def order(self) -> tuple[Fence, int, int]:
        """The place among a job's files: by round, attempt, rank; stdout first."""
        return (self.fence, self.rank, _STD_NAMES.index(self.std))


@dataclass(frozen=True)
class LogLine:
    """One line without its end, and when it had been written by the clock of its host."""

    time_ns: int
    stream: StreamFile
    text: bytes


def find_streams(job_dir: Path, selection: Selection) -> list[StreamFile]:
    """Return the wanted files of a job's folder in their order."""
    found: list[StreamFile] = []
    for folder in job_dir.glob("round_*/attempt_*/rank_*"):
        place = parse_rank_dir(folder.relative_to(job_dir).as_posix())
        if place is None or not selection.takes_fence(*place):
            continue
        worker = _read_worker(folder)
        if not selection.takes_worker(worker):
            continue
        for std in _STD_NAMES:
            path = folder / f"{std}.log"
            for file in (earlier(path), path):
                if (not selection.stds or std in selection.stds) and file.is_file():
                    found.append(StreamFile(file, place[0], place[1], std, worker))
    return sorted(found, key=lambda stream: stream.order)  # stable: what is earlier stays first


class LogCursor:
    """A place in one log file; `read` goes on from where the last one ended."""

    def __init__(self, stream: StreamFile) -> None:
        self.stream = stream
        self._offset = 0

    def read(self, *, partial: bool) -> Iterator[LogLine]:
        """Yield the lines up to the file's end; its last one without an end only if `partial`."""
        index: TimeIndex | None = None
        while data := self._chunk():
            lines, used = _split(data)
            if not lines:
                if not partial:
                    return
                lines, used = [data], len(data)
            index = index or TimeIndex.load(self.stream.path)
            for text in lines:
                yield LogLine(index.time_ns(self._offset), self.stream, _shown(text))
                self._offset += min(len(text) + 1, used)
                used -= len(text) + 1

    def _chunk(self) -> bytes:
        """Read on: a piece, or more of it where no line ends in that."""
        try:
            with self.stream.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # It was full, and another one took its place.
                file.seek(self._offset)
                data = file.read(_CHUNK_BYTES)
                if b"\n" not in data and len(data) == _CHUNK_BYTES:
                    data += file.read(LINE_BYTES_MAX - _CHUNK_BYTES)
                return data
        except OSError:
            return b""


def merged(cursors: Iterable[LogCursor], *, by_time: bool, partial: bool) -> Iterator[LogLine]:
    """Yield the lines of all files: by time, or one file after the other."""
    lines = [cursor.read(partial=partial) for cursor in cursors]
    if not by_time:
        return itertools.chain.from_iterable(lines)
    return heapq.merge(*lines, key=lambda line: (line.time_ns, line.stream.order))


class Follower:
    """A job's wanted output as it grows, workers that start later included."""

    def __init__(self, job_dir: Path, selection: Selection, *, by_time: bool) -> None:
        self._job_dir = job_dir
        self._selection = selection
        self._by_time = by_time
        self._cursors: dict[Path, LogCursor] = {}

    def poll(self) -> Iterator[LogLine]:
        """Yield the whole lines that are new; the first time, all there are."""
        for stream in find_streams(self._job_dir, self._selection):
            if stream.path not in self._cursors:
                self._cursors[stream.path] = LogCursor(stream)
        return merged(self._cursors.values(), by_time=self._by_time, partial=False)


def _read_worker(folder: Path) -> WorkerNote:
    """Return who wrote last in this folder; nobody known where there is no note."""
    try:
        last = (folder / WORKER_FILE).read_bytes().splitlines()[-1]
        return msgspec.json.decode(last, type=WorkerNote)
    except (OSError, IndexError, *UNREADABLE):
        return WorkerNote()


def _split(data: bytes) -> tuple[list[bytes], int]:
    """Return the whole lines of a piece and the bytes they take, ends included."""
    end = data.rfind(b"\n") + 1
    if end:
        return data[: end - 1].split(b"\n"), end
    # A line as long as this is given in pieces.
    return ([data], len(data)) if len(data) >= LINE_BYTES_MAX else ([], 0)


def _shown(text: bytes) -> bytes:
    """Return a line as a terminal would have left it: a progress bar's last state."""
    return text.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in text else text
