"""The rules of removal. They are pure, so that this file alone proves "never the last valid one".

They do not know how a checkpoint was checked. The caller of `to_remove` has first read, byte by
byte, one of the checkpoints that stay (`SeenCheckpoint.verified`). They cannot fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from elastane.protocol.checkpoints import Fence, Key, parse_folder

# A save without a manifest whose files have not changed for this long belongs to writers that died.
# One put to a slow store may take minutes, and shows nothing meanwhile.
LITTER_S = 3600.0

# sound: as its record says, as far as it was checked. newer: of a later format, which cannot be
# judged here. pending: without a manifest, a save that is running or never finished.
State = Literal["sound", "unsound", "newer", "pending"]


class SeenCheckpoint(msgspec.Struct, frozen=True):
    """One folder of a place. `silent_s` is the time since the last write to it, in seconds."""

    folder: str
    state: State
    verified: bool = False
    silent_s: float = 0.0

    @property
    def order(self) -> tuple[Key, str]:
        """Return the age order of folders."""
        parsed = parse_folder(self.folder)
        assert parsed is not None, self.folder
        return parsed


class Removal(msgspec.Struct, frozen=True):
    """A folder that may be removed, and why."""

    folder: str
    why: str


def kept(seen: Sequence[SeenCheckpoint], keep: int) -> list[SeenCheckpoint]:
    """Return the newest `keep` sound ones, newest first."""
    assert keep >= 1, keep
    sound = [one for one in seen if one.state == "sound"]
    return sorted(sound, key=lambda one: one.order, reverse=True)[:keep]


def surplus(
    seen: Sequence[SeenCheckpoint], keep: int, protect: Collection[str] = ()
) -> list[Removal]:
    """Return the published ones that may go once one that stays was verified.

    Unsound ones go when `keep` newer ones are sound. Until then a person may want to inspect them.
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
    """Return saves that will never finish: their round is over, or nothing was written for long."""
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

    Invariant: if a sound one exists, a sound one stays, and no published one goes unless one of
    those that stay was verified.
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
