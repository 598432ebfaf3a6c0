"""The result of the demo, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastane.cli._demo_example import Example
from elastane.cli._demo_progress import WorkerEnd
from elastane.cli._demo_story import TITLES, Cost


@dataclass(frozen=True)
class Comparison:
    """How the workers ended, beside those of an undisturbed run."""

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
        """Whether the training reached its promise, and equals the undisturbed run if compared."""
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
            f"{'':16}{'to the next step':>17}{'training stood':>16}{'steps redone':>14}"
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
