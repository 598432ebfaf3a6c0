"""What a place for checkpoints can do. All of it blocks: callers have threads for it.

Paths are "folder/file" or "file", relative to the place. Faults of the world are OSErrors, also
where an object store's client has others; FileNotFoundError is what is not there, and ELOOP what
is there and no plain file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from elastane.protocol.checkpoints import FileRecord
from elastane.storage.digest import View

# Tells how far something has come: bytes done, bytes in all.
Progress = Callable[[int, int], None]
# Asked now and then by what takes long; true ends it with OSError ECANCELED.
Stop = Callable[[], bool]


def never() -> bool:
    """Do not stop: the default of what may be stopped."""
    return False


class Storage(Protocol):
    """A folder, or a prefix of an object store."""

    where: str
    remote: bool  # each request takes a while, whatever its size
    readers: int  # threads that reading keeps busy

    def folders(self) -> list[str]:
        """Return the names of the folders of saves, in no order; [] where the place is not yet."""
        ...

    def sizes(self, folder: str, names: Iterable[str]) -> Mapping[str, int]:
        """Return the size of each of these files that is there and is a plain file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file."""
        ...

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return a range of a file, less where the file ends before; all of it without a size."""
        ...

    def open_local(self, path: str) -> int | None:
        """Return a descriptor of the file, for preadv; None where it is not a file of this host."""
        ...

    def write(self, path: str, regions: Iterable[View], stop: Stop = never) -> FileRecord:
        """Write a file that is not there yet. On return it is durable; on failure it is not there.

        No region may change before that, for its bytes are digested and sent from where they are.
        A sequence is written at a disk's full pace; of other iterables the next region is asked
        for, in this thread, once the one before it is needed no more or lies in the same chunk.
        """
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Make a small file durably and in one instant; False where there is one already.

        Where a place has no such operation, two who create one path at the same time may both be
        told True, and the later content stays. So all who may create one path bring the same.
        """
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder: its manifest first, so that what is left of it is a save without end."""
        ...

    def changed_s(self, folder: str) -> float:
        """Return when a folder was last written to, by the place's own clock."""
        ...

    def now_s(self) -> float:
        """Return the time by the place's own clock. Writes something there and removes it."""
        ...

    def place(self) -> str:
        """Return the id of this place: two nodes that read the same share it. Made once."""
        ...
