"""What happens in the demo, when, and what it cost: pure functions of the training's progress.

Nothing here knows a process or a clock. An act is due when training is far enough, and when all
workers have trained for a while since the previous act, so that each recovery is seen whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from elastane.observe.dashboard import StepProgress

Act = Literal["kill-worker", "stop-worker", "kill-node", "leave", "add-node"]
TITLES: dict[Act, str] = {
    "kill-worker": "worker killed",
    "stop-worker": "worker hangs",
    "kill-node": "node killed",
    "leave": "node left",
    "add-node": "node arrived",
}
# Much training remains after the last act: a new node imports torch first, which takes seconds on a
# busy machine.
CHAOS_FIRST, CHAOS_LAST = 0.05, 0.6
# Chaos also acts within a step, while training reports whole steps only.
JITTER_S = 0.05


class PlannedAct(msgspec.Struct, frozen=True, kw_only=True):
    """An act that is due once a fraction `at` of all steps is done, and `jitter_s` later.

    `pick`, in [0, 1), chooses among its possible targets; 0.99 is the last of them.
    """

    act: Act
    at: float
    pick: float = 0.99
    jitter_s: float = 0.0


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The acts in their order, and how many steps all workers train between two of them."""

    acts: tuple[PlannedAct, ...]
    steady_steps: int


# At least one checkpoint lies between two acts, for the script that restarts.
STORY = DemoPlan(
    acts=(
        PlannedAct(act="kill-worker", at=0.15),
        # not at a checkpoint, so that some steps must be redone
        PlannedAct(act="kill-node", at=0.31),
        PlannedAct(act="add-node", at=0.42),
    ),
    steady_steps=30,
)


def chaos(seed: int, rounds: int) -> DemoPlan:
    """Return a plan from a seed: each round loses a node, adds a node, and loses a worker."""
    rng = random.Random(seed)
    acts: list[Act] = []
    nodes: list[Act] = ["kill-node", "leave"]
    workers: list[Act] = ["kill-worker", "stop-worker"]
    for deck in (nodes, workers):
        rng.shuffle(deck)
    for number in range(rounds):
        inner: list[Act] = [nodes[number % len(nodes)], "add-node"]
        inner.insert(rng.randrange(len(inner) + 1), workers[number % len(workers)])
        acts += inner
    places = sorted(rng.uniform(CHAOS_FIRST, CHAOS_LAST) for _ in acts)
    planned = (
        PlannedAct(act=act, at=at, pick=rng.random(), jitter_s=rng.random() * JITTER_S)
        for act, at in zip(acts, places, strict=True)
    )
    return DemoPlan(acts=tuple(planned), steady_steps=5)


class DemoDone(msgspec.Struct, frozen=True, kw_only=True):
    """An act that was performed, at a time of the clock used for progress."""

    act: Act
    time_s: float
    what: str


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an act cost the training.

    `recovery_s` is from the act to the first step of the next world. `interrupted_s` is from the
    last step before the act to that step: for an arrival, training notices only this.
    """

    act: Act
    what: str
    recovery_s: float
    interrupted_s: float
    redone_steps: int
    world_size: int


def next_act(
    plan: DemoPlan, points: Sequence[StepProgress], done: Sequence[DemoDone], workers: int
) -> PlannedAct | None:
    """Return the act that is due now, or None; `workers`: how many should run by now."""
    if len(done) == len(plan.acts) or not points:
        return None
    if done and not _is_over(plan, points, done[-1], workers):
        return None
    planned = plan.acts[len(done)]
    point = points[-1]
    return planned if point.step >= planned.at * point.total_steps else None


def cost_of(points: Sequence[StepProgress], done: DemoDone) -> Cost | None:
    """Return what an act cost, or None while the training has not recovered from it."""
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
        # A killed rank 0 may have lost the line of its last step.
        redone_steps=max(0, last.step - first.step + 1),
        world_size=first.world_size,
    )


def _is_over(plan: DemoPlan, points: Sequence[StepProgress], done: DemoDone, workers: int) -> bool:
    """Whether training recovered from an act with all workers, and continued for a while."""
    world, size = _world(points[-1]), points[-1].world_size
    if size != workers or cost_of(points, done) is None:
        return False
    since = [
        p for p in points if _world(p) == world and p.time > done.time_s and p.loss is not None
    ]
    return len(since) >= plan.steady_steps


def _first_after(steps: Sequence[StepProgress], done: DemoDone) -> int | None:
    """Return the index of the first step of another world after the act."""
    before = sum(point.time <= done.time_s for point in steps)
    if not before:
        return None
    world = _world(steps[before - 1])
    return next((i for i in range(before, len(steps)) if _world(steps[i]) != world), None)


def _world(point: StepProgress) -> tuple[int, int]:
    """What tells two worlds apart: rank 0's process, or the round that it reports."""
    return point.pid, point.round
