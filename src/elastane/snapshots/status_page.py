"""A page of memory in which its owner says how something stands, for others to read.

Its owner alone writes it. Whoever has mapped it knows without a question what is so now: asked, a
process that is at work takes some tenths of a millisecond to answer, and several at times.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib

# A number, which is another one after each change; how long the words are, and their checksum.
_HEAD = struct.Struct("=QQQ")
_BYTES = 4 * mmap.PAGESIZE
WORDS_BYTES_MAX = _BYTES - _HEAD.size
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class OwnPage:
    """The page as its owner sees it; its memory goes with the last descriptor."""

    def __init__(self) -> None:
        self._page = os.memfd_create("elastane-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._page, _BYTES)
        fcntl.fcntl(self._page, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self._page, _BYTES)
        self._number = 0

    def turn(self, words: bytes) -> None:
        """Something has changed, and these words say how it stands now."""
        self._number += 1
        size = len(words)
        # First the number, with no words: who looks meanwhile asks.
        _HEAD.pack_into(self._memory, 0, self._number, 0, 0)
        if size <= WORDS_BYTES_MAX:
            self._memory[_HEAD.size : _HEAD.size + size] = words
            _HEAD.pack_into(self._memory, 0, self._number, size, _checksum(self._number, words))

    def descriptor(self) -> int:
        """Return a new descriptor, for a `SnapshotStatusPage`."""
        return os.dup(self._page)


class SnapshotStatusPage:
    """The page as another process sees it; the descriptor is closed here."""

    def __init__(self, descriptor: int) -> None:
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(descriptor, _BYTES, flags, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def number(self) -> int:
        """Return the number that it has now."""
        number: int = _HEAD.unpack_from(self._memory)[0]
        return number

    def words(self, number: int) -> bytes | None:
        """Return what it says under this number; None where it does not, or not yet, or no more.

        Nor does it where they are too long for it: then its owner can be asked.
        """
        found, size, checksum = _HEAD.unpack_from(self._memory)
        words = self._memory[_HEAD.size : _HEAD.size + size]
        # Another processor may see of what was written last this and not yet that.
        is_whole = bool(words) and checksum == _checksum(number, words)
        return words if found == number and is_whole else None

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._memory.close()


def _checksum(number: int, words: bytes) -> int:
    return zlib.crc32(words, number & 0xFFFFFFFF)
