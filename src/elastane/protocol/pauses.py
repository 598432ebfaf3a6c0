"""What a worker does while it makes no step and nothing is wrong: it saves, evaluates, restores.

Pure. The worker counts these times on its status page (`process.pauses`). The agent logs those of
rank 0, which the goodput account takes for those of the job.
"""

from __future__ import annotations

from enum import IntEnum

# Times that sum up to less than this are not logged, ...
PAUSE_LOGGED_S = 1.0
# ... and a pause that lasts is logged after each such time.
PAUSE_LASTS_S = 5.0


class Pause(IntEnum):
    """The kinds of pauses. The values are on the status page; `word` is in the event log."""

    SAVING = 1
    EVALUATING = 2
    RESTORING = 3

    @property
    def word(self) -> str:
        """The stable word of this kind."""
        return self.name.lower()
