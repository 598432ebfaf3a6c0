"""The channel between a worker and its snapshot server: frames, file descriptors, a status page.

A frame is its length in four bytes, followed by its bytes. Descriptors follow the frame that
announces their number, in batches of one byte each. Every call blocks, bounded in time and size.
How it fails: EOFError if the peer ended between two frames, ConnectionError or TimeoutError if the
connection broke within one, ValueError for a frame that is too long.

The status page is shared memory in which the server publishes its status. A reader needs no round
trip: a busy process takes some tenths of a millisecond to answer a question, sometimes several. A
reader that finds the page in an update gets None, and asks the server.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Sequence

from elastane.snapshots.limits import STALL_S

_LENGTH_BYTES = 4
# The kernel accepts at most 253 descriptors in one message (SCM_MAX_FD).
_DESCRIPTORS_AT_ONCE = 200
_PIECE_BYTES = 1 << 20
_JOINED_BYTES_MAX = 64 << 10


# A number that changes with every update, the size of the content, and its checksum.
_HEAD = struct.Struct("=QQQ")
_BYTES = 4 * mmap.PAGESIZE
WORDS_BYTES_MAX = _BYTES - _HEAD.size
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SnapshotChannel:
    """Sends and receives frames, with descriptors, over a connected stream socket.

    `ends` is a descriptor that becomes readable when the peer dies: the peer's socket may stay open
    in a process that it forked. `say_s` bounds the sending of one message.
    """

    def __init__(self, end: socket.socket, ends: int = -1, *, say_s: float = STALL_S) -> None:
        self._end = end
        self._say_s = say_s
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._ends = ends
        if ends >= 0:
            self._poll.register(ends, select.POLLIN)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a frame and its descriptors."""
        self._end.settimeout(self._say_s)
        head = len(frame).to_bytes(_LENGTH_BYTES, "little")
        if len(frame) <= _JOINED_BYTES_MAX:
            self._end.sendall(head + frame)  # One send wakes the peer once.
        else:
            self._end.sendall(head)
            self._end.sendall(frame)
        for at in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
            some = descriptors[at : at + _DESCRIPTORS_AT_ONCE]
            socket.send_fds(self._end, [b"\0"], list(some))

    def receive(self, bytes_max: int, timeout_s: float | None) -> bytes:
        """Return the next frame; raises TimeoutError if none begins within `timeout_s`."""
        head = self._exactly(_LENGTH_BYTES, timeout_s, first=True)
        length = int.from_bytes(head, "little")
        if length > bytes_max:
            raise ValueError(f"a frame of {length} bytes, of at most {bytes_max}")
        return self._exactly(length, STALL_S)

    def receive_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that the last frame announced."""
        found: list[int] = []
        try:
            while len(found) < count:
                self._wait(time.monotonic() + STALL_S)
                wanted = min(_DESCRIPTORS_AT_ONCE, count - len(found))
                _, some, _, _ = socket.recv_fds(self._end, 1, wanted)
                found += some
                if len(some) != wanted:  # End of stream, or no free descriptor in this process.
                    raise ConnectionResetError(f"{len(some)} of {wanted} descriptors came")
        except BaseException:
            for descriptor in found:
                os.close(descriptor)
            raise
        return found

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has arrived and the peer is alive."""
        return not self.is_ready(0.0)

    def is_ready(self, timeout_s: float) -> bool:
        """Return whether data arrived or the peer ended, after at most `timeout_s`."""
        return bool(self._poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _exactly(self, length: int, timeout_s: float | None, *, first: bool = False) -> bytes:
        pieces, missing = [], length
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while missing:
            self._wait(until_s)
            piece = self._end.recv(min(missing, _PIECE_BYTES), socket.MSG_DONTWAIT)
            if not piece:
                if first and missing == length:
                    raise EOFError
                raise ConnectionResetError("the other end ended within a message")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _wait(self, until_s: float | None) -> None:
        """Wait until data can be received, including data sent before the peer's death."""
        left_ms = None if until_s is None else max(0.0, until_s - time.monotonic()) * 1000
        ready = dict(self._poll.poll(left_ms))
        if not ready:
            raise TimeoutError("no message within the time that one may take")
        if list(ready) == [self._ends]:
            raise EOFError


class OwnStatusPage:
    """A page of shared memory that its owner writes; freed with the last descriptor of it."""

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
    """The page of an `OwnStatusPage`, as another process reads it; closes the descriptor."""

    def __init__(self, descriptor: int) -> None:
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(descriptor, _BYTES, flags, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def number(self) -> int:
        """Return the number of the owner's last write."""
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
