"""The interface of a place for checkpoints. Every call blocks, so callers use threads.

Paths are "folder/file" or "file", relative to the place. Faults of the world are OSError, including
those of object store clients. FileNotFoundError means that a file is missing, ELOOP that it is not
a plain file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from elastane.protocol.checkpoints import FileRecord
from elastane.storage.digest import View

# Reports progress: bytes done, bytes in total.
Progress = Callable[[int, int], None]
# Polled by long operations; if it returns true they end with OSError ECANCELED.
Stop = Callable[[], bool]


def never() -> bool:
    """Never stop: the default."""
    return False


class Storage(Protocol):
    """A folder, or a prefix of an object store."""

    where: str
    remote: bool  # Each request takes a while, whatever its size.
    readers: int  # The number of threads that reading keeps busy.

    def folders(self) -> list[str]:
        """Return the folder names of saves, unordered; [] if the place does not exist yet."""
        ...

    def sizes(self, folder: str, names: Iterable[str]) -> Mapping[str, int]:
        """Return the size of each of these files that exists as a plain file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of all entries of a folder."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes from `offset` on, fewer at the end; None: all up to the end."""
        ...

    def open_local(self, path: str) -> int | None:
        """Return a descriptor of the file for preadv, or None if it is not a local file."""
        ...

    def write(self, path: str, regions: Iterable[View], stop: Stop = never) -> FileRecord:
        """Write a new file; on return it is durable, after a failure it does not exist.

        No region may change until then: bytes are digested and sent from where they are. A sequence
        is written at the full speed of a disk. Any other iterable is advanced in this thread, once
        the region before is no longer needed or lies in the same chunk.
        """
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Create a small file durably and atomically; returns False if it exists.

        If a place has no such operation, two concurrent callers may both get True, and the later
        content stays. Therefore all that may create one path must write the same content.
        """
        ...

    def make_durable(self, folder: str) -> None:
        """Make the files of a folder durable that other writers have finished, and its name.

        A writer that was killed may have left them behind without the last fsync.
        """
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder, its manifest first: an interrupted removal leaves an unfinished save."""
        ...

    def changed_s(self, folder: str) -> float:
        """Return when a folder was last written to, by the clock of the place."""
        ...

    def now_s(self) -> float:
        """Return the time of the clock of the place; writes a file there and removes it."""
        ...

    def place(self) -> str:
        """Return the id of this place, equal on all nodes that read it. Created once."""
        ...
