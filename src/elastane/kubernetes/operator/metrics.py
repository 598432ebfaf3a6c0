"""Counters, gauges and histograms, written in Prometheus' text format.

Owns the numbers of one process. Names of metrics and labels come from the operator, never from a
user, so their number is bounded. Values of labels are escaped nevertheless.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Buckets for the time of one reconcile: from no action to the creation of a thousand pods.
BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)


class Metrics:
    """All metrics of one operator. `gauge` values are computed at each read."""

    def __init__(self) -> None:
        self._help: dict[str, tuple[str, str]] = {}
        self._counts: dict[str, dict[str, float]] = {}
        self._gauges: dict[str, Callable[[], dict[str, float]]] = {}
        self._histograms: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def counter(self, name: str, what: str) -> None:
        """Declare a counter."""
        self._help[name] = ("counter", what)
        self._counts[name] = {}

    def gauge(self, name: str, what: str, read: Callable[[], dict[str, float]]) -> None:
        """Declare a gauge: `read` returns its value by labels, as `labels()` writes them."""
        self._help[name] = ("gauge", what)
        self._gauges[name] = read

    def histogram(self, name: str, what: str) -> None:
        """Declare a histogram of seconds."""
        self._help[name] = ("histogram", what)
        self._histograms[name] = [0] * (len(BUCKETS_S) + 1)
        self._sums[name] = 0.0

    def count(self, name: str, by: float = 1.0, **labelled: str) -> None:
        """Add to a counter."""
        series = self._counts[name]
        key = labels(**labelled)
        series[key] = series.get(key, 0.0) + by

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        self._histograms[name][bisect_left(BUCKETS_S, seconds)] += 1
        self._sums[name] += seconds

    def value(self, name: str, **labelled: str) -> float:
        """Return a counter's value; 0 where nothing was counted."""
        return self._counts[name].get(labels(**labelled), 0.0)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        lines: list[str] = []
        for name, (kind, what) in self._help.items():
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                lines += self._histogram_lines(name)
            else:
                series = self._counts[name] if kind == "counter" else self._gauges[name]()
                lines += [f"{name}{key} {_spelt(value)}" for key, value in sorted(series.items())]
        return "\n".join(lines) + "\n"

    def _histogram_lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self._histograms[name], strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {_spelt(self._sums[name])}", f"{name}_count {total}"]


def labels(**labelled: str) -> str:
    """Return labels as Prometheus writes them; nothing where there are none."""
    if not labelled:
        return ""
    inner = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labelled.items()))
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _spelt(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))
