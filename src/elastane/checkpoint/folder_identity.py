"""The identity of the folder that a node saves to: nodes with the same id share it.

Storage may be away for a while, or hang. Then the id is unknown, nothing is written, and each save
asks again in a thread that may block as long as it takes.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.storage.errors import storage_error, storage_errors
from elastane.storage.protocol import Storage

# A folder answers at once; a job that can restore from memory waits no longer for one that hangs.
_ANSWER_S = 20.0


def place_text(where: str | os.PathLike[str]) -> str:
    """Return the text of a place; raises ConfigurationError if it is not one."""
    text = os.fspath(where) if isinstance(where, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f"where is {where!r}",
            expected="a folder, or a URL that fsspec knows",
            next_step="Checkpointer('runs/demo')",
            slug="storage-url",
        )
    return text


def absolute_place(where: str | os.PathLike[str]) -> str:
    """Return a place as every process of this node finds it; refuses memory: URLs."""
    text = place_text(where)
    if text.startswith("memory:"):
        raise ConfigurationError(
            f"{text} is the memory of one process, and checkpoints are written by another",
            expected="a folder, or an object store",
            next_step="Checkpointer('runs/demo')",
            slug="storage-url",
        )
    return text if "://" in text else str(Path(text).expanduser().absolute())


class FolderIdentity:
    """The folder of one node; `known` is its id, "" until the storage has answered."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._thread: threading.Thread | None = None
        self.known = ""
        self.fault = ""

    def require(self) -> None:
        """Wait for the storage; raises StorageError if it cannot be read."""
        with storage_errors(self._storage.where):
            self.known = self._storage.place()

    def ask(self, timeout_s: float = 0.0) -> bool:
        """Return whether the id is known; otherwise ask the storage in the background."""
        if not self.known and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._ask, name="elastane-place", daemon=True)
            self._thread.start()
        if not self.known and self._thread is not None:
            self._thread.join(timeout_s)
        return bool(self.known)

    def wait(self) -> None:
        """Wait for the storage for a bounded time, since the job may restore from memory."""
        if not self.ask(_ANSWER_S):
            self.fault = self.fault or f"{self._storage.where}: no answer within {_ANSWER_S:g} s"

    def _ask(self) -> None:
        try:
            self.known = self._storage.place()
        except OSError as error:
            self.fault = str(storage_error(self._storage.where, error))
