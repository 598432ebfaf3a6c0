"""A page of shared memory in which its owner publishes a status, for other processes to read.

Only the owner writes. A reader needs no round trip: a busy process takes some tenths of a
millisecond to answer a question, sometimes several. How it fails: a reader that finds the page in
an update gets None, and asks the owner.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib

# A number that changes with every update, the size of the content, and its checksum.
_HEAD = struct.Struct("=QQQ")
_BYTES = 4 * mmap.PAGESIZE
WORDS_BYTES_MAX = _BYTES - _HEAD.size
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class OwnStatusPage:
    """The owner's view of the page; its memory is freed with the last descriptor."""

    def __init__(self) -> None:
        self._page = os.memfd_create("elastane-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._page, _BYTES)
        fcntl.fcntl(self._page, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self._page, _BYTES)
        self._number = 0

    def write(self, words: bytes) -> None:
        """Replace the content."""
        self._number += 1
        size = len(words)
        # The number first, without content: a reader then asks the owner.
        _HEAD.pack_into(self._memory, 0, self._number, 0, 0)
        if size <= WORDS_BYTES_MAX:
            self._memory[_HEAD.size : _HEAD.size + size] = words
            _HEAD.pack_into(self._memory, 0, self._number, size, _checksum(self._number, words))

    def descriptor(self) -> int:
        """Return a new descriptor, for a `SnapshotStatusPage`."""
        return os.dup(self._page)


class SnapshotStatusPage:
    """Another process's view of the page; closes the descriptor."""

    def __init__(self, descriptor: int) -> None:
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(descriptor, _BYTES, flags, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def number(self) -> int:
        """Return the current number."""
        number: int = _HEAD.unpack_from(self._memory)[0]
        return number

    def words(self, number: int) -> bytes | None:
        """Return the content under this number, or None if the page does not hold it.

        It also holds none that are too long for it. Then the owner can be asked.
        """
        found, size, checksum = _HEAD.unpack_from(self._memory)
        words = self._memory[_HEAD.size : _HEAD.size + size]
        # Another processor may see the last writes partly.
        is_whole = bool(words) and checksum == _checksum(number, words)
        return words if found == number and is_whole else None

    def close(self) -> None:
        """Unmap the page. Idempotent."""
        self._memory.close()


def _checksum(number: int, words: bytes) -> int:
    return zlib.crc32(words, number & 0xFFFFFFFF)
