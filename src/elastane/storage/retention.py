"""Which checkpoints may go: pure, so that "never the last valid one" is a fact of this file.

Knows nothing of how a checkpoint was judged; whoever removes what `to_remove` says has first read,
byte by byte, one of those that stay (`SeenCheckpoint.verified`). It cannot fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from elastane.protocol.checkpoints import Fence, Key, parse_folder

# sound: as its record says, as far as was looked. newer: of a later format, which is not for us
# to judge. pending: without a manifest, a save that goes on or did not end.
State = Literal["sound", "unsound", "newer", "pending"]


class SeenCheckpoint(msgspec.Struct, frozen=True):
    """One folder of a place, as it was seen. `silent_s` says since when nothing was written."""

    folder: str
    state: State
    verified: bool = False
    silent_s: float = 0.0

    @property
    def order(self) -> tuple[Key, str]:
        """Return what orders folders by age."""
        parsed = parse_folder(self.folder)
        assert parsed is not None, self.folder
        return parsed


class Removal(msgspec.Struct, frozen=True):
    """A folder that may go, and why."""

    folder: str
    why: str


def kept(seen: Sequence[SeenCheckpoint], keep: int) -> list[SeenCheckpoint]:
    """Return those that stay for being among the newest, newest first."""
    assert keep >= 1, keep
    sound = [one for one in seen if one.state == "sound"]
    return sorted(sound, key=lambda one: one.order, reverse=True)[:keep]


def surplus(
    seen: Sequence[SeenCheckpoint], keep: int, protect: Collection[str] = ()
) -> list[Removal]:
    """Return what of the published ones may go once one of those that stay was verified.

    Unsound ones go when as many sound ones as are to be kept are newer; till then somebody may
    want to look at them.
    """
    staying = kept(seen, keep)
    if len(staying) < keep:
        return []
    oldest = staying[-1].order
    going = [
        one
        for one in seen
        if one.state in ("sound", "unsound") and one.order < oldest and one.folder not in protect
    ]
    why = {"sound": f"{keep} newer ones are kept", "unsound": "not valid, and newer ones are kept"}
    return [Removal(one.folder, why[one.state]) for one in _oldest_first(going)]


def litter(
    seen: Sequence[SeenCheckpoint], litter_s: float, protect: Collection[str] = ()
) -> list[Removal]:
    """Return the saves that will never end: of a round that is over, or silent for long."""
    newest = _newest_fence(seen)
    removals = []
    for one in _oldest_first([one for one in seen if one.state == "pending"]):
        if one.folder in protect:
            continue
        if newest is not None and one.order[0].fence < newest:
            removals.append(Removal(one.folder, "never finished, and its round is over"))
        elif one.silent_s >= litter_s:
            removals.append(
                Removal(one.folder, f"never finished, and silent for {one.silent_s:.0f} s")
            )
    return removals


def to_remove(
    seen: Sequence[SeenCheckpoint], keep: int, protect: Collection[str] = (), *, litter_s: float
) -> list[Removal]:
    """Return what may be removed now.

    Invariant: where a sound one exists, a sound one stays; and no published one goes unless one
    of those that stay was verified.
    """
    going = litter(seen, litter_s, protect)
    if any(one.verified for one in kept(seen, keep)):
        going += surplus(seen, keep, protect)
    return going


def _newest_fence(seen: Sequence[SeenCheckpoint]) -> Fence | None:
    published = [one.order[0].fence for one in seen if one.state != "pending"]
    return max(published, default=None)


def _oldest_first(seen: Sequence[SeenCheckpoint]) -> list[SeenCheckpoint]:
    return sorted(seen, key=lambda one: one.order)
