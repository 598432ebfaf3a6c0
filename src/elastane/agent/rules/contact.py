"""What an agent knows of its coordinator: whether it is there, and since when it may decide.

Authority is proved as of the moment when the agent asked, never when the answer came: an answer
may have waited in a buffer for as long as this host stood still. Sessions are ordered, so
whatever comes after the answer to a heartbeat was sent after that heartbeat.
"""

from __future__ import annotations

from collections import deque

from elastane.errors import ExitCode
from elastane.protocol.messages import Refused
from elastane.protocol.model import Outcome


class Contact:
    """The session's history on the agent's own clock."""

    def __init__(self, now_s: float) -> None:
        self.linked = False
        self.away_s = now_s
        self.reason = "none was looked for yet"
        self.authority_s = now_s
        self._asked_s: deque[float] = deque()
        self._sent_s = now_s
        self._slept_s: float | None = None

    def slept(self, total_s: float) -> None:
        """This host was suspended for so long in all, in which its monotonic clock stood still.

        For all others time went by: what was proved before is older than that clock says.
        """
        before_s = total_s if self._slept_s is None else self._slept_s
        self._slept_s = max(before_s, total_s)
        for_s = self._slept_s - before_s
        if for_s:
            self.authority_s -= for_s
            self._sent_s -= for_s
            self._asked_s = deque(asked_s - for_s for asked_s in self._asked_s)

    @property
    def authority_boot_s(self) -> float:
        """When authority was last proved, in seconds of this host's CLOCK_BOOTTIME."""
        return self.authority_s + (self._slept_s or 0.0)

    def begin(self, now_s: float) -> None:
        """A session stands; all that comes over it is sent from now on."""
        self.linked, self._sent_s = True, now_s
        self._asked_s.clear()

    def end(self, reason: str, now_s: float) -> None:
        """There is no session."""
        if self.linked:
            self.away_s = now_s
        self.linked, self.reason = False, reason

    def asked(self, now_s: float) -> None:
        """A heartbeat was sent."""
        self._asked_s.append(now_s)

    def answered(self, authority: bool) -> None:
        """A heartbeat was answered; with authority, or without."""
        if self._asked_s:
            self._sent_s = self._asked_s.popleft()
        if authority:
            self.decided()

    def decided(self) -> None:
        """What came now is a decision: the coordinator had authority when it sent it."""
        self.authority_s = max(self.authority_s, self._sent_s)


def refused(message: Refused) -> Outcome:
    """Return how the job ended for an agent that was turned away.

    Nothing is wrong with one that is fenced: to whoever started it, it may be had again elsewhere.
    """
    return Outcome(
        ok=False,
        reason=message.what,
        slug=message.slug,
        exit_code=ExitCode.TRY_AGAIN if message.slug == "node-fenced" else ExitCode.CONFIGURATION,
        next_step=message.next_step,
    )


def not_found(limit_s: float, reason: str) -> Outcome:
    """Return how the job ended for an agent that found no coordinator in time."""
    return Outcome(
        ok=False,
        reason=f"no coordinator was found within {limit_s:g} s: {reason}",
        slug="no-coordinator",
        exit_code=ExitCode.TRY_AGAIN,
        next_step="check --rdzv-endpoint, and that an agent runs on that host",
    )
