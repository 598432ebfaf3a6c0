"""The results of repeated measurements: their statistics, their wording, and their machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.harness import BenchError, Launcher, Sample

RESULTS = Path(__file__).parent / "results"


@dataclass
class BenchResult:
    """The samples of one row under one launcher, and the failures of measuring it."""

    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> int:
        return sum(sample.seconds is not None for sample in self.samples)

    @property
    def seconds(self) -> list[float]:
        return sorted(s.seconds for s in self.samples if s.seconds is not None)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def redone_max(self) -> int | None:
        return max((s.redone for s in self.samples if s.redone is not None), default=None)

    def notes(self) -> list[str]:
        return sorted({sample.note for sample in self.samples if sample.note})


def run_alternating(
    measure: Callable[[Launcher], Sample], launchers: Sequence[Launcher], reps: int
) -> dict[str, BenchResult]:
    """Measure under each launcher in turn, `reps` times; a failed measurement is an error."""
    results = {launcher.name: BenchResult() for launcher in launchers}
    for _ in range(reps):
        for launcher in launchers:
            result = results[launcher.name]
            try:
                result.samples.append(measure(launcher))
            except BenchError as error:
                result.errors.append(str(error))
                print(f"bench: {error}", file=sys.stderr, flush=True)
    return results


def summary(result: BenchResult) -> str:
    """Return a result in one line: median, range, count of "never", repeated steps, notes."""
    parts = []
    if result.median_s is not None:
        low, high = spell(result.seconds[0]), spell(result.seconds[-1])
        parts.append(spell(result.median_s) + (f" ({low} to {high})" if low != high else ""))
    if lost := len(result.samples) - result.recovered:
        parts.append(f"never ({lost} of {len(result.samples)})")
    if result.redone_max is not None:
        parts.append(f"{result.redone_max} redone")
    if result.errors:
        parts.append(f"{len(result.errors)} not measured")
    return ", ".join([*parts, *result.notes()]) or "not measured"


def spell(seconds: float) -> str:
    """Return a duration with a suitable number of digits."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def cell(result: BenchResult, unit: str) -> str:
    """Return one cell: the median, and the 99th percentile of many samples."""
    seconds = result.seconds
    if unit == "%" and seconds:
        return ", ".join([f"{100 * statistics.median(seconds):.0f}%", *result.notes()])
    if unit == "ratio" and len(seconds) > 1:
        low, middle, high = (f"{100 * (part - 1):+.1f}%" for part in statistics.quantiles(seconds))
        spread = f"{middle} (quartiles {low} and {high} of {len(seconds)} pairs of blocks)"
        return ", ".join([spread, *result.notes()])
    if unit == "ratio":
        return "the measure"
    if len(seconds) < 20:
        return summary(result)
    late = seconds[int(len(seconds) * 0.99)]
    figures = f"{spell(statistics.median(seconds))}, 99th percentile {spell(late)}, worst"
    return ", ".join([f"{figures} {spell(seconds[-1])}, {len(seconds)} times", *result.notes()])


def machine() -> dict[str, str]:
    """Return the conditions of the figures: machine, date, versions, load."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "elastane": f"{installed('elastane')} {commit()}".strip(),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def measured_by(table: str, about: dict[str, str], more: str = "") -> str:
    """Return the first sentence above a table; `more` follows the version of torch."""
    return (
        f"Measured by `python -m bench {table}` on {about['date']}: {about['cores']} cores of"
        f" {about['cpu']}, {about['memory']}, Linux {about['kernel']}, Python {about['python']},"
        f" torch {about['torch']}{more}; load at the start {about['load']}."
    )


def write_json(
    name: str, about: dict[str, str], measured: dict[str, dict[str, BenchResult]]
) -> None:
    """Write all samples to a file of bench/results/ that is named by subject and time."""
    RESULTS.mkdir(exist_ok=True)
    stamp = about["date"][:16].replace(" ", "T").replace(":", "")
    rows = {
        key: {launcher: asdict(result) for launcher, result in results.items()}
        for key, results in measured.items()
    }
    path = RESULTS / f"{name}-{stamp}.json"
    path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    print(f"bench: written to {path}", file=sys.stderr)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Return the measured commit, marked if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
