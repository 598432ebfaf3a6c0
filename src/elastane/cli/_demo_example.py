"""The trainings that the demo can show: their commands, and what they promise to learn."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import elastane


@dataclass(frozen=True)
class Example:
    """One training script: its lengths, its delays after each step, and its promised result."""

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
        """Return the command for a training with the same bits in every world."""
        words = [*self.command(folder, fast=fast), "--deterministic"]
        return words if delays else [*words, "--step-delay", "0"]

    def missing(self) -> list[str]:
        """Return the packages that it needs but that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    def is_reached(self, value: float) -> bool:
        """Whether the result is as promised: at least an accuracy, at most a loss."""
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
