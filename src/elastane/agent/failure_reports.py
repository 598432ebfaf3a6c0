"""What a failed worker left about its end: its error file, or the end of its stderr.

It reads files of the log folder, so callers keep it off the event loop. torch's `record`, or the
start of the worker, writes the error file (`process.errorfile`); programs that are not Python write
none. Missing files give an empty text.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastane.process.errorfile import read_error_file
from elastane.process.streams import WorkerStreams, last_lines

_NS = 1e9
# A fatal signal leaves on stderr the Python stacks of all threads and the native ones, those of the
# faulting thread first. The whole is long; only a part of it is kept.
_FATAL = "Fatal Python error: "
_STACKS_LINES_MAX, _STACKS_BYTES_MAX = 5000, 512 << 10
_NATIVE_FRAMES_MAX = 12
_PYTHON_FRAMES_MAX = 20


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
    _, fatal, rest = text.rpartition(_FATAL)
    if not fatal:
        return ""
    name, *lines = rest.splitlines()
    python, native = _python_frames(lines), _native_frames(lines)
    stacks = (
        ["Native stack of the thread that faulted (innermost first):", *native] if native else []
    )
    stacks += ["Python stack (most recent call last):", *reversed(python)] if python else []
    return "\n".join([*stacks, f"{_FATAL}{name}"])


def _python_frames(lines: list[str]) -> list[str]:
    """Return the frames of the faulting thread, which faulthandler calls the current one."""
    found = []
    for line in lines[_after(lines, "Current thread ") :]:
        # Frames around the script belong to the start of a forked worker.
        if not line.startswith("  File ") or "elastane/process/zygote/" in line:
            break
        found.append(line)
    return found[:_PYTHON_FRAMES_MAX]


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
