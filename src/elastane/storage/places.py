"""A place for checkpoints: how the user's text opens it, its identity, and what its errors mean.

Nodes whose folders have the same id share a place. Storage may be away for a while, or hang. Then
the id is unknown, nothing is written, and each save asks again in a thread that may block as long
as it takes. How it fails: ConfigurationError for a text that names no place, StorageError with a
next step for a place that cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from elastane.errors import ConfigurationError, StorageError
from elastane.storage.folder import FolderStorage
from elastane.storage.protocol import Storage

# A folder answers at once; a job that can restore from memory waits no longer for one that hangs.
_ANSWER_S = 20.0


_NEXT_STEPS = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints; the next save tries again",
    errno.EDQUOT: "free space within this user's quota; the next save tries again",
    errno.EROFS: "mount that file system for writing on this node",
    errno.EACCES: "let this user read and write there",
    errno.EPERM: "let this user read and write there",
    errno.ENOENT: "create the folder, or mount its file system on this node",
    errno.ENOTDIR: "name a folder, not a file",
    errno.ESTALE: "mount that file system again on this node, as it was when the job began",
    errno.EIO: "look at the health of that file system and its server",
    errno.EREMOTEIO: "look at what the object store and its credentials say",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


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


def open_storage(where: str) -> Storage:
    """Open the place that `where` names: a path, file://, or any URL that fsspec knows.

    It reads and creates nothing. Raises ConfigurationError for a URL that cannot be opened.
    """
    scheme, mark, rest = where.partition("://")
    if not mark:
        return FolderStorage(Path(where).expanduser().absolute())
    if scheme in ("file", "local"):
        return FolderStorage(Path("/" + rest.lstrip("/")))
    from elastane.storage.objects import open_objects

    return open_objects(where)


def storage_error(where: str, error: OSError) -> StorageError:
    """Return the StorageError for an OSError at `where`."""
    path = error.filename or where
    return StorageError(
        f"checkpoints at {where}: {path}: {error.strerror or error}",
        slug="storage-unreachable",
        expected="a place that can be read, and written to for saving",
        next_step=_NEXT_STEPS.get(error.errno or 0, f"look at {where} from this node"),
    )


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn OSError into StorageError within a with statement."""
    try:
        yield
    except OSError as error:
        raise storage_error(where, error) from error


# Errors of one file, which other files need not have.
_OF_A_FILE = {
    errno.EIO: "cannot be read (I/O error)",
    errno.ELOOP: "is not a plain file",
    errno.EISDIR: "is not a plain file",
    errno.ENOTDIR: "is not a plain file",
    errno.EBADMSG: "cannot be read (bad message)",
    errno.EUCLEAN: "cannot be read (structure needs cleaning)",
}


def file_fault(name: str, error: OSError) -> str:
    """Describe an error that concerns one file; raises any other error."""
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if error.errno not in _OF_A_FILE:
        raise error
    return f"{name} {_OF_A_FILE[error.errno]}"


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
