"""What a worker that failed left to say: its error file, or the end of its stderr.

It reads files of the log folder, so its caller keeps it off the event loop. `record`, or the
worker's own start, writes the error file (runtime.errorfile); programs that are not Python do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastane.process.errorfile import read_error_file
from elastane.process.streams import WorkerStreams, last_lines

_NS = 1e9
# What a fatal signal leaves on stderr: the Python stacks of all threads, and the native ones, the
# faulting thread's first. The whole is long; what is kept of it is not.
_FATAL = "Fatal Python error: "
_STACKS_LINES_MAX, _STACKS_BYTES_MAX = 5000, 512 << 10
_NATIVE_FRAMES_MAX = 12
_PYTHON_FRAMES_MAX = 20


@dataclass(frozen=True)
class LastWords:
    """The text, the error file where the worker wrote one, and when it failed by that.

    `failed_s` is of this host's monotonic clock; 0 where the file does not tell. `output`: the
    text is only the end of stderr, which need not be about the worker's end.
    """

    message: str = ""
    error_file: str = ""
    failed_s: float = 0.0
    output: bool = False


def read_last_words(streams: WorkerStreams) -> LastWords:
    """Return what is there; nothing is an answer too."""
    error = read_error_file(streams.error_file) if streams.error_file else None
    said = _said(streams.stderr_tail) if streams.stderr_tail else LastWords()
    if error is None:
        return said
    text = error.callstack or error.message or said.message
    return LastWords(text, streams.error_file, error.monotonic_ns / _NS)


def _said(path: str) -> LastWords:
    """Return the end of stderr; of a crash, its stacks."""
    text = last_lines(path, lines_max=_STACKS_LINES_MAX, bytes_max=_STACKS_BYTES_MAX)
    crash = crash_words(text)
    return LastWords(crash or last_lines(path), output=not crash)


def crash_words(text: str) -> str:
    """Return what a crash left in the order of a traceback: its name comes last.

    First the native frames of the thread that faulted, then its Python frames, the innermost
    last. Empty where `text` tells of no crash.
    """
    _, fatal, rest = text.rpartition(_FATAL)
    if not fatal:
        return ""
    name, *lines = rest.splitlines()
    python, native = _python_frames(lines), _native_frames(lines)
    words = (
        ["Native stack of the thread that faulted (innermost first):", *native] if native else []
    )
    words += ["Python stack (most recent call last):", *reversed(python)] if python else []
    return "\n".join([*words, f"{_FATAL}{name}"])


def _python_frames(lines: list[str]) -> list[str]:
    """Return the frames of the thread that faulted, which faulthandler calls the current one."""
    found = []
    for line in lines[_after(lines, "Current thread ") :]:
        # Those around the script are the start of a forked worker.
        if not line.startswith("  File ") or "elastane/process/zygote/" in line:
            break
        found.append(line)
    return found[:_PYTHON_FRAMES_MAX]


def _native_frames(lines: list[str]) -> list[str]:
    """Return the frames of the first thread that torch shows, but for the handler's own."""
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
    """Return the place after the first line that begins so, or the end."""
    return next((n + 1 for n, line in enumerate(lines) if line.startswith(beginning)), len(lines))
