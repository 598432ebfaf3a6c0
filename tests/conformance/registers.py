"""Registers for the conformance suite: in memory, and in a locked file for several processes."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path


class MemoryRegister:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[bytes, int] | None = None

    def get_state(self) -> tuple[bytes, int] | None:
        return self._found

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool]:
        with self._lock:
            if (self._found[1] if self._found else None) != token:
                assert self._found is not None
                return (*self._found, False)
            self._found = (bytes(state), (token or 0) + 1)
            return (*self._found, True)


class FileRegister:
    """The token in the first twenty bytes, the value after them; a killed writer leaves both."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_state(self) -> tuple[bytes, int] | None:
        if not self._path.exists():
            return None
        content = self._path.read_bytes()
        return content[20:], int(content[:20])

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool]:
        with self._path.with_name(f"{self._path.name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.get_state()
            if (found[1] if found else None) != token:
                assert found is not None
                return (*found, False)
            written = self._path.with_name(f"{self._path.name}.new")
            written.write_bytes(b"%020d" % ((token or 0) + 1) + state)
            written.replace(self._path)
            return state, (token or 0) + 1, True
