"""What a Store promises of leases and watches, as checks of what its clients saw. Pure.

`check_leases` takes the times in which each client counted itself as the holder, and
`check_watch` what one watch yielded. They raise BrokenPromiseError, which names the two
observations that cannot both be right. All times are in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BrokenPromiseError(AssertionError):
    """Two observations that no Store may give."""


@dataclass(frozen=True)
class Belief:
    """A lease that was taken or renewed: its client may decide from `since_s` until `until_s`.

    `asked_s` is when the request was made, `since_s` when it was answered, and `until_s` the end
    by `Lease.remaining_s`, or by an earlier release.
    """

    client: str
    term: int
    asked_s: float
    since_s: float
    until_s: float

    def __str__(self) -> str:
        return (
            f"{self.client} holds term {self.term} from {self.since_s:.6f} to {self.until_s:.6f}"
            f" (asked at {self.asked_s:.6f})"
        )


@dataclass(frozen=True)
class SeenHolder:
    """What `Store.holder` named: the term, and when it was asked for."""

    client: str
    term: int
    asked_s: float

    def __str__(self) -> str:
        return f"{self.client} sees term {self.term} (asked at {self.asked_s:.6f})"


def check_leases(beliefs: Iterable[Belief], seen: Iterable[SeenHolder] = ()) -> None:
    """Check that at most one client holds the lease at a time, and that terms only grow."""
    ordered = sorted(beliefs, key=lambda belief: belief.since_s)
    latest: dict[str, Belief] = {}
    for belief in ordered:
        if belief.until_s <= belief.since_s:
            continue  # The answer came after the end: it was never believed.
        for client, other in latest.items():
            if client != belief.client and other.until_s > belief.since_s:
                raise BrokenPromiseError(f"two hold the lease at once:\n  {other}\n  {belief}")
        known = latest.get(belief.client)
        if known is None or belief.until_s >= known.until_s:
            latest[belief.client] = belief
    _check_terms(ordered, seen)


def _check_terms(ordered: Sequence[Belief], seen: Iterable[SeenHolder]) -> None:
    owners: dict[int, Belief] = {}
    for belief in ordered:
        first = owners.setdefault(belief.term, belief)
        if first.client != belief.client:
            raise BrokenPromiseError(f"two hold one term:\n  {first}\n  {belief}")
    answered = iter(ordered)
    upcoming = next(answered, None)
    highest: Belief | None = None
    for asked in sorted([*ordered, *seen], key=lambda one: one.asked_s):
        while upcoming is not None and upcoming.since_s <= asked.asked_s:
            if highest is None or upcoming.term > highest.term:
                highest = upcoming
            upcoming = next(answered, None)
        if highest is not None and asked.term < highest.term:
            raise BrokenPromiseError(f"a term went back:\n  {highest}\n  {asked}")


def check_watch(watcher: str, versions: Iterable[int | None]) -> None:
    """Check that the versions of a watch only grow; None stands for a deletion."""
    highest, before = 0, 0
    for version in versions:
        if version is None and not before:
            raise BrokenPromiseError(f"{watcher} yielded a deletion of an absent key")
        if version is not None and version <= highest:
            raise BrokenPromiseError(f"{watcher} yielded version {version} after {highest}")
        before = version or 0
        highest = max(highest, before)
