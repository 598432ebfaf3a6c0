"""The closing box: how a job ended, with the facts that a person needs.

Pure text. It owns the wording; the verdict comes from protocol.diagnosis.
"""

from __future__ import annotations

import shlex
import textwrap
import unicodedata
from collections.abc import Sequence

from elastane.protocol.diagnosis import failure_text
from elastane.protocol.model import NO_RANK, Cause, Failure, Outcome

WIDTH = 100
MESSAGE_LINES_MAX = 12
_LABEL_CHARS = 12
# Side, rule, and the corners from the upper left one.
_FRAME = "║═╔╗╚╝"
_ASCII_FRAME = "|-++++"


def render_box(outcome: Outcome, log_dir: str = "", encoding: str = "utf-8") -> str:
    """Return the box of an outcome, at most `WIDTH` columns; `log_dir` is the job's own folder.

    What `encoding` lacks is escaped. A job that ended well gets one line.
    """
    if outcome.ok:
        return f"elastane: {outcome.reason}"
    slug = f" [{outcome.slug}]" if outcome.slug else ""
    # An outcome without a cause is only about this agent: it was refused, or it reached no
    # coordinator.
    subject = "The job failed" if outcome.cause is not None else "This agent ends"
    reason = outcome.reason
    if outcome.cause is not None:  # the cause has its own line
        reason = reason.removeprefix(f"{outcome.cause.what}; ")
    body = _wrapped("", f"{subject}: {reason}{slug}")
    if outcome.cause is not None:
        body += _cause_lines(outcome.cause)
    if outcome.before:
        body += _wrapped("before", f"another failure, shortly before: {outcome.before}")
    body += _wrapped("exit code", str(outcome.exit_code))
    if outcome.next_step:
        body += _wrapped("next", outcome.next_step)
    if log_dir:
        body += _wrapped("logs", log_dir)
        body += _wrapped("more", f"elastane explain {shlex.quote(log_dir)}")
    lines = [part for line in body for part in _encodable(printable(line), encoding)]
    return _framed(lines, _FRAME if _escaped(_FRAME, encoding) == _FRAME else _ASCII_FRAME)


def _framed(lines: Sequence[str], frame: str) -> str:
    side, rule = frame[0], frame[1] * (WIDTH - 2)
    middle = [f"{side} {_padded(line)} {side}" for line in lines]
    return "\n".join([f"{frame[2]}{rule}{frame[3]}", *middle, f"{frame[4]}{rule}{frame[5]}"])


def _encodable(line: str, encoding: str) -> list[str]:
    """Return the line with escapes for what the encoding lacks, wrapped again if it has any."""
    escaped = _escaped(line, encoding)
    if escaped == line:
        return [line]
    indent = " " * _LABEL_CHARS
    return textwrap.wrap(escaped, WIDTH - 4, subsequent_indent=indent, break_on_hyphens=False)


def _escaped(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _cause_lines(cause: Cause) -> list[str]:
    lines = _wrapped("root cause", cause.what)
    where = [f"node {cause.node_id}"] if cause.node_id else []
    where += [str(cause.fence).replace(" attempt", ", attempt")] if cause.fence else []
    if cause.failure is not None:
        failure = cause.failure
        rank = "no rank yet" if failure.rank == NO_RANK else f"rank {failure.rank}"
        where.append(f"{rank} (local rank {failure.local_rank}, pid {failure.pid})")
    lines += _wrapped("where", ", ".join(where)) if where else []
    if cause.failure is not None:
        lines += _failure_lines(cause.failure)
    if cause.alike:
        others = "1 other worker" if cause.alike == 1 else f"{cause.alike} other workers"
        lines += _wrapped("also", f"{others} failed by the same error")
    if cause.consequences:
        one = cause.consequences == 1
        followed = "1 more failure" if one else f"{cause.consequences} more failures"
        lines += _wrapped("followed", f"{followed} elsewhere, as a consequence")
    return lines


def _failure_lines(failure: Failure) -> list[str]:
    lines = _wrapped("evidence", failure_text(failure))
    label = "last output" if failure.output else "it said"
    said = without_carets(failure.message.strip("\n").splitlines())
    for number, line in enumerate(said[-MESSAGE_LINES_MAX:]):
        lines += _wrapped(label if number == 0 else " ", line.rstrip(), lines_max=3)
    for label, path in (("its log", failure.log_file), ("error file", failure.error_file)):
        lines += _wrapped(label, path) if path else []
    return lines


def _wrapped(label: str, text: str, *, lines_max: int = 8) -> list[str]:
    """Return `label  text` in lines that fit the box, indented under the text."""
    lead = f"{label:<{_LABEL_CHARS}}" if label else ""
    expanded = text.expandtabs(4)
    indent = " " * (len(lead) + len(expanded) - len(expanded.lstrip()))
    return textwrap.wrap(
        expanded.strip(),
        max(WIDTH // 2, WIDTH - 4 - (_columns(text) - len(text))),
        initial_indent=lead + indent[len(lead) :],
        subsequent_indent=indent[: WIDTH // 2],
        max_lines=lines_max,
        placeholder=" ...",
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [lead]


def without_carets(lines: Sequence[str]) -> list[str]:
    """Return a traceback's lines without those that only mark a part of the line before."""
    return [line for line in lines if not line.strip() or line.strip(" ^~")]


def printable(text: str) -> str:
    """Return `text` without characters that control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _padded(text: str) -> str:
    return text + " " * (WIDTH - 4 - _columns(text))


def _columns(text: str) -> int:
    """Return the width in columns: two for a wide character, none for an accent."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(bool(unicodedata.combining(char)) for char in text)
