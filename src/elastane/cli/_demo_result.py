"""What the demo says at its end, in words and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from elastane.cli._demo_story import TITLES, Cost


@dataclass(frozen=True)
class Result:
    """The outcome of a demo that ran to its end. `kept` is the folder that stays, or empty."""

    accuracy: float
    accuracy_min: float
    steps: int
    total_s: float
    acts: list[Cost]
    kept: str = ""

    @property
    def ok(self) -> bool:
        """Whether the classifier is as good as an undisturbed one."""
        return self.accuracy >= self.accuracy_min

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
        return json.dumps({**asdict(self), "acts": acts, "ok": self.ok}, indent=1)

    def as_text(self) -> str:
        """Return the table that a person reads."""
        lines = [
            "",
            f"{'':16}{'to the next step':>17}{'training stood':>16}{'steps redone':>14}"
            f"{'workers then':>14}",
        ]
        lines += [
            f"{TITLES[cost.act]:16}{self._recovery(cost):>17}{cost.interrupted_s:>14.2f} s"
            f"{cost.redone_steps:>14}{cost.world_size:>14}"
            for cost in self.acts
        ]
        verdict = "" if self.ok else f": below {self.accuracy_min:.0%}"
        lines += [
            "",
            f"accuracy on held-out digits: {self.accuracy:.2%}{verdict}",
            f"{self.steps} steps in {self.total_s:.1f} s, all included",
        ]
        if self.kept:
            lines.append(f"data, logs, events and checkpoint: {self.kept}")
        return "\n".join(lines)

    @staticmethod
    def _recovery(cost: Cost) -> str:
        return f"{cost.recovery_s:.2f} s"
