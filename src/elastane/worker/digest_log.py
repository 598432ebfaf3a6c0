"""The digest log of a run (`digest_log`): a file with a digest of the job's state after each step.

Owns the file's format, its writer and its reader. Rank 0 appends a line at the boundary after each
step, or after every N. A new rank 0 first cuts off the lines of steps that were not committed, so
no step appears twice. There is one file for all nodes. If they share no folder, each node's file
has the steps of the time when it was rank 0.

It does not import torch, and does not know how a digest is made. Once the job has begun, a file
that cannot be written costs lines of the log and not the job. Before that, and for a file of
another job, it raises JobError. The reader raises ConfigurationError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError, JobError

VARIABLE = "ELASTANE_DIGEST_LOG"
FORMAT = 1
_KIND = "elastane-digest-log"
# Enough for the last lines: one or two steps are cut off.
_TAIL_BYTES = 1 << 16
# No symbolic link, which another user of the folder could make lead elsewhere.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
# Other values mean another run; the remaining settings may change when a run is resumed.
_IDENTITY = ("shards", "seed", "data")


@dataclass(frozen=True)
class DigestLine:
    """The state after one step: a digest for each registered object, by its name."""

    step: int
    world_size: int
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Recorded:
    """The content of a digest log."""

    path: str
    job: str
    settings: Mapping[str, Any]
    lines: Mapping[int, DigestLine]


class DigestLog:
    """The writer of one worker; the file is open only on rank 0."""

    def __init__(self, path: Path, every: int = 1, job: str = "") -> None:
        self.path = path
        self.every = every
        self.job = job
        self._file = -1
        self._end = 0
        self._last = -1
        self._warned = False

    def at(
        self,
        committed: int,
        place: tuple[int, int],
        settings: Callable[[], Mapping[str, Any]],
        digests: Callable[[], Mapping[str, str]],
    ) -> None:
        """Append the line of the last step, if it is due and missing.

        Called at a boundary with `committed` steps; `place` is (rank, world size).
        """
        rank, world_size = place
        if rank != 0:
            self.close()
            return
        try:
            if self._file < 0:
                self._open(committed, settings)
            if self._last < committed - 1 and committed % self.every == 0:
                line = {"step": committed - 1, "world": world_size, "digests": dict(digests())}
                self._append(line)
                self._last = committed - 1
        except (OSError, JobError) as error:
            self._failed(error, committed)

    def close(self) -> None:
        """Close the file; it is opened again if this worker becomes rank 0 again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self, committed: int, settings: Callable[[], Mapping[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(self.path, _OPEN, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._refused("is a symbolic link, which is not followed") from error
            raise
        try:
            own = dict(settings())
            self._insist_on_own(file, committed, own)
            end, last = _cut_uncommitted(file, committed)
            self._end = end
            self._last = last
        except BaseException:
            os.close(file)
            raise
        self._file = file
        if not self._end:
            self._append({"kind": _KIND, "format": FORMAT, "job": self.job, "settings": own})

    def _insist_on_own(self, file: int, committed: int, settings: Mapping[str, Any]) -> None:
        head = os.pread(file, _TAIL_BYTES, 0).partition(b"\n")[0]
        if not head:
            return
        found = _header(head)
        if found is None:
            raise self._refused("is no digest log")
        others = found["settings"]
        plain = json.loads(json.dumps(dict(settings)))
        differing_names = [name for name in _IDENTITY if others.get(name) != plain.get(name)]
        if committed and differing_names:
            raise self._refused(f"is the digest log of a run with another {differing_names[0]}")
        if not committed and found["job"] != self.job:
            raise self._refused(f"is the digest log of the job {found['job']!r}")

    def _append(self, line: Mapping[str, Any]) -> None:
        raw = json.dumps(line).encode() + b"\n"
        written = os.write(self._file, raw)
        if written != len(raw):
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise OSError(f"{written} of {len(raw)} bytes were written")
        self._end += written

    def _failed(self, error: OSError | JobError, committed: int) -> None:
        if isinstance(error, JobError) and not committed:
            raise error
        if not committed:
            raise self._refused(f"cannot be written: {error}") from error
        if not self._warned:
            self._warned = True
            where = (
                f"elastane: the digest log {self.path} lacks step {committed - 1}, and maybe others"
            )
            sys.stderr.write(f"{where}: {error}\n")

    def _refused(self, why: str) -> JobError:
        return JobError(
            f"digest log: {self.path} {why}",
            expected="a file of this job's own, in a folder that it can write to",
            next_step=f"elastane.init(digest_log=...) or {VARIABLE}=..., with another path",
            slug="digest-log-file",
        )


def _cut_uncommitted(file: int, committed: int) -> tuple[int, int]:
    """Cut off the lines of steps that are not committed; return the size and the last step."""
    size = os.fstat(file).st_size
    for start in (max(0, size - _TAIL_BYTES), 0):
        kept, last = _committed_part(
            os.pread(file, size - start, start), committed, whole=start == 0
        )
        if kept:
            break
    else:
        start = 0
    os.ftruncate(file, start + kept)
    return start + kept, last


def _committed_part(raw: bytes, committed: int, *, whole: bool) -> tuple[int, int]:
    """Return how many bytes hold committed steps, and the last step; 0 if none is found."""
    end, last = 0, -1
    at = 0 if whole else raw.find(b"\n") + 1
    for piece in raw[at:].splitlines(keepends=True):
        line = _line(piece)
        is_header = whole and at == 0 and _header(piece) is not None
        if is_header and committed:
            end = at + len(piece)
        elif line is not None and line.step < committed and piece.endswith(b"\n"):
            end, last = at + len(piece), line.step
        at += len(piece)
    return end, last


def digest_log_of(path: str | Path | None, every: int) -> DigestLog | None:
    """Return the writer for `path`, or for the path in the environment; None if neither is set.

    Raises JobError if `every` is not a number of steps.
    """
    where = str(path or os.environ.get(VARIABLE, ""))
    if not where:
        return None
    if type(every) is not int or every < 1:
        raise JobError(
            f"digest_every is {every!r}",
            expected="a whole number of steps, of at least 1",
            next_step="elastane.init(digest_log=..., digest_every=100)",
            slug="digest-log-file",
        )
    return DigestLog(Path(where), every, os.environ.get("TORCHELASTIC_RUN_ID", ""))


def read_digest_log(where: str | Path) -> Recorded:
    """Read a digest log; for a folder, its `digests.jsonl`.

    An incomplete last line comes from a writer that was killed, and is ignored. Raises
    ConfigurationError for a file that is missing, empty, damaged, of another kind, or of another
    format.
    """
    path = Path(where)
    path = path / "digests.jsonl" if path.is_dir() else path
    try:
        pieces = path.read_bytes().split(b"\n")
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    if pieces == [b""]:
        raise _unreadable(path, "is empty")
    header = _header(pieces[0])
    if header is None:
        raise _unreadable(path, "is no digest log: its first line is not that of one")
    if header["format"] != FORMAT:
        raise _unreadable(path, f"has format {header['format']}, and this version reads {FORMAT}")
    lines: dict[int, DigestLine] = {}
    for number, piece in enumerate(pieces[1:-1], 2):
        line = _line(piece)
        if line is None:
            raise _unreadable(path, f"is damaged: line {number} is not that of a step")
        # A lower step comes from a writer that was suspended and resumed after another took over.
        if not lines or line.step > next(reversed(lines)):
            lines[line.step] = line
    return Recorded(str(path), header["job"], header["settings"], lines)


def _header(raw: bytes) -> dict[str, Any] | None:
    found = _mapping(raw)
    if found.get("kind") != _KIND or not isinstance(found.get("settings"), dict):
        return None
    return {"format": None, "job": "", **found}


def _line(raw: bytes) -> DigestLine | None:
    found = _mapping(raw)
    step, world_size, digests = (found.get(key) for key in ("step", "world", "digests"))
    if type(step) is not int or type(world_size) is not int or not isinstance(digests, dict):
        return None
    return DigestLine(step, world_size, digests)


def _mapping(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def differing(one: Recorded, other: Recorded) -> Iterator[tuple[int, list[str]]]:
    """Yield each step of both logs that differs, in order, with the differing objects' names."""
    for step in sorted(one.lines.keys() & other.lines.keys()):
        ours, theirs = one.lines[step].digests, other.lines[step].digests
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if names:
            yield step, names


def _unreadable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} {why}",
        expected="a file that a job has written with elastane.init(digest_log=PATH)",
        next_step=f"{VARIABLE}=digests.jsonl elastane run ... to have one written",
        slug="digest-log-unreadable",
    )
