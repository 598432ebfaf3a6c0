"""The training of the demo, its acts (faults and arrivals), their times and their costs.

Pure functions: no process, file or clock. An act is due at a given progress of the training, but
not before all workers have trained for a while since the previous act, so that each recovery is
measured completely.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

import elastane

if TYPE_CHECKING:
    from elastane.observe.view import StepProgress


@dataclass(frozen=True)
class Example:
    """One training script: its lengths, its delays after each step, and its expected result."""

    script: str
    length: str
    lengths: tuple[int, int]
    delays_s: tuple[float, float]
    packages: tuple[str, ...]
    metric: str
    promised: float

    def command(self, folder: Path, *, fast: bool) -> list[str]:
        """Return the script and its arguments; `fast` is the shorter training."""
        words = ["--dir", str(folder), f"--{self.length}", str(self.lengths[fast])]
        words += ["--step-delay", str(self.delays_s[fast])]
        return [str(Path(elastane.__file__).parent / "examples" / self.script), *words]

    def exact(self, folder: Path, *, fast: bool, delays: bool) -> list[str]:
        """Return the command for a training that is bitwise equal in every world."""
        words = [*self.command(folder, fast=fast), "--deterministic"]
        return words if delays else [*words, "--step-delay", "0"]

    def missing(self) -> list[str]:
        """Return the packages that it needs but that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    def is_reached(self, value: float) -> bool:
        """Whether the result is as expected: at least an accuracy, at most a loss."""
        return value <= self.promised if self.metric == "loss" else value >= self.promised

    def spell(self, value: float) -> str:
        """Return the result in words."""
        if self.metric == "loss":
            return f"{value:.3f} nats a byte on held-out text"
        return f"accuracy on held-out digits: {value:.2%}"


_DIGITS = ("epochs", (20, 10), (0.03, 0.05), ("torch", "numpy", "sklearn"), "accuracy", 0.97)
RESTART = Example("digits.py", *_DIGITS)
EXAMPLES = {
    "digits": Example("digits_in_place.py", *_DIGITS),
    # An untrained model has 5.5 nats a byte.
    "gpt": Example("gpt.py", "steps", (400, 200), (0.0, 0.0), ("torch", "numpy"), "loss", 2.8),
}


Act = Literal["kill-worker", "stop-worker", "kill-node", "leave", "add-node"]
TITLES: dict[Act, str] = {
    "kill-worker": "worker killed",
    "stop-worker": "worker hangs",
    "kill-node": "node killed",
    "leave": "node left",
    "add-node": "node arrived",
}
# The fractions of the training between which --chaos acts. Much training remains after the last
# act: a new node first imports torch, which takes seconds on a busy machine.
CHAOS_FIRST, CHAOS_LAST = 0.05, 0.6
# From this fraction of all steps on, training is slowed down until all acts are done: each step
# takes half a second longer while a file of this name is beside the progress file.
SLOW_FROM = 0.75
SLOW_DOWN = "slow-down"
# The longest extra delay of an act of --chaos, so that it may also come in the middle of a step.
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
    """The cost of an act for the training.

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


def is_to_slow_down(
    plan: DemoPlan, points: Sequence[StepProgress], done: Sequence[DemoDone]
) -> bool:
    """Return whether training is near its end while an act or a recovery is still to come.

    On a busy machine a new node imports torch for longer than the rest of the training takes.
    """
    if not points or points[-1].step < SLOW_FROM * points[-1].total_steps:
        return False
    return len(done) < len(plan.acts) or cost_of(points, done[-1]) is None


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
    """The identity of a world: rank 0's process, or the round that it reports."""
    return point.pid, point.round


class WorkerEnd(msgspec.Struct, frozen=True):
    """The end of one worker: its number of steps, and the SHA-256 of its weights."""

    rank: int
    steps: int
    weights: str


@dataclass(frozen=True)
class Comparison:
    """The ends of the workers, and those of an undisturbed run."""

    seed: int
    here: Sequence[WorkerEnd]
    undisturbed: Sequence[WorkerEnd]

    @property
    def ok(self) -> bool:
        """Whether all workers ended after the same step with the same weights."""
        ends = {(ending.steps, ending.weights) for ending in (*self.here, *self.undisturbed)}
        return bool(self.here) and bool(self.undisturbed) and len(ends) == 1

    def as_text(self) -> list[str]:
        """Return the lines that a person reads."""
        verdict = "equal, to the last bit" if self.ok else "NOT equal"
        return [
            f"weights of the workers at the end: {_weights(self.here)}",
            f"weights of an undisturbed run:     {_weights(self.undisturbed)}: {verdict}",
            f"the same again: elastane demo --chaos --seed {self.seed}",
        ]

    def as_fields(self) -> dict[str, object]:
        """Return the fields of the JSON object."""
        return {
            "seed": self.seed,
            "weights": sorted({ending.weights for ending in self.here}),
            "undisturbed": sorted({ending.weights for ending in self.undisturbed}),
        }


@dataclass(frozen=True)
class DemoResult:
    """The outcome of a demo that ran to its end; `kept` is the folder to keep, or empty."""

    example: Example
    learned: float
    steps: int
    total_s: float
    acts: list[Cost]
    comparison: Comparison | None = None
    kept: str = ""

    @property
    def ok(self) -> bool:
        """Whether the result is as expected, and equal to the undisturbed run if compared."""
        equal = self.comparison is None or self.comparison.ok
        return self.example.is_reached(self.learned) and equal

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        acts = [
            {
                "act": cost.act,
                "what": cost.what,
                "recovery_s": round(cost.recovery_s, 4),
                "interrupted_s": round(cost.interrupted_s, 4),
                "redone_steps": cost.redone_steps,
                "world_size": cost.world_size,
            }
            for cost in self.acts
        ]
        fields = {
            self.example.metric: self.learned,
            "promised": self.example.promised,
            "steps": self.steps,
            "total_s": self.total_s,
            "acts": acts,
            "kept": self.kept,
            **(self.comparison.as_fields() if self.comparison else {}),
            "ok": self.ok,
        }
        return json.dumps(fields, indent=1)

    def as_text(self) -> str:
        """Return the table that a person reads."""
        lines = [
            "",
            f"{'':16}{'to the next step':>17}{'interrupted for':>16}{'steps redone':>14}"
            f"{'workers then':>14}",
        ]
        lines += [
            f"{TITLES[cost.act]:16}{cost.recovery_s:>15.2f} s{cost.interrupted_s:>14.2f} s"
            f"{cost.redone_steps:>14}{cost.world_size:>14}"
            for cost in self.acts
        ]
        reached = self.example.is_reached(self.learned)
        verdict = "" if reached else f": not the {self.example.promised:g} that it promises"
        lines += ["", self.example.spell(self.learned) + verdict]
        lines += self.comparison.as_text() if self.comparison else []
        lines.append(f"{self.steps} steps in {self.total_s:.1f} s, all included")
        if self.kept:
            lines.append(f"data, logs, events and progress: {self.kept}")
        return "\n".join(lines)


def _weights(endings: Sequence[WorkerEnd]) -> str:
    found = sorted({ending.weights[:16] for ending in endings})
    return f"{' and '.join(found) or 'none'} ({len(endings)} workers)"
