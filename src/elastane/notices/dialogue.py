"""How a metadata server is asked, as pure code: requests out, answers in, notices at the end.

A cloud is a generator of requests. It gets the answer to each, and returns all notices that the
server shows. It raises UnreadableAnswerError for an answer that no such server gives; the shell
then asks again from the start.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

from elastane.protocol.events import Notice

# A metadata server answers within milliseconds; a loaded host within this.
ANSWER_S = 5.0
# A deadline that has passed, or is nearer than this, by the clocks: the node still runs, so it has
# about that much.
LEAST_S = 5.0


class UnreadableAnswerError(ValueError):
    """An answer that is not of such a metadata server."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `limit_s`: how long the whole answer may take."""

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    limit_s: float = ANSWER_S


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """One answer; names of headers in lower case. `clock_s`: when it came, in seconds since 1970.

    Redirects are answers like others, and are not followed.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    clock_s: float

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", errors="replace").strip()

    @property
    def now_s(self) -> float:
        """The time by the server's own clock, which its deadlines are of; else by this host's."""
        at_s = time_s(self.headers.get("date", ""))
        return self.clock_s if at_s is None else at_s

    def until_s(self, text: str) -> float | None:
        """Return how long it is until the time in `text`; None if that is no time."""
        at_s = time_s(text)
        return None if at_s is None else max(LEAST_S, at_s - self.now_s)

    def unreadable(self, asked: str) -> UnreadableAnswerError:
        """Return the error for this answer to `asked`."""
        shown = " ".join(self.text[:100].split())
        return UnreadableAnswerError(f"{asked}: unexpected answer {self.status} {shown!r}")


Dialogue = Generator[Ask, MetadataAnswer, list[Notice]]


class MetadataServer(Protocol):
    """A cloud's metadata server."""

    @property
    def pause_s(self) -> float:
        """How long to wait between two dialogues."""

    def ask(self) -> Dialogue:
        """Ask for all notices."""


def time_s(text: str) -> float | None:
    """Return a time by ISO 8601 or RFC 1123 in seconds since 1970 (UTC without an offset)."""
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            found = read(text)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
    return None
