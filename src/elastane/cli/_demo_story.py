"""What happens in the demo, when, and what it cost: pure functions of the training's progress.

Nothing here knows a process or a clock. An act is due when training is far enough, and when it
has gone on for a while since the act before, so that each recovery is seen whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from elastane.dashboard.view import Progress

Act = Literal["kill-worker", "kill-node", "add-node"]

# The place of each act in the training, as a fraction of its steps. After the arrival much is left:
# the newcomer imports torch first, which takes seconds on a busy machine.
SCRIPT: tuple[tuple[Act, float], ...] = (
    ("kill-worker", 0.15),
    ("kill-node", 0.31),  # not at a checkpoint, where nothing would have to be redone
    ("add-node", 0.42),
)
# Steps of the new world before the next act: one checkpoint at least lies between two acts.
SETTLED_STEPS = 30
TITLES: dict[Act, str] = {
    "kill-worker": "worker killed",
    "kill-node": "node killed",
    "add-node": "node arrived",
}


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """An act that was carried out, at a time of the clock that the progress is written by."""

    act: Act
    time_s: float
    what: str


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an act cost the training.

    `recovery_s` is from the act to the first step of the next world; `interrupted_s` is from
    the last step before it to that one, which for an arrival is all that training notices.
    """

    act: Act
    what: str
    recovery_s: float
    interrupted_s: float
    redone_steps: int
    world_size: int


def next_act(points: Sequence[Progress], done: Sequence[Done]) -> Act | None:
    """Return the act that is due now, or None."""
    if len(done) == len(SCRIPT) or not points:
        return None
    if done and (cost_of(points, done[-1]) is None or not _settled(points, done[-1])):
        return None
    act, fraction = SCRIPT[len(done)]
    point = points[-1]
    return act if point.step >= fraction * point.total_steps else None


def cost_of(points: Sequence[Progress], done: Done) -> Cost | None:
    """Return what an act cost, or None while the training has not come back from it."""
    steps = [point for point in points if point.loss is not None]
    split = _first_after(steps, done)
    if split is None:
        return None
    first, last = steps[split], steps[split - 1]
    return Cost(
        act=done.act,
        what=done.what,
        recovery_s=first.time - done.time_s,
        interrupted_s=first.time - last.time,
        redone_steps=last.step - first.step + 1,
        world_size=first.world_size,
    )


def _first_after(steps: Sequence[Progress], done: Done) -> int | None:
    """Return the index of the first step of another world after the act."""
    before = sum(point.time <= done.time_s for point in steps)
    if not before:
        return None
    world = _world(steps[before - 1])
    return next((i for i in range(before, len(steps)) if _world(steps[i]) != world), None)


def _settled(points: Sequence[Progress], done: Done) -> bool:
    world = _world(points[-1])
    since = [
        p for p in points if _world(p) == world and p.time > done.time_s and p.loss is not None
    ]
    return len(since) >= SETTLED_STEPS


def _world(point: Progress) -> tuple[int, int]:
    """What tells one world from the next: rank 0's process, or the round that it says it is in."""
    return point.pid, point.round
