"""Why a worker ended: its error file, the end of its stderr, and the kernel's memory counters.

It reads files of the log folder, so callers keep it off the event loop. torch's `record`, or the
start of the worker, writes the error file (`process.errorfile`); programs that are not Python write
none. Missing files give an empty text.

Whether the kernel killed a worker for lack of memory is read from the cgroup's `memory.events` (v2)
or `memory.oom_control` (v1) and from /proc/vmstat. Each start of a group reads a file or two; the
judgement is pure. Where nothing can be read, the text says so instead of guessing.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from elastane.process.errorfile import read_error_file
from elastane.process.streams.files import last_lines
from elastane.process.streams.group import WorkerStreams

_NS = 1e9
# A fatal signal leaves on stderr the Python stacks of all threads and the native ones, those of the
# faulting thread first. The whole is long; only a part of it is kept.
_FATAL = "Fatal Python error: "
# What the C++ runtime writes of an exception that nothing caught, and what gloo begins it with.
_THROWN = "terminate called after throwing an instance of "
_ENFORCED = re.compile(r"^\[enforce fail at [^\]]*\] ")
# Frames around the script belong to its start.
_STARTS = ("/elastane/process/zygote/", "/elastane/worker/unmodified.py")
# Frames of elastane, and of Python's library that it calls to wait.
_OWN_FRAME = re.compile(r"/elastane/(?:comms|process|synchrony|worker)/")
_IN_WAIT = re.compile(rf"{_OWN_FRAME.pattern}|/lib/python[\d.]+/(?!site-packages/)")
# What torch writes above the native stack of each thread, first of the one that has the signal.
_SIGNALLED = re.compile(r"SIG\w+\(\d+\), PID: (?P<pid>\d+), Thread (?P<thread>\d+): ?$")
_STACKS_LINES_MAX, _STACKS_BYTES_MAX = 5000, 512 << 10
_NATIVE_FRAMES_MAX = 12
_PYTHON_FRAMES_MAX = 20
_CGROUPS = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# A cgroup without a limit shows a number near 2^63.
_LIMIT_BYTES_MAX = 1 << 60


@dataclass(frozen=True)
class LastWords:
    """The text of a failure, the error file if the worker wrote one, and the time of the failure.

    `failed_s` is of this host's monotonic clock; 0 if the error file has none. `output`: the text
    is only the end of stderr, which may have nothing to do with the failure.
    """

    message: str = ""
    error_file: str = ""
    failed_s: float = 0.0
    output: bool = False


def read_last_words(streams: WorkerStreams) -> LastWords:
    """Return what the worker left, which may be empty."""
    error = read_error_file(streams.error_file) if streams.error_file else None
    stderr = _stderr_end(streams.stderr_tail) if streams.stderr_tail else LastWords()
    if error is None:
        return stderr
    text = error.callstack or error.message or stderr.message
    return LastWords(text, streams.error_file, error.monotonic_ns / _NS)


def _stderr_end(path: str) -> LastWords:
    """Return the end of stderr; for a crash, its stacks."""
    text = last_lines(path, lines_max=_STACKS_LINES_MAX, bytes_max=_STACKS_BYTES_MAX)
    crash = crash_text(text)
    return LastWords(crash or last_lines(path), output=not crash)


def crash_text(text: str) -> str:
    """Return the stacks of a crash in the order of a traceback: the error's name comes last.

    The native frames of the faulting thread come first, then its Python frames, the innermost last.
    Empty if `text` shows no crash.
    """
    before, fatal, rest = text.rpartition(_FATAL)
    if not fatal:
        return ""
    name, *lines = rest.splitlines()
    python, native = _python_frames(lines), _native_frames(lines)
    stacks = (
        ["Native stack of the thread that faulted (innermost first):", *native] if native else []
    )
    stacks += ["Python stack (most recent call last):", *reversed(python)] if python else []
    return "\n".join([*stacks, f"{_FATAL}{name}{_exception_text(before)}"])


def _exception_text(before: str) -> str:
    """Return what the C++ exception said that ended the process, if one did; `before` the crash."""
    _, thrown, said = before.rpartition(_THROWN)
    _, what, text = said.partition("what():")
    line = text.strip().partition("\n")[0]
    return f": {_ENFORCED.sub('', line)}" if thrown and what and line else ""


def _python_frames(lines: list[str]) -> list[str]:
    """Return the frames of the faulting thread, the innermost first.

    Frames in which elastane waits inside of a collective are left out: those of its caller say
    where the script is.
    """
    found: list[str] = []
    for line in lines[_python_stack(lines) :]:
        if not line.startswith("  File ") or any(start in line for start in _STARTS):
            break
        found.append(line)
    inner = next((n for n, line in enumerate(found) if not _IN_WAIT.search(line)), 0)
    waits = any(map(_OWN_FRAME.search, found[:inner]))
    return found[inner if waits else 0 :][:_PYTHON_FRAMES_MAX]


def _python_stack(lines: list[str]) -> int:
    """Return the index of the first Python frame of the faulting thread, or the length.

    faulthandler calls it the current one, but a thread that waits in native code is not: it has
    released the interpreter lock. Of such ones the main thread is known, since it is shown last,
    and the native stacks say that it has the signal.
    """
    current = _after(lines, "Current thread ")
    header = next((found for line in lines if (found := _SIGNALLED.match(line))), None)
    if current < len(lines) or header is None or header["pid"] != header["thread"]:
        return current
    stacks = [n + 1 for n, line in enumerate(lines) if line.startswith("Thread 0x")]
    return stacks[-1] if stacks else len(lines)


def _native_frames(lines: list[str]) -> list[str]:
    """Return the frames of the first thread that torch shows, without those of its handler."""
    found = []
    for line in lines[_after(lines, "SIG") :]:
        if "frame #" not in line:
            if not line.startswith("<"):
                break
            continue
        if "FatalSignalHandler" not in line:
            found.append("  " + line.strip())
    return found[:_NATIVE_FRAMES_MAX]


def _after(lines: list[str], beginning: str) -> int:
    """Return the index after the first line that begins so, or the length."""
    return next((n + 1 for n, line in enumerate(lines) if line.startswith(beginning)), len(lines))


@dataclass(frozen=True)
class OomCounters:
    """Out-of-memory kills so far, in the cgroup (None: unknown) and on the host."""

    cgroup_kills: int | None = None
    host_kills: int | None = None
    limit_bytes: int = 0


def read_memory() -> OomCounters:
    """Return the current counters; None for those that cannot be read."""
    folder, events, limit = _cgroup()
    return OomCounters(
        cgroup_kills=_counter(folder / events, "oom_kill") if folder else None,
        host_kills=_counter(Path("/proc/vmstat"), "oom_kill"),
        limit_bytes=_limit(folder / limit) if folder else 0,
    )


def kill_evidence(before: OomCounters, after: OomCounters, peak_bytes: int, exit_code: int) -> str:
    """Return in words what killed a worker; empty unless it was killed by SIGKILL."""
    if exit_code != -signal.SIGKILL:
        return ""
    peak = f"; its memory had peaked at {size(peak_bytes)}" if peak_bytes else ""
    if _grew(before.cgroup_kills, after.cgroup_kills):
        limit = f" (limit {size(after.limit_bytes)})" if after.limit_bytes else ""
        return f"out of memory: the kernel killed a process of this cgroup{limit}{peak}"
    if _grew(before.host_kills, after.host_kills):
        return f"out of memory, probably: the kernel killed a process of this host{peak}"
    if after.cgroup_kills is None and after.host_kills is None:
        return f"from outside, or out of memory: the kernel's counters cannot be read here{peak}"
    return f"from outside: neither the agent nor the kernel's out-of-memory killer{peak}"


def size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _cgroup() -> tuple[Path | None, str, str]:
    """Return this process's memory cgroup, and the names of its counter and limit files."""
    try:
        lines = _OURS.read_text().splitlines()
    except OSError:
        return None, "", ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.oom_control", "memory.limit_in_bytes")
            return _folder(_CGROUPS / "memory", path, names[0]), *names
    for line in lines:
        if line.startswith("0::"):
            names = ("memory.events", "memory.max")
            return _folder(_CGROUPS, line[3:], names[0]), *names
    return None, "", ""


def _folder(root: Path, path: str, counter: str) -> Path | None:
    """Return the cgroup's folder; in a container its path may be that of the host."""
    for folder in (root / path.lstrip("/"), root):
        if (folder / counter).is_file():
            return folder
    return None


def _counter(path: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < _LIMIT_BYTES_MAX else 0
