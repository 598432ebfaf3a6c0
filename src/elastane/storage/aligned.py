"""Writes one file at the speed of the disk, and digests what it writes.

Uses O_DIRECT straight from the caller's memory if that is aligned, else by way of an aligned
buffer. Writes are buffered if the file system has no O_DIRECT, and for the last bytes of a file.
Two threads take chunks in turn, so that one chunk is digested while another is written. It knows
nothing of names or records. How it fails: the OSError of the first fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from elastane.process.kernel import allocate
from elastane.protocol.checkpoints import CHUNK_BYTES
from elastane.storage.digest import View, chunks, digest_of, new_digest
from elastane.storage.protocol import Stop

# Sufficient for O_DIRECT on any disk; a disk that requires more is written buffered.
ALIGNED_BYTES = 4096
# Smaller files do not pay for a second descriptor, a buffer and a thread.
_DIRECT_BYTES_MIN = 1 << 20
_THREADS = 2
# The unit of copying: 1 GB took 1.05 times as long as without a copy. Blocks of 16 MiB took 1.35
# times as long, since no cache holds one until it is digested and sent (2026-11-21, two cores).
_BLOCK_BYTES = 2 << 20

_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes
_Chunk = tuple[int, list[memoryview]]


class AlignedFile:
    """A new file in an open folder. Used once: `fill`, then `close`."""

    def __init__(self, at: int, name: str, stop: Stop) -> None:
        self._at = at
        self._name = name
        self._stop = stop
        self._plain = -1
        self._direct = -1
        self._turn = threading.Lock()
        self._digests: dict[int, str] = {}
        self._failure: BaseException | None = None
        self.size_bytes = 0

    def fill(self, regions: Iterable[View]) -> tuple[str, ...]:
        """Write the regions one after the other, durably; return the digests of the chunks."""
        known = isinstance(regions, Sequence)
        size_bytes = sum(memoryview(region).nbytes for region in regions) if known else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._plain = os.open(self._name, flags, 0o666, dir_fd=self._at)
        if size_bytes is None or size_bytes >= _DIRECT_BYTES_MIN:
            self._open_direct()
        if size_bytes is not None and self._direct >= 0:
            # A full disk fails now instead of after minutes, and the extents are contiguous.
            allocate(self._plain, size_bytes)
        # Only the caller's thread may advance an iterator.
        threads = _THREADS if self._direct >= 0 and size_bytes is not None else 1
        self._copy(enumerate(chunks(regions)), threads)
        os.fsync(self._plain)
        return tuple(self._digests[index] for index in range(len(self._digests)))

    def close(self, *, keep: bool) -> None:
        """Close the file; without `keep`, remove it."""
        for descriptor in (self._direct, self._plain):
            if descriptor >= 0:
                os.close(descriptor)
        if self._plain >= 0 and not keep:
            with contextlib.suppress(OSError):  # After one failure this may fail too.
                os.unlink(self._name, dir_fd=self._at)

    def _open_direct(self) -> None:
        flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # EINVAL: the file system has no O_DIRECT.
            self._direct = os.open(self._name, flags, dir_fd=self._at)

    def _copy(self, work: Iterator[_Chunk], threads: int) -> None:
        helpers = [
            threading.Thread(target=self._write_chunks, args=(work,), daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._write_chunks(work)
        for helper in helpers:
            self._join(helper)
        if self._failure is not None:
            raise self._failure

    def _join(self, helper: threading.Thread) -> None:
        """Join, through any signal: the descriptors it writes to are closed after this."""
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:
                self._failure = self._failure or error

    def _write_chunks(self, work: Iterator[_Chunk]) -> None:
        """Write chunks until none is left or a thread has failed."""
        buffer = _Buffer()
        try:
            while (chunk := self._next(work)) is not None:
                index, pieces = chunk
                self._digests[index] = self._write_chunk(pieces, index * CHUNK_BYTES, buffer)
                with self._turn:
                    self.size_bytes += sum(map(len, pieces))
        except BaseException as error:  # Raised again in the caller's thread.
            self._failure = self._failure or error

    def _next(self, work: Iterator[_Chunk]) -> _Chunk | None:
        with self._turn:
            if self._failure is not None:
                return None
            if self._stop():
                raise OSError(errno.ECANCELED, "stopped", self._name)
            return next(work, None)

    def _write_chunk(self, pieces: list[memoryview], at: int, buffer: _Buffer) -> str:
        """Write one chunk at its offset; return its digest."""
        is_aligned = len(pieces) == 1 and address_of(pieces[0]) % ALIGNED_BYTES == 0
        done = self._write_direct(pieces[0], at) if is_aligned else 0
        if done or self._direct < 0:
            self._write_plain(pieces, at, done)
            return digest_of(pieces)
        digest = new_digest()
        for block in buffer.gathered(pieces):
            digest.update(block)
            self._write_plain([block], at, self._write_direct(block, at))
            at += len(block)
        return str(digest.hexdigest())

    def _write_direct(self, data: memoryview, at: int) -> int:
        """Write the whole blocks of `data` with O_DIRECT; return how many bytes were written."""
        done, end = 0, len(data) - len(data) % ALIGNED_BYTES
        while self._direct >= 0 and done < end:
            try:
                done += os.pwrite(self._direct, data[done:end], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # This memory, or the rest after a short write, is not aligned.
        return done

    def _write_plain(self, pieces: list[memoryview], at: int, done: int) -> None:
        """Write everything after the first `done` bytes through the page cache."""
        for piece in pieces:
            rest, at, done = piece[done:], at + min(done, len(piece)), max(0, done - len(piece))
            while rest:
                written = os.pwrite(self._plain, rest, at)
                rest, at = rest[written:], at + written


class _Buffer:
    """One thread's page-aligned memory, allocated on first use."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def gathered(self, pieces: list[memoryview]) -> Iterator[memoryview]:
        """Copy pieces into the buffer block by block; each block is valid until the next."""
        memory = self._memory = self._memory or pages(_BLOCK_BYTES)
        filled = 0
        for piece in pieces:
            rest = piece
            while rest:
                some = rest[: _BLOCK_BYTES - filled]
                memory[filled : filled + len(some)] = some
                rest, filled = rest[len(some) :], filled + len(some)
                if filled == _BLOCK_BYTES:
                    yield memoryview(memory)
                    filled = 0
        if filled:
            yield memoryview(memory)[:filled]


def pages(size_bytes: int) -> mmap.mmap:
    """Return page-aligned memory, with huge pages if possible, which are faster to touch."""
    # mmap's default is shared memory, which has huge pages on few hosts.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: the kernel has no huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _BufferView(ctypes.Structure):
    """Py_buffer, of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view's first byte."""
    buffer = _BufferView()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(view), ctypes.byref(buffer), ctypes.c_int(_SIMPLE)
    )
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
