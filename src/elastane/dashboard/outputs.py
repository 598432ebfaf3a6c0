"""The end of a worker's output, from the files of its job. It reads files, and a bounded part."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.observe.merge import Selection, StreamFile, find_streams

# What a person scrolls through; `elastane logs` has all.
TAIL_BYTES = 128 << 10
_ROUND = re.compile(r"round_(\d{1,9})")


class OutputTail(msgspec.Struct, kw_only=True):
    """The end of one file."""

    path: str
    text: str
    is_cut: bool


@dataclass(frozen=True, kw_only=True)
class WorkerChoice:
    """A worker of a node, in its newest life, or in the last one until `round`."""

    node: str
    local_rank: int
    std: str
    round: int | None = None
    rank: int | None = None


def tail_of(job_dir: Path, wanted: WorkerChoice) -> OutputTail | None:
    """Return the end of the output; None if no file of that worker is in the folder."""
    for number in _rounds(job_dir, wanted.round):
        selection = Selection(
            rounds=frozenset({number}), nodes=frozenset({wanted.node}), stds=frozenset({wanted.std})
        )
        found = [
            stream
            for stream in find_streams(job_dir, selection)
            if stream.worker.local_rank == wanted.local_rank
        ]
        if found:
            return _tail(_chosen(found, wanted.rank).path)
    return None


def _rounds(job_dir: Path, until: int | None) -> list[int]:
    """Return the rounds in which workers started, newest first."""
    found = (_ROUND.fullmatch(path.name) for path in job_dir.glob("round_*"))
    numbers = [int(match[1]) for match in found if match is not None]
    return sorted((n for n in numbers if until is None or n <= until), reverse=True)


def _chosen(found: list[StreamFile], rank: int | None) -> StreamFile:
    """Return the newest file, preferring the rank that is asked for."""
    of_rank = [each for each in found if rank in {each.rank, *(t.rank for t in each.terms)}]
    return max(of_rank or found, key=lambda stream: _changed_s(stream.path))


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: Path) -> OutputTail:
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError as error:
        return OutputTail(path=str(path), text=error.strerror or str(error), is_cut=False)
    text = data.decode("utf-8", "replace")
    lines = (line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))
    return OutputTail(path=str(path), text="\n".join(lines), is_cut=size_bytes > TAIL_BYTES)
