"""One file, written as fast as a disk takes it, with the digests of what was written.

Owns the way of the bytes: O_DIRECT from the caller's memory where that lies as the disk wants it,
else by way of an aligned buffer; buffered where the file system has no O_DIRECT, and for the last
bytes of a file. Two threads take the chunks in turn, so that one is digested while another is on
its way. Knows nothing of names or records. How it fails: the OSError of the first fault.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from elastane.process.kernel import allocate
from elastane.protocol.checkpoints import CHUNK_BYTES
from elastane.storage.address import address_of
from elastane.storage.digest import View, chunks, digest_of, new_digest
from elastane.storage.protocol import Stop

# What any disk's O_DIRECT is content with; one that wants more is written buffered.
ALIGNED_BYTES = 4096
# Smaller files are not worth a second descriptor, a buffer and a thread.
_DIRECT_BYTES_MIN = 1 << 20
_THREADS = 2
# What is copied on its way: 1 GB of it took 1.05 times as long as one without a copy, 1.35 times in
# blocks of 16 MiB, which no cache holds until they are digested and sent (2026-11-21, two cores).
_BLOCK_BYTES = 2 << 20

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
        """Write the regions one behind the other, durably; return the digests of the chunks."""
        known = isinstance(regions, Sequence)
        size_bytes = sum(memoryview(region).nbytes for region in regions) if known else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._plain = os.open(self._name, flags, 0o666, dir_fd=self._at)
        if size_bytes is None or size_bytes >= _DIRECT_BYTES_MIN:
            self._open_direct()
        if size_bytes is not None and self._direct >= 0:
            # A full disk shows now and not after minutes, and extents are made in one piece.
            allocate(self._plain, size_bytes)
        # What comes bit by bit is asked for by the caller's own thread alone.
        threads = _THREADS if self._direct >= 0 and size_bytes is not None else 1
        self._copy(enumerate(chunks(regions)), threads)
        os.fsync(self._plain)
        return tuple(self._digests[index] for index in range(len(self._digests)))

    def close(self, *, keep: bool) -> None:
        """Let go of the file; one that is not kept is removed."""
        for descriptor in (self._direct, self._plain):
            if descriptor >= 0:
                os.close(descriptor)
        if self._plain >= 0 and not keep:
            with contextlib.suppress(OSError):  # what failed may fail here too: it is litter then
                os.unlink(self._name, dir_fd=self._at)

    def _open_direct(self) -> None:
        flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # EINVAL: this file system has none
            self._direct = os.open(self._name, flags, dir_fd=self._at)

    def _copy(self, work: Iterator[_Chunk], threads: int) -> None:
        helpers = [
            threading.Thread(target=self._take, args=(work,), daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._take(work)
        for helper in helpers:
            self._join(helper)
        if self._failure is not None:
            raise self._failure

    def _join(self, helper: threading.Thread) -> None:
        """Wait, whatever signal comes: the descriptors that it writes to are closed after this."""
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:
                self._failure = self._failure or error

    def _take(self, work: Iterator[_Chunk]) -> None:
        """Write chunks until there are no more, or one of the threads has failed."""
        buffer = _Buffer()
        try:
            while (chunk := self._next(work)) is not None:
                index, pieces = chunk
                self._digests[index] = self._put(pieces, index * CHUNK_BYTES, buffer)
                with self._turn:
                    self.size_bytes += sum(map(len, pieces))
        except BaseException as error:  # told by _copy, in the thread that asked
            self._failure = self._failure or error

    def _next(self, work: Iterator[_Chunk]) -> _Chunk | None:
        with self._turn:
            if self._failure is not None:
                return None
            if self._stop():
                raise OSError(errno.ECANCELED, "stopped", self._name)
            return next(work, None)

    def _put(self, pieces: list[memoryview], at: int, buffer: _Buffer) -> str:
        """Write a chunk to its place; return its digest."""
        lies_well = len(pieces) == 1 and address_of(pieces[0]) % ALIGNED_BYTES == 0
        done = self._put_direct(pieces[0], at) if lies_well else 0
        if done or self._direct < 0:
            self._put_plain(pieces, at, done)
            return digest_of(pieces)
        digest = new_digest()
        for block in buffer.gathered(pieces):
            digest.update(block)
            self._put_plain([block], at, self._put_direct(block, at))
            at += len(block)
        return str(digest.hexdigest())

    def _put_direct(self, data: memoryview, at: int) -> int:
        """Write the whole blocks of some bytes past the page cache; return how many went."""
        done, end = 0, len(data) - len(data) % ALIGNED_BYTES
        while self._direct >= 0 and done < end:
            try:
                done += os.pwrite(self._direct, data[done:end], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # this memory, or the rest after a short write, does not lie on blocks
        return done

    def _put_plain(self, pieces: list[memoryview], at: int, done: int) -> None:
        """Write what is left after the first `done` bytes."""
        for piece in pieces:
            rest, at, done = piece[done:], at + min(done, len(piece)), max(0, done - len(piece))
            while rest:
                written = os.pwrite(self._plain, rest, at)
                rest, at = rest[written:], at + written


class _Buffer:
    """One thread's memory that lies on pages, made when it is needed first."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def gathered(self, pieces: list[memoryview]) -> Iterator[memoryview]:
        """Copy pieces into the buffer, a block after the other; each is gone with the next."""
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
    """Return memory that lies on pages: on huge ones where it can, which are quicker to touch."""
    # Shared memory, which is mmap's default, has huge pages on few hosts.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
