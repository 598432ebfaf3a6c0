"""Reads the output of a job's workers back from its folder, with times, merged.

This module owns reading and order. The folder's worker.jsonl names the worker that wrote a file,
and the file's time index has the time of each line (process.streams.files). The module only reads,
holds a bounded piece of each file in memory, and leaves out unreadable files.
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
from elastane.process.streams.capture import earlier
from elastane.process.streams.files import WORKER_FILE, TimeIndex
from elastane.process.streams.plan import parse_rank_dir
from elastane.protocol.model import Fence
from elastane.protocol.unreadable import UNREADABLE

# Bytes of a file that are read at a time: the output of a thousand workers is merged within 64 MB.
_CHUNK_BYTES = 32 << 10
_STD_NAMES = ("stdout", "stderr")
assert _CHUNK_BYTES <= LINE_BYTES_MAX


@dataclass(frozen=True)
class Selection:
    """A choice of output; an empty set selects everything."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    rounds: frozenset[int] = frozenset()
    attempts: frozenset[int] = frozenset()
    stds: frozenset[str] = frozenset()

    def includes_fence(self, fence: Fence, rank: int) -> bool:
        """Return whether a worker of this fence and rank is selected."""
        wanted = (
            (self.ranks, rank),
            (self.rounds, fence.round),
            (self.attempts, fence.attempt),
        )
        return all(not chosen or value in chosen for chosen, value in wanted)

    def includes_worker(self, worker: WorkerNote) -> bool:
        """Return whether the worker's node is selected, by its name or its host's."""
        return not self.nodes or worker.node in self.nodes or worker.host in self.nodes


class WorkerNote(msgspec.Struct, frozen=True):
    """The worker that wrote the files of a folder, as its agent recorded it."""

    node: str = ""
    host: str = ""
    role: str = ""
    local_rank: int = -1


@dataclass(frozen=True)
class StreamFile:
    """One log file and its worker."""

    path: Path
    fence: Fence
    rank: int
    std: str
    worker: WorkerNote

    @property
    def order(self) -> tuple[Fence, int, int]:
        """The position among a job's files: by round, attempt, rank; stdout first."""
        return (self.fence, self.rank, _STD_NAMES.index(self.std))


@dataclass(frozen=True)
class LogLine:
    """One line without its end, and its time by the clock of its host."""

    time_ns: int
    stream: StreamFile
    text: bytes


def find_streams(job_dir: Path, selection: Selection) -> list[StreamFile]:
    """Return the selected files of a job's folder, in order."""
    found: list[StreamFile] = []
    for folder in job_dir.glob("round_*/attempt_*/rank_*"):
        identity = parse_rank_dir(folder.relative_to(job_dir).as_posix())
        if identity is None or not selection.includes_fence(*identity):
            continue
        worker = _read_worker(folder)
        if not selection.includes_worker(worker):
            continue
        for std in _STD_NAMES:
            path = folder / f"{std}.log"
            for file in (earlier(path), path):
                if (not selection.stds or std in selection.stds) and file.is_file():
                    found.append(StreamFile(file, identity[0], identity[1], std, worker))
    # stable, so the earlier part of a file stays first
    return sorted(found, key=lambda stream: stream.order)


class LogCursor:
    """A position in one log file; `read` continues where the last call ended."""

    def __init__(self, stream: StreamFile) -> None:
        self.stream = stream
        self._offset = 0

    def read(self, *, partial: bool) -> Iterator[LogLine]:
        """Yield the lines up to the file's end; a last line without an end only if `partial`."""
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
        """Read the next piece, or more if no line ends in it."""
        try:
            with self.stream.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # the file was full, and another one replaced it
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
    """The selected output of a job as it grows, including workers that start later."""

    def __init__(self, job_dir: Path, selection: Selection, *, by_time: bool) -> None:
        self._job_dir = job_dir
        self._selection = selection
        self._by_time = by_time
        self._cursors: dict[Path, LogCursor] = {}

    def poll(self) -> Iterator[LogLine]:
        """Yield the new whole lines; the first call yields all existing ones."""
        for stream in find_streams(self._job_dir, self._selection):
            if stream.path not in self._cursors:
                self._cursors[stream.path] = LogCursor(stream)
        return merged(self._cursors.values(), by_time=self._by_time, partial=False)


def _read_worker(folder: Path) -> WorkerNote:
    """Return the last worker that wrote into this folder; an empty note if none is readable."""
    try:
        last = (folder / WORKER_FILE).read_bytes().splitlines()[-1]
        return msgspec.json.decode(last, type=WorkerNote)
    except (OSError, IndexError, *UNREADABLE):
        return WorkerNote()


def _split(data: bytes) -> tuple[list[bytes], int]:
    """Return the whole lines of a piece and their size, ends included."""
    end = data.rfind(b"\n") + 1
    if end:
        return data[: end - 1].split(b"\n"), end
    # a line of this size is returned in pieces
    return ([data], len(data)) if len(data) >= LINE_BYTES_MAX else ([], 0)


def _shown(text: bytes) -> bytes:
    """Return the line as a terminal would show it: of a progress bar, the last state."""
    return text.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in text else text
