"""Reads the output of a job's workers back from its folder, with times, merged.

This module owns reading and order. The folder's worker.jsonl names the worker that wrote a file
and the ranks that it had, and the file's time index has the time of each line
(process.streams.files). The module only reads, holds a bounded piece of each file in memory, and
leaves out unreadable files.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from elastane.process.streams.bounds import INDEX_POLL_S, LINE_BYTES_MAX
from elastane.process.streams.capture import earlier
from elastane.process.streams.files import WORKER_FILE, TimeIndex
from elastane.process.streams.plan import parse_rank_dir
from elastane.protocol.model import Fence
from elastane.protocol.unreadable import UNREADABLE

# Bytes of a file that are read at a time: the output of a thousand workers is merged within 64 MB.
_CHUNK_BYTES = 32 << 10
_STD_NAMES = ("stdout", "stderr")
assert _CHUNK_BYTES <= LINE_BYTES_MAX
# A line is at most so much older than its time: the interval of checks of a file.
_LATE_NS = int(INDEX_POLL_S * 1e9)
# Nanoseconds and bytes that are never reached.
_NEVER = 1 << 63
# Changes of a worker's rank that are read: a worker that lives for months has some thousand.
_NOTES_MAX = 65_536


@dataclass(frozen=True)
class Selection:
    """A choice of output; an empty set selects everything."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    rounds: frozenset[int] = frozenset()
    attempts: frozenset[int] = frozenset()
    stds: frozenset[str] = frozenset()

    def includes_term(self, started: Fence, term: RankTerm) -> bool:
        """Return whether the output of a worker while it had a rank is selected.

        `started`: the fence of the worker's start. A round or an attempt selects what started in it
        and what took a place in it.
        """
        wanted = (
            (self.ranks, {term.rank}),
            (self.rounds, {started.round, term.fence.round}),
            (self.attempts, {started.attempt, term.fence.attempt}),
        )
        return all(not chosen or chosen & values for chosen, values in wanted)

    def includes_worker(self, worker: WorkerNote) -> bool:
        """Return whether the worker's node is selected, by its name or its host's."""
        return not self.nodes or worker.node in self.nodes or worker.host in self.nodes


class WorkerNote(msgspec.Struct, frozen=True):
    """The worker that wrote the files of a folder, as its agent recorded it.

    It has this rank in the world of `round` and `attempt` from `time_ns` on, when its files had
    these sizes; -1: they are not known.
    """

    node: str = ""
    host: str = ""
    role: str = ""
    local_rank: int = -1
    rank: int = -1
    round: int = -1
    attempt: int = -1
    time_ns: int = 0
    stdout_bytes: int = -1
    stderr_bytes: int = -1

    def size_bytes(self, std: str) -> int:
        """Return the size of the file of a stream."""
        return self.stdout_bytes if std == "stdout" else self.stderr_bytes


@dataclass(frozen=True)
class RankTerm:
    """The time for which a worker has one rank; `fence`: the world in which it got it.

    `from_bytes` and `until_bytes` are where its output begins and ends in the file; -1 and infinite
    if that is not known.
    """

    rank: int
    fence: Fence
    from_ns: int
    until_ns: int
    from_bytes: int
    until_bytes: int
    is_selected: bool = True


@dataclass(frozen=True)
class StreamFile:
    """One log file and its worker. `rank` is that of its start; `terms` are its ranks by time.

    `has_offsets`: the terms have offsets in this file, which has no earlier part.
    """

    path: Path
    fence: Fence
    rank: int
    std: str
    worker: WorkerNote
    terms: tuple[RankTerm, ...]
    has_offsets: bool = False

    @property
    def order(self) -> tuple[Fence, int, int]:
        """The position among a job's files: by the world and the rank of its first selected term.

        Stdout comes first.
        """
        first = next(term for term in self.terms if term.is_selected)
        return (first.fence, first.rank, _STD_NAMES.index(self.std))

    def term_of(self, offset: int, time_ns: int, *, is_exact: bool) -> RankTerm | None:
        """Return the selected term in which a line was written; None if that one is not selected.

        `offset`: where it begins. Where offsets of terms are not known, its time decides, which is
        when the line was there at the latest. It may be some time older, so that a line of two
        terms is of the selected one. Without an exact time it is of the first selected one.
        """
        selected = [term for term in self.terms if term.is_selected]
        if self.has_offsets:
            return next((t for t in selected if t.from_bytes <= offset < t.until_bytes), None)
        if not is_exact:
            return selected[0]
        from_ns = time_ns - _LATE_NS
        return next((t for t in selected if from_ns < t.until_ns and time_ns >= t.from_ns), None)


@dataclass(frozen=True)
class LogLine:
    """One line without its end, its time by the clock of its host, and its worker's rank then."""

    time_ns: int
    stream: StreamFile
    text: bytes
    term: RankTerm


def find_streams(job_dir: Path, selection: Selection) -> list[StreamFile]:
    """Return the selected files of a job's folder, in order."""
    found: list[StreamFile] = []
    for folder in job_dir.glob("round_*/attempt_*/rank_*"):
        identity = parse_rank_dir(folder.relative_to(job_dir).as_posix())
        if identity is None:
            continue
        notes = _read_notes(folder)
        worker = notes[-1]
        if not selection.includes_worker(worker):
            continue
        for std in _STD_NAMES:
            terms = _terms(notes, *identity, std, selection)
            if (selection.stds and std not in selection.stds) or not _any_selected(terms):
                continue
            path = folder / f"{std}.log"
            files = [file for file in (earlier(path), path) if file.is_file()]
            has_offsets = files == [path] and all(term.from_bytes >= 0 for term in terms)
            found += [StreamFile(f, *identity, std, worker, terms, has_offsets) for f in files]
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
                time_ns = index.time_ns(self._offset)
                term = self.stream.term_of(self._offset, time_ns, is_exact=index.is_known)
                if term is not None:
                    yield LogLine(time_ns, self.stream, _shown(text), term)
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
            cursor = self._cursors.setdefault(stream.path, LogCursor(stream))
            cursor.stream = stream  # Its worker may have got another rank.
        return merged(self._cursors.values(), by_time=self._by_time, partial=False)


def _read_notes(folder: Path) -> list[WorkerNote]:
    """Return what is known of the workers that wrote into this folder, at least an empty note."""
    notes = []
    with contextlib.suppress(OSError):
        for line in (folder / WORKER_FILE).read_bytes().splitlines()[-_NOTES_MAX:]:
            with contextlib.suppress(*UNREADABLE):
                notes.append(msgspec.json.decode(line, type=WorkerNote))
    return notes or [WorkerNote()]


def _terms(
    notes: list[WorkerNote], fence: Fence, rank: int, std: str, selection: Selection
) -> tuple[RankTerm, ...]:
    """Return the ranks of a folder's worker; the first one is that in the folder's name."""
    first = WorkerNote(rank=rank, round=fence.round, attempt=fence.attempt)
    changes = [note for note in notes if note.time_ns]
    terms = []
    for note, after in zip([first, *changes], [*changes, None], strict=True):
        size = 0 if note is first else note.size_bytes(std)
        until = _NEVER if after is None else after.size_bytes(std)
        until_ns = _NEVER if after is None else after.time_ns
        world = Fence(note.round, note.attempt)
        term = RankTerm(note.rank, world, note.time_ns, until_ns, size, until)
        terms.append(replace(term, is_selected=selection.includes_term(fence, term)))
    return tuple(terms)


def _any_selected(terms: Iterable[RankTerm]) -> bool:
    return any(term.is_selected for term in terms)


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
