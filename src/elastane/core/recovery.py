"""Whose state is right when a world begins, and who has to take it over. Pure.

A worker can only have applied step s if its reduction of step s was complete, and then it holds
every member's contribution. So whoever has committed more is right, and nobody is behind by more
than the step that was in hand. A worker that has just come, or whose healing was cut short, holds
no state, however many steps it once knew of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What one member says of itself: steps committed, and whether it holds their state.

    `torn`: it was receiving a state that did not come to its end, and holds half of each.
    """

    committed: int
    holds: bool
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Healing:
    """Who gives its state to whom, by rank, before the world makes a step.

    `fresh`: nobody has made a step yet; that of rank 0 is where all begin.
    """

    committed: int
    donor: int
    receivers: tuple[int, ...]
    fresh: bool


def decide(standings: Sequence[Standing]) -> Healing | None:
    """Return who heals whom; `standings` in the order of ranks, the same on all members.

    None: nobody holds a state, and some have half of one; all are to begin anew.
    """
    assert standings, "a world has members"
    holders = [rank for rank, standing in enumerate(standings) if standing.holds]
    if not holders and any(standing.torn for standing in standings):
        return None
    if not holders:
        return Healing(0, 0, tuple(range(1, len(standings))), fresh=True)
    committed = max(standings[rank].committed for rank in holders)
    right = {rank for rank in holders if standings[rank].committed == committed}
    receivers = tuple(rank for rank in range(len(standings)) if rank not in right)
    return Healing(committed, min(right), receivers, fresh=False)
