"""What the demo's training script writes: a line for each step, and how each worker ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from elastane.observe.dashboard import StepProgress, decode_progress
from elastane.protocol.unreadable import UNREADABLE


class WorkerEnd(msgspec.Struct, frozen=True):
    """How one worker ended: after how many steps, and with which weights (SHA-256)."""

    rank: int
    steps: int
    weights: str


class ProgressReader:
    """Reads the whole lines that a script has appended to its progress file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[StepProgress]:
        """Return the new lines; a missing file is empty."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        decoded = (decode_progress(line) for line in whole.splitlines())
        return [point for point in decoded if point is not None]


def endings(folder: Path) -> list[WorkerEnd]:
    """Return how the workers ended that wrote into a folder; other lines are ignored."""
    try:
        lines = (folder / "final.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [ending for line in lines if (ending := _decode(line)) is not None]


def _decode(line: bytes) -> WorkerEnd | None:
    try:
        return msgspec.json.decode(line, type=WorkerEnd)
    except UNREADABLE:
        return None
