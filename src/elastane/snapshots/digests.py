"""Digests of a group's snapshots, which detect a snapshot that changed after it was kept.

A dying worker may write anywhere. Therefore the newest snapshot is digested when the host is idle,
and compared before it is given out. It owns no memory. All but `digest_and_close` run under the
lock of the snapshot store. If digests cannot be computed, snapshots are given out unverified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from elastane.errors import ElastaneError
from elastane.snapshots.background import digests_of
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.shared_memory import close_all
from elastane.snapshots.writing import Source


class Verification(NamedTuple):
    """A snapshot that must be compared with its known digests."""

    name: Name
    known: tuple[str, ...]
    since: int  # How many workers had ended when the comparison began.


class Digests:
    """The digests of one snapshot store. `newest` is the snapshot that is given out first."""

    def __init__(self) -> None:
        self.newest: Name | None = None
        self._known: dict[Name, tuple[str, ...]] = {}
        self._checked: set[Name] = set()
        self._ended = 0

    def of(self, name: Name) -> tuple[str, ...] | None:
        """Return the digests of a snapshot's pieces, or None if they were not computed."""
        return self._known.get(name)

    def is_checked(self, name: Name) -> bool:
        """Whether it was verified since the last worker ended."""
        return name in self._checked

    def add(self, name: Name, digests: tuple[str, ...]) -> None:
        """Record the digests of a snapshot."""
        self._known[name] = digests

    def forget(self, name: Name) -> None:
        """Remove a snapshot."""
        self._known.pop(name, None)
        self._checked.discard(name)

    def worker_ended(self) -> None:
        """Discard all verifications: the ended worker may have changed memory since."""
        self._ended += 1
        self._checked.clear()

    def doubt(self) -> Verification | None:
        """Return the newest snapshot if it must be compared."""
        name = self.newest
        known = self._known.get(name) if name is not None else None
        if name is None or known is None or name in self._checked:
            return None
        return Verification(name, known, self._ended)

    def passed(self, doubt: Verification) -> None:
        """Record a verification, unless a worker ended meanwhile."""
        if doubt.since == self._ended:
            self._checked.add(doubt.name)


def digest_and_close(
    sources: tuple[Source, ...], wanted: Callable[[], bool], threads: int = 1
) -> tuple[str, ...] | None:
    """Return the digest of each source, and close the sources; None without a digest function."""
    try:
        return digests_of(sources, wanted, threads)
    except ElastaneError:
        return None  # xxhash is missing; the writer reports it.
    finally:
        close_all(source.slot for source in sources)
