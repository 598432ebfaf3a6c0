"""The scalars that workers of a job log, read from its folder as curves that have a bound.

Each node's worker that writes keeps a file `scalars.NODE.jsonl` in the job's folder. The writer
changes with the world, so the files are merged. A step below the last one of its file begins
another run, whose curves replace those before. Lines that are no entries are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

# A chart has no room for more; a longer curve loses every second point.
POINTS_MAX = 480
NAMES_MAX = 24
NAME_CHARACTERS_MAX = 80
FILES_MAX = 64
_PIECE_BYTES = 1 << 20
_STEP_MAX = 2**53
_DIGITS = 6
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ScalarCurve(msgspec.Struct, kw_only=True):
    """The values of one name by committed steps; a value that is not finite is None."""

    name: str
    steps: list[int]
    values: list[float | None]


class _Curve:
    """One name: each of `stride` points is kept."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float | None]] = []
        self._stride, self._skipped = 1, 0
        self._last: tuple[int, float | None] | None = None

    def add(self, step: int, value: float | None) -> None:
        """Add a point; a step that is there already is left out."""
        if self._last is not None and step <= self._last[0]:
            return
        self._last = (step, value)
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append((step, value))
        if len(self.points) >= POINTS_MAX:
            del self.points[::2]
            self._stride *= 2

    def whole(self) -> list[tuple[int, float | None]]:
        """Return the points, with the last one."""
        last = [self._last] if self._last and self.points[-1:] != [self._last] else []
        return [*self.points, *last]


class ScalarReader:
    """Reads what was added to the files of one job's folder; it may block on a slow disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._last_step: dict[Path, int] = {}
        self._curves: dict[str, _Curve] = {}
        # The curves of the last read, in the order in which their names came.
        self.curves: list[ScalarCurve] = []

    def read(self) -> None:
        """Read a piece of each file; it runs in a thread, and replaces `curves` at its end."""
        entries = [
            (float(said["time"]), path, said)
            for path in sorted(self._folder.glob("scalars.*.jsonl"))[:FILES_MAX]
            for said in self._new_lines(path)
        ]
        for _, path, said in sorted(entries, key=lambda one: one[0]):
            self._add(path, said)
        if entries:
            self.curves = [_shown(name, curve.whole()) for name, curve in self._curves.items()]

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read(_PIECE_BYTES)
        except OSError:
            return
        whole = piece.rpartition(b"\n")[0]
        if not whole and len(piece) == _PIECE_BYTES:
            whole = piece  # A line of this length is no entry.
        self._offsets[path] = offset + len(whole) + bool(whole)
        for line in whole.splitlines():
            if (said := _entry_of(line)) is not None:
                yield said

    def _add(self, path: Path, said: dict[str, Any]) -> None:
        step = said["step"]
        assert isinstance(step, int), "checked as it was read"
        if step < self._last_step.get(path, step):
            self._curves.clear()
            self._last_step.clear()
        self._last_step[path] = step
        for name, value in said.items():
            if name in ("step", "time") or (name not in self._curves and self._is_full()):
                continue
            number = _NOT_FINITE.get(value) if isinstance(value, str) else value
            if isinstance(number, int | float):
                self._curves.setdefault(name[:NAME_CHARACTERS_MAX], _Curve()).add(
                    step, _rounded(float(number))
                )

    def _is_full(self) -> bool:
        return len(self._curves) >= NAMES_MAX


def _shown(name: str, points: list[tuple[int, float | None]]) -> ScalarCurve:
    steps, values = [step for step, _ in points], [value for _, value in points]
    return ScalarCurve(name=name, steps=steps, values=values)


def _entry_of(line: bytes) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    step, time_s = said.get("step"), said.get("time")
    is_entry = type(step) is int and 0 <= step <= _STEP_MAX and isinstance(time_s, int | float)
    return said if is_entry else None


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
