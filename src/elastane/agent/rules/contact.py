"""What an agent knows about its coordinator: whether a session exists, and when the coordinator
last had authority.

Authority is proved as of the moment the agent asked, not of the moment the answer came: while this
host stood still, an answer may have waited in a buffer. Messages of a session are ordered. A
message after the answer to a heartbeat was therefore sent after that heartbeat.
"""

from __future__ import annotations

from collections import deque

from elastane.errors import ExitCode
from elastane.protocol.messages import Refused
from elastane.protocol.model import Outcome


class Contact:
    """The history of the sessions with coordinators, on the agent's own monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self.linked = False
        self.away_s = now_s
        self.reason = "no search has started yet"
        self.authority_s = now_s
        self._asked_s: deque[float] = deque()
        self._sent_s = now_s
        self._slept_s: float | None = None

    def add_suspension(self, total_s: float) -> None:
        """Age everything proved by the time this host was suspended; `total_s` is the sum so far.

        The monotonic clock stands still during a suspension, while time passes for all other nodes.
        """
        known_s = total_s if self._slept_s is None else self._slept_s
        self._slept_s = max(known_s, total_s)
        suspended_s = self._slept_s - known_s
        if suspended_s:
            self.authority_s -= suspended_s
            self._sent_s -= suspended_s
            self._asked_s = deque(asked_s - suspended_s for asked_s in self._asked_s)

    @property
    def authority_boot_s(self) -> float:
        """When authority was last proved, in seconds of this host's CLOCK_BOOTTIME."""
        return self.authority_s + (self._slept_s or 0.0)

    def session_started(self, now_s: float) -> None:
        """Record a new session; every message on it is sent from now on."""
        self.linked, self._sent_s = True, now_s
        self._asked_s.clear()

    def session_ended(self, reason: str, now_s: float) -> None:
        """Record that there is no session, and why."""
        if self.linked:
            self.away_s = now_s
        self.linked, self.reason = False, reason

    def heartbeat_sent(self, now_s: float) -> None:
        """Record that a heartbeat was sent."""
        self._asked_s.append(now_s)

    def heartbeat_answered(self, authority: bool) -> None:
        """Record the answer to the oldest heartbeat, given with or without authority."""
        if self._asked_s:
            self._sent_s = self._asked_s.popleft()
        if authority:
            self.decision_received()

    def decision_received(self) -> None:
        """Record a decision: the coordinator had authority when it sent it."""
        self.authority_s = max(self.authority_s, self._sent_s)


def refused(message: Refused) -> Outcome:
    """Return the outcome for an agent that the coordinator refused.

    A fenced node is not at fault, so its exit code asks the process that started it to try again.
    """
    return Outcome(
        ok=False,
        reason=message.what,
        slug=message.slug,
        exit_code=ExitCode.TRY_AGAIN if message.slug == "node-fenced" else ExitCode.CONFIGURATION,
        next_step=message.next_step,
    )


def not_found(limit_s: float, reason: str) -> Outcome:
    """Return the outcome for an agent that found no coordinator in time."""
    return Outcome(
        ok=False,
        reason=f"no coordinator was found within {limit_s:g} s: {reason}",
        slug="no-coordinator",
        exit_code=ExitCode.TRY_AGAIN,
        next_step="check --rdzv-endpoint, and that an agent runs on that host",
    )
