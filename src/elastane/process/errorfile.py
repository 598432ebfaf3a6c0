"""The error file of a worker, in torch's format: the failed worker writes it, its agent reads it.

    {"message": {"message": "ValueError: text",
                 "extraInfo": {"py_callstack": "...", "timestamp": "1795237719"},
                 "errorCode": 3}}

Elastane adds nanoseconds to `extraInfo`: `timestamp_ns` of the wall clock, and `monotonic_ns` of
CLOCK_MONOTONIC. All processes of a host share that clock, so two failures of one host can be
ordered, which torch's whole seconds do not allow. This module owns the format and imports no torch.
A file that is absent, torn or of another format reads as None; a failed write raises OSError.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastane.process.files import write_atomic

ERROR_FILE_BYTES_MAX = 1 << 20
_NS = 1_000_000_000


@dataclass(frozen=True)
class WorkerError:
    """The content of an error file. A time that the file lacks is 0."""

    message: str
    callstack: str = ""
    time_ns: int = 0
    monotonic_ns: int = 0
    error_code: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


def read_error_file(path: str) -> WorkerError | None:
    """Return the content of the file, or None if it is absent or unreadable."""
    try:
        with Path(path).open("rb") as file:
            found = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    message = found.get("message", "")
    # If the message is plain text, the time is at the top level.
    extra: dict[str, Any] = found
    code = None
    if isinstance(message, dict):
        code = _code(message.get("errorCode"))
        given = message.get("extraInfo")
        extra = given if isinstance(given, dict) else {}
        message = message.get("message", "")
    return WorkerError(
        message=str(message),
        callstack=str(extra.get("py_callstack", "")),
        time_ns=_whole(extra.get("timestamp_ns")) or _whole(extra.get("timestamp")) * _NS,
        monotonic_ns=_whole(extra.get("monotonic_ns")),
        error_code=code,
        raw=found,
    )


def error_of(error: BaseException, time_ns: int, monotonic_ns: int) -> dict[str, Any]:
    """Return the error file's content for an exception; a long traceback loses its start."""
    stack = "".join(traceback.format_exception(error))
    return {
        "message": {
            "message": f"{type(error).__name__}: {_text(error)}",
            "extraInfo": {
                "py_callstack": stack[-ERROR_FILE_BYTES_MAX // 4 :],
                "timestamp": str(time_ns // _NS),
                "timestamp_ns": str(time_ns),
                "monotonic_ns": str(monotonic_ns),
            },
        }
    }


def write_error_file(path: str, error: BaseException, time_ns: int | None = None) -> None:
    """Write the error file of an exception at `time_ns` of the wall clock (default: now)."""
    now_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    ago_ns = max(0, now_ns - time_ns) if time_ns is not None else 0
    write_content(path, error_of(error, now_ns - ago_ns, monotonic_ns - ago_ns))


def write_content(path: str, content: Mapping[str, Any]) -> None:
    """Write an error file atomically: a concurrent reader sees the previous file or this one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, json.dumps(content).encode(), mode=0o666)


def with_error_code(content: Mapping[str, Any], code: int) -> dict[str, Any]:
    """Return an error file's content with the exit code of its process added."""
    message = content.get("message")
    if not isinstance(message, dict):
        return dict(content)  # A plain text: the format has no field for the code.
    return {**content, "message": {**message, "errorCode": code}}


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: {type(broken).__name__} in its __str__>"


def _whole(value: object) -> int:
    try:
        return max(0, int(str(value)))
    except ValueError:
        return 0


def _code(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
