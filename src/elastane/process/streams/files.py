"""The files of one worker: its folder, its logs, its error file, and the last lines of a file.

This module opens them so that output of an earlier attempt or run is never deleted, truncated or
taken for this worker's. It raises OSError; `group` decides what then becomes of the output.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from elastane.process import environment
from elastane.process.streams.bounds import ERROR_FILES_MAX, TAIL_BYTES_MAX, TAIL_LINES_MAX
from elastane.process.streams.plan import WorkerPlace

WORKER_FILE = "worker.jsonl"
INDEX_SUFFIX = ".idx"
_CUT_MARK = "[... earlier output is in the file]\n"


def default_base_dir() -> str:
    """Return the default folder for logs: one for each user of this machine."""
    return str(Path(environment.get("TMPDIR") or "/tmp") / f"elastane-logs-{os.getuid()}")


def ensure_base_dir(base_dir: str) -> None:
    """Make the folder; require that the default one belongs to this user.

    Any user may create names in the folder for temporary files: a folder of another user, or a
    link, raises PermissionError.
    """
    is_default = base_dir == default_base_dir()
    Path(base_dir).mkdir(mode=0o700 if is_default else 0o777, parents=True, exist_ok=True)
    if not is_default:
        return
    found = Path(base_dir).lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{base_dir} belongs to another user")


def open_append(path: Path) -> int:
    """Open a file for appending; the descriptor is not inherited unless it is passed on.

    A symbolic link is an error, because other users of the folder could make it lead elsewhere.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def make_rank_dir(folder: Path, place: WorkerPlace, host: str) -> None:
    """Make a worker's folder and write a note of the worker's identity there.

    The note also proves that the disk accepts data: a full disk often still makes files, and the
    worker would fail at its first line of output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "node": place.node,
        "host": host,
        "role": place.role,
        "rank": place.rank,
        "local_rank": place.local_rank,
    }
    fd = open_append(folder / WORKER_FILE)
    try:
        os.write(fd, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(fd)


def fresh_error_file(folder: Path) -> str:
    """Return the name of an error file that no worker has written to yet.

    A job that runs again under its name has the same fence; the earlier worker's error must not be
    taken for this one's.
    """
    names = ["error.json", *(f"error.{n}.json" for n in range(1, ERROR_FILES_MAX))]
    return str(next((p for n in names if not (p := folder / n).exists()), folder / names[-1]))


def last_lines(
    path: str, *, lines_max: int = TAIL_LINES_MAX, bytes_max: int = TAIL_BYTES_MAX
) -> str:
    """Return the end of a file as text, bounded; "" if it cannot be read."""
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - bytes_max))
            data = file.read(bytes_max)
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").splitlines(keepends=True)
    cut = len(lines) > lines_max or size_bytes > bytes_max
    return (_CUT_MARK if cut else "") + "".join(lines[-lines_max:])
