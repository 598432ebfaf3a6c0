"""JSON lines that workers write while a test waits for what they say."""

from __future__ import annotations

import json
from pathlib import Path


class Growing:
    """The whole lines of a folder's `*.jsonl` files. Each is parsed once, however often asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, list[dict]]] = {}

    def lines(self) -> dict[str, list[dict]]:
        """What each file says so far, in its order, by the file's stem."""
        return {path.stem: [*self._of(path)] for path in self._folder.glob("*.jsonl")}

    def _of(self, path: Path) -> list[dict]:
        read, lines = self._read.get(path, (0, []))
        with path.open("rb") as file:
            file.seek(read)
            whole = file.read().rpartition(b"\n")[0]  # the last may be half written
        if whole:
            lines += [json.loads(line) for line in whole.splitlines()]
            self._read[path] = read + len(whole) + 1, lines
        return lines
