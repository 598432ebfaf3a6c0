"""The agent's side of torch's file timers, which workers set on themselves.

A worker writes JSON lines to a named pipe: a scope, an expiry by the wall clock, and the signal
that ends the worker then; a negative time cancels the timer. `TimerTable` holds the timers and
decides which have expired; it is pure. `TimerPipe` is the pipe; it rejects and counts malformed
requests. The format is that of torch.distributed.elastic.timer.FileTimerClient, version 1.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastane.errors import ConfigurationError
from elastane.protocol.unreadable import UNREADABLE

# One request is one write that the kernel keeps whole.
REQUEST_BYTES_MAX = select.PIPE_BUF
# The kernel's own bound on process numbers, PID_MAX_LIMIT.
PID_MAX = 4 << 20
# The timers of one node: each worker holds a few, by nesting.
TIMERS_MAX = 10_000
_READ_BYTES = 64 << 10
# No symbolic link, which another user of the folder could make lead elsewhere.
_PIPE_END = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class WorkerTimer(msgspec.Struct, frozen=True):
    """One line of the pipe. `expiration_time` is in seconds since 1970; a negative one cancels."""

    pid: int
    scope_id: str
    expiration_time: float
    signal: int = 0
    version: int = 1


def parse_request(line: bytes) -> WorkerTimer | None:
    """Return the request in a line, or None if it is malformed."""
    if len(line) > REQUEST_BYTES_MAX:
        return None  # a table full of such lines would hold hundreds of megabytes
    try:
        request = msgspec.json.decode(line, type=WorkerTimer)
    except UNREADABLE:
        return None
    return request if 0 < request.pid <= PID_MAX and request.signal <= 64 else None


class TimerTable:
    """The timers that are set, by process and scope."""

    def __init__(self) -> None:
        self._set: dict[tuple[int, str], WorkerTimer] = {}

    def __len__(self) -> int:
        return len(self._set)

    @property
    def due_s(self) -> float | None:
        """The time at which the next timer expires, by the wall clock; None if no timer is set."""
        return min((t.expiration_time for t in self._set.values()), default=None)

    def update(self, request: WorkerTimer) -> bool:
        """Set or cancel a timer; False if the table is full."""
        key = (request.pid, request.scope_id)
        if request.expiration_time < 0:
            self._set.pop(key, None)
            return True
        if key not in self._set and len(self._set) >= TIMERS_MAX:
            return False
        self._set[key] = request
        return True

    def expired(self, now_s: float) -> list[WorkerTimer]:
        """Return one timer for each process with an expired timer, and drop the process's timers.

        The timer chosen is the first with a signal; a timer without one sends none, as in torch.
        """
        chosen: dict[int, WorkerTimer] = {}
        for timer in self.late(now_s):
            known = chosen.get(timer.pid)
            if known is None or (known.signal <= 0 < timer.signal):
                chosen[timer.pid] = timer
        self.forget(chosen)
        return list(chosen.values())

    def late(self, now_s: float) -> list[WorkerTimer]:
        """Return the expired timers, the earliest first; they stay set."""
        found = [t for t in self._set.values() if t.expiration_time <= now_s]
        return sorted(found, key=lambda timer: timer.expiration_time)

    def forget(self, pids: Iterable[int]) -> None:
        """Drop the timers of processes that are gone."""
        gone = set(pids)
        self._set = {key: timer for key, timer in self._set.items() if key[0] not in gone}

    def pids(self) -> set[int]:
        """Return the processes that have a timer."""
        return {pid for pid, _ in self._set}


@dataclass
class TimerPipe:
    """The pipe, at `requested_path` or anonymous; both its ends stay open here."""

    requested_path: str = ""
    path: str = ""
    refused: int = 0
    _read_fd: int = -1
    _write_fd: int = -1
    _rest: bytes = b""

    def open(self) -> int:
        """Return the descriptor to watch; raises ConfigurationError if the path cannot be used.

        Without a path it is an anonymous pipe of this process, which workers open through /proc. It
        ends with the agent, however the agent ends.
        """
        if self.requested_path:
            self._open_named()
        else:
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self.path = f"/proc/{os.getpid()}/fd/{self._write_fd}"
        return self._read_fd

    def read(self) -> list[WorkerTimer]:
        """Return the requests that have arrived."""
        try:
            data = self._rest + os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > REQUEST_BYTES_MAX:
            self._rest, self.refused = b"", self.refused + 1
        found = [request for line in lines if (request := parse_request(line)) is not None]
        self.refused += len(lines) - len(found)
        return found

    def close(self) -> None:
        """Close both ends; remove a named pipe."""
        if self._read_fd < 0:
            return
        if self.requested_path:
            Path(self.path).unlink(missing_ok=True)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def _open_named(self) -> None:
        """Make the named pipe; if another agent reads one there, use a name beside it."""
        self.path = self.requested_path
        try:
            if _is_read_by_another(self.path):
                self.path = f"{self.requested_path}.{os.getpid()}"
            Path(self.path).unlink(missing_ok=True)
            os.mkfifo(self.path, 0o600)
            self._read_fd = os.open(self.path, os.O_RDONLY | _PIPE_END)
            self._write_fd = os.open(self.path, os.O_WRONLY | _PIPE_END)
        except OSError as error:
            raise ConfigurationError(
                f"TORCHELASTIC_TIMER_FILE = {self.requested_path!r}: {error.strerror or error}",
                slug="timer-file",
                expected="a path at which a named pipe can be made, and where no other file is",
                next_step="unset TORCHELASTIC_TIMER_FILE: then the agent finds a place by itself",
            ) from error


def _is_read_by_another(path: str) -> bool:
    try:
        if not stat.S_ISFIFO(Path(path).lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "exists and is not a named pipe")
        os.close(os.open(path, os.O_WRONLY | _PIPE_END))
    except FileNotFoundError:
        return False
    except OSError as error:
        # no process reads it: an agent that was killed left it behind
        if error.errno == errno.ENXIO:
            return False
        raise
    return True
