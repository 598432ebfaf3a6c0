"""What is known of the bytes of a group's snapshots, so that none is given out that has changed.

The digest of the newest is taken when the host has nothing better to do, and compared before a
snapshot is given out: a worker may write anywhere in its last moments. Owns no memory. All but
`taken` are called under the lock of the shelf. How it fails: not at all; where digests cannot be
taken, snapshots are given out unchecked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from elastane.errors import ElastaneError
from elastane.snapshots.background import digests_of
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.shared_memory import close_all
from elastane.snapshots.writing import Source


class Doubt(NamedTuple):
    """A snapshot that is to be compared with the digests that were taken of it."""

    name: Name
    known: tuple[str, ...]
    since: int  # how many workers had ended


class Digests:
    """Of one shelf. `newest` is the snapshot that is given out first."""

    def __init__(self) -> None:
        self.newest: Name | None = None
        self._known: dict[Name, tuple[str, ...]] = {}
        self._checked: set[Name] = set()
        self._ended = 0

    def of(self, name: Name) -> tuple[str, ...] | None:
        """Return the digests of each piece; None where they have not been taken."""
        return self._known.get(name)

    def is_checked(self, name: Name) -> bool:
        """Whether it has passed since a worker ended."""
        return name in self._checked

    def add(self, name: Name, digests: tuple[str, ...]) -> None:
        """Take in the digests of a snapshot."""
        self._known[name] = digests

    def forget(self, name: Name) -> None:
        """A snapshot is not there any more."""
        self._known.pop(name, None)
        self._checked.discard(name)

    def ended(self) -> None:
        """A worker is no more: what had passed may have been changed since."""
        self._ended += 1
        self._checked.clear()

    def doubt(self) -> Doubt | None:
        """Return the newest, where it is to be compared."""
        name = self.newest
        known = self._known.get(name) if name is not None else None
        if name is None or known is None or name in self._checked:
            return None
        return Doubt(name, known, self._ended)

    def passed(self, doubt: Doubt) -> None:
        """It is as it was; where a worker has ended meanwhile, that says nothing."""
        if doubt.since == self._ended:
            self._checked.add(doubt.name)


def taken(
    sources: tuple[Source, ...], wanted: Callable[[], bool], threads: int = 1
) -> tuple[str, ...] | None:
    """Return the digest of each source, which are closed; None where there are none to be had."""
    try:
        return digests_of(sources, wanted, threads)
    except ElastaneError:
        return None  # xxhash is not there: who writes is told so
    finally:
        close_all(source.slot for source in sources)
