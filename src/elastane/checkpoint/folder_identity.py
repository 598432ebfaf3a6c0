"""Which folder it is that a node saves to: nodes with the same id share it.

Storage may be away for a while, or hang: then the id is not known, nothing is written out, and
the place is looked for again at each save, by a thread that may wait as long as it likes.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.storage.errors import told_of, trouble
from elastane.storage.protocol import Storage

# A folder answers at once; a job that could go on from memory waits no longer for one that hangs.
_ANSWER_S = 20.0


def named(where: str | os.PathLike[str]) -> str:
    """Return the text of a place; ConfigurationError where it is none."""
    text = os.fspath(where) if isinstance(where, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f"where is {where!r}",
            expected="a folder, or a URL that fsspec knows",
            next_step="Checkpointer('runs/demo')",
            slug="storage-url",
        )
    return text


def absolute(where: str | os.PathLike[str]) -> str:
    """Return a place as every process of this node finds it; refuses one process's memory."""
    text = named(where)
    if text.startswith("memory:"):
        raise ConfigurationError(
            f"{text} is the memory of one process, and checkpoints are written by another",
            expected="a folder, or an object store",
            next_step="Checkpointer('runs/demo')",
            slug="storage-url",
        )
    return text if "://" in text else str(Path(text).expanduser().absolute())


class StoragePath:
    """One node's; `known` is "" until its storage has answered."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._thread: threading.Thread | None = None
        self.known = ""
        self.fault = ""

    def insist(self) -> None:
        """Wait for the storage; StorageError where it cannot be read."""
        with told_of(self._storage.where):
            self.known = self._storage.place()

    def look(self, timeout_s: float = 0.0) -> bool:
        """Return whether it is known; asks the storage where it is not."""
        if not self.known and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._ask, name="elastane-place", daemon=True)
            self._thread.start()
        if not self.known and self._thread is not None:
            self._thread.join(timeout_s)
        return bool(self.known)

    def wait(self) -> None:
        """Wait for the storage as long as it may take where a job could do without."""
        if not self.look(_ANSWER_S):
            self.fault = self.fault or f"{self._storage.where}: no answer within {_ANSWER_S:g} s"

    def _ask(self) -> None:
        try:
            self.known = self._storage.place()
        except OSError as error:
            self.fault = str(trouble(self._storage.where, error))
