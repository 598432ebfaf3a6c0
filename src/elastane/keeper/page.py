"""A page of memory with a number, which is another one after each change of what it stands for.

Its owner alone writes it. Who has mapped it knows without a question that nothing has changed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

_NUMBER = struct.Struct("=Q")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class OwnPage:
    """The page as its owner sees it; its memory goes with the last descriptor."""

    def __init__(self) -> None:
        self._page = os.memfd_create("elastane-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._page, mmap.PAGESIZE)
        fcntl.fcntl(self._page, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self._page, mmap.PAGESIZE)
        self._number = 0

    def turn(self) -> None:
        """Something has changed."""
        self._number += 1
        _NUMBER.pack_into(self._memory, 0, self._number)

    def descriptor(self) -> int:
        """Return a new descriptor, for a `Page`."""
        return os.dup(self._page)


class Page:
    """The page as another process sees it; the descriptor is closed here."""

    def __init__(self, descriptor: int) -> None:
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE, flags, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def number(self) -> int:
        """Return the number that it has now."""
        number: int = _NUMBER.unpack_from(self._memory)[0]
        return number

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._memory.close()
