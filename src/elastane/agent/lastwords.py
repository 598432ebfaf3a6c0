"""What a worker that failed left to say: its error file, or the end of its stderr.

It reads files of the log folder, so its caller keeps it off the event loop. torch's `record`
writes the error file (torch.distributed.elastic.multiprocessing.errors); a script may not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elastane.runtime.streams import WorkerStreams, last_lines

_ERROR_FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class LastWords:
    """The text, and the error file where the worker wrote one."""

    message: str = ""
    error_file: str = ""


def read_last_words(streams: WorkerStreams) -> LastWords:
    """Return what is there; nothing is an answer too."""
    found = _error_file(streams.error_file)
    if found is None:
        return LastWords(last_lines(streams.stderr_path) if streams.stderr_path else "")
    message = _message(found)
    if not message and streams.stderr_path:
        message = last_lines(streams.stderr_path)
    return LastWords(message, streams.error_file)


def _error_file(path: str) -> bytes | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            return file.read(_ERROR_FILE_BYTES_MAX)
    except OSError:
        return None


def _message(content: bytes) -> str:
    """Return the traceback or the message of an error file; empty where it was cut off."""
    try:
        found = json.loads(content)
    except ValueError:
        return ""
    message = found.get("message", "") if isinstance(found, dict) else ""
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(stack or message.get("message", ""))
