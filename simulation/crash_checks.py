"""The rule that a script which fails at one step in each attempt ends its job, held against facts.

The simulation knows at which step each attempt of the script failed, and from which checkpoint the
attempt had begun. Three attempts of one membership that fail alike end the job, and no others do.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from elastane.coordinator.rules.incident import SAME_CRASHES_MAX
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Fence, Outcome
from simulation.observed import ObservedCluster


class RepeatedCrashCheck:
    """The failures of the script itself; each method returns what is broken."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._failed: list[tuple[Fence, int]] = []  # each attempt, with the step that it began at
        # Worlds in which a worker ended by something else, or a node departed.
        self._died: set[Fence] = set()
        self._charged: set[Fence] = set()
        self._row = 0  # failures in place with no other death or restart between
        # Where others join at boundaries: the step that this attempt began at, whether it has
        # failed, and by nothing else; and how many attempts from that step before it did the same.
        self._base, self._has_failed, self._is_clean, self._attempts = 0, False, True, 0
        self._hosts: set[str] = set()
        self.is_over = not cluster.script.fails_at

    @property
    def may_pass(self) -> bool:
        """Whether the script has failed as often as it was set to."""
        return 0 < self._cluster.script.fails_times <= len(self._failed)

    def died(self, fence: Fence) -> None:
        """Record that a worker of this world ended by something else."""
        self._died.add(fence)
        self._row, self._is_clean = 0, False

    def noted(self, event: LogEvent) -> None:
        """Record that a node departed, whose workers may have written a checkpoint unseen."""
        if event.kind is EventKind.NODE_DEPARTED and event.fence is not None:
            self._died.add(event.fence)

    def breaks_row(self) -> None:
        """Record that this attempt lost its state, or that its use of checkpoints is unknown."""
        self._is_clean = False

    def met(self, hosts: Iterable[str]) -> None:
        """Record the hosts of a world; an attempt with a further host repeats no earlier one."""
        self._is_clean = self._is_clean and self._hosts.issuperset(hosts)

    def restarted(self, base: int, hosts: Iterable[str]) -> None:
        """Record that all workers have started again, at the checkpoint of step `base`."""
        is_there, self._hosts = self._hosts == {*hosts}, {*hosts}
        is_alike = self._has_failed and self._is_clean and base == self._base and is_there
        self._attempts = self._attempts + 1 if is_alike else 0
        self._row, self._base, self._has_failed, self._is_clean = 0, base, False, True

    def charged(self, fence: Fence) -> None:
        """Record that the failure of this attempt is in the job's record."""
        self._charged.add(fence)

    def passed(self) -> None:
        """Record that the script no longer fails at that step."""
        self.is_over = True

    def failed(self, fence: Fence, base: int) -> str:
        """Record that this attempt failed there, begun at the checkpoint of step `base`."""
        self._failed.append((fence, base))
        row = self._failed[-SAME_CRASHES_MAX - 1 :]
        followed = all(
            later == Fence(before.round, before.attempt + 1)
            for (before, _), (later, _) in pairwise(row)
        )
        is_same = len(row) > SAME_CRASHES_MAX and followed and len({at for _, at in row}) == 1
        is_known = {each for each, _ in row[:-1]} <= self._charged
        # A loss beside it may be the cause of an attempt's end. A coordinator without a store has
        # no record of the attempts before it. An attempt without a step counts if it ended soon.
        may_miss = not self._cluster.store_backed or base + 1 == self._cluster.script.fails_at
        is_other = self._died & {each for each, _ in row} or (self._cluster.upset and may_miss)
        return (
            f"{fence} failed at step {self._cluster.script.fails_at} as the {SAME_CRASHES_MAX}"
            " attempts before it, which should have ended the job"
            if is_same and is_known and not is_other
            else ""
        )

    def failed_in_place(self, fence: Fence) -> str:
        """Record that a worker failed there while the others continue, to make that step again."""
        self._failed.append((fence, 0))
        self._row += self._cluster.script.fails_at > 1  # Without a step none shows, so none counts.
        return (
            f"{fence} failed at step {self._cluster.script.fails_at} as the {SAME_CRASHES_MAX}"
            " worlds before it, which should have ended the job"
            if self._row > SAME_CRASHES_MAX and not self._cluster.upset and not self._may_split
            else ""
        )

    @property
    def _may_split(self) -> bool:
        """Whether several coordinators without a store may each have a part of the failures."""
        return not self._cluster.store_backed and self._cluster.coordinators_started > 1

    def failed_at_boundaries(self, fence: Fence) -> str:
        """Record that a worker failed there where others join at boundaries alone.

        The survivors fail there, too, so no boundary follows before all start again. Only such
        attempts count.
        """
        self._failed.append((fence, self._base))
        self._has_failed = True
        return (
            f"{fence} failed at step {self._cluster.script.fails_at} as {self._attempts} attempts"
            " before it, which should have ended the job"
            if self._attempts >= SAME_CRASHES_MAX
            and self._is_clean
            and not (self._cluster.upset or self._may_split)
            else ""
        )

    def ended(self, outcome: Outcome) -> str:
        """Check a job that ended though restarts were left."""
        row = self._failed[-SAME_CRASHES_MAX:]
        if len(row) == SAME_CRASHES_MAX and len({at for _, at in row}) == 1:
            return ""
        return f"the job failed though the last attempts did not fail alike: {outcome.reason}"
