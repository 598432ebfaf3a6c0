"""The verdict about workers for which others wait: its classes, and what each of them means. Pure.

`protocol.culprits` finds it at a standstill, `protocol.mismatches` also after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from elastane.protocol.model import Count, NamedWorker


class Kind(StrEnum):
    """The activity of a culprit, or the kind of fault.

    The values are stable: `explain --json` has them.
    """

    STOPPED = "stopped"
    ENDED = "ended"
    OTHER_COLLECTIVE = "other-collective"
    OTHER_SHAPE = "other-shape"
    LOCK_HELD = "lock-held"
    DATA_LOADER = "data-loader"
    DISK = "disk"
    BUSY = "busy"
    SLEEPS = "sleeps"
    RAISED = "raised"
    DEBUGGED = "debugged"
    NETWORK = "network"
    DEADLOCK = "deadlock"


class Outlook(StrEnum):
    """Whether another attempt may succeed."""

    MAY_PASS = "may-pass"  # the fault was of a machine, or transient
    SAME_AGAIN = "same-again"  # the script would repeat it
    UNKNOWN = "unknown"


# No collective of these workers ever completes, whatever the others wait for.
CERTAIN = frozenset((Kind.STOPPED, Kind.ENDED, Kind.OTHER_COLLECTIVE, Kind.OTHER_SHAPE))
# The workers' programs differ, so that no process is to be ended for the others to continue.
MISMATCHES = frozenset((Kind.OTHER_COLLECTIVE, Kind.OTHER_SHAPE))
OUTLOOKS: Mapping[Kind, Outlook] = {
    Kind.STOPPED: Outlook.MAY_PASS,
    Kind.ENDED: Outlook.SAME_AGAIN,
    Kind.OTHER_COLLECTIVE: Outlook.SAME_AGAIN,
    Kind.OTHER_SHAPE: Outlook.SAME_AGAIN,
    Kind.LOCK_HELD: Outlook.UNKNOWN,
    Kind.DATA_LOADER: Outlook.UNKNOWN,
    Kind.DISK: Outlook.MAY_PASS,
    Kind.BUSY: Outlook.UNKNOWN,
    Kind.SLEEPS: Outlook.UNKNOWN,
    Kind.RAISED: Outlook.UNKNOWN,
    Kind.DEBUGGED: Outlook.MAY_PASS,
    Kind.NETWORK: Outlook.MAY_PASS,
    Kind.DEADLOCK: Outlook.SAME_AGAIN,
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The culprits by rank, and the cause in one sentence; no ranks if no worker is behind.

    `worker` is the first of them. `place` is where the others wait. `ends`: the ranks that the
    coordinator ends if the wait would last for ever. They are the culprits, or one of the waiting
    workers if no culprit is alive.
    """

    kind: Kind
    ranks: tuple[Count, ...]
    sentence: str
    worker: NamedWorker | None = None
    group: str = ""
    sequence: int = 0
    place: str = ""
    ends: tuple[Count, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether the wait never ends by itself."""
        return self.kind in CERTAIN

    @property
    def is_mismatch(self) -> bool:
        """Whether workers called different collectives."""
        return self.kind in MISMATCHES

    @property
    def outlook(self) -> Outlook:
        """Whether another attempt may succeed."""
        return OUTLOOKS[self.kind]


def culprit_data(verdict: Verdict, still_s: float) -> dict[str, str | int | float | bool]:
    """Return the fields of a verdict that the event log keeps."""
    worker, named = verdict.worker, dict[str, str | int]()
    if worker is not None:
        named = {
            "culprit_node": worker.node_id,
            "culprit_local_rank": worker.local_rank,
            "culprit_pid": worker.pid,
        }
    return {
        **named,
        "class": verdict.kind.value,
        "ranks": ",".join(map(str, verdict.ranks)),
        "outlook": verdict.outlook.value,
        "certain": verdict.is_certain,
        "group": verdict.group,
        "sequence": verdict.sequence,
        "still_s": round(still_s, 1),
    }
