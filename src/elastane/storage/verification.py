"""Verifies every byte of a checkpoint against its digests, with several threads.

Owns the description of a damaged file: its name and the byte range. How it fails: a fault of one
file is a result; any other OSError is a fault of the place, and is raised.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

from elastane.protocol.checkpoints import CHUNK_BYTES, FileRecord, chunks_of
from elastane.storage.aligned import ALIGNED_BYTES, pages
from elastane.storage.digest import digest_of
from elastane.storage.protocol import Progress, Stop, Storage, never

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


def wrong_size(storage: Storage, folder: str, files: Sequence[FileRecord]) -> str:
    """Describe a file that is missing or has the wrong size; "" if there is none."""
    sizes = storage.sizes(folder, [file.name for file in files])
    for file in files:
        if file.name not in sizes:
            return f"{file.name} is missing, or not a plain file"
        if sizes[file.name] != file.size_bytes:
            return f"{file.name} has {sizes[file.name]} bytes, not {file.size_bytes}"
    return ""


class Inspection:
    """One verification of all files of a checkpoint. Call `run` once."""

    def __init__(
        self, storage: Storage, folder: str, files: Sequence[FileRecord], *, fresh: bool = False
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._files = files
        self._fresh = fresh
        self._work = self._chunks()
        self._turn = threading.Lock()
        self._faults: dict[tuple[int, int], str] = {}
        self._failure: BaseException | None = None
        self._done = 0
        self._all = sum(file.size_bytes for file in files)

    def run(self, progress: Progress | None = None, stop: Stop = never) -> str:
        """Return the first fault, or "" if every byte is as it was written."""
        # Local files are read at the speed of memory: an extra thread pays for each chunk of them.
        each = 1 if self._storage.remote else CHUNK_BYTES
        threads = min(self._storage.readers, 1 + self._all // each)
        arguments = (progress or _ignore, stop)
        helpers = [
            threading.Thread(target=self._read, args=arguments, daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._read(*arguments)
        for helper in helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        return self._faults[min(self._faults)] if self._faults else ""

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for index, file in enumerate(self._files):
            for chunk in range(chunks_of(file.size_bytes)):
                yield index, chunk

    def _read(self, progress: Progress, stop: Stop) -> None:
        buffer = pages(CHUNK_BYTES)
        try:
            while (place := self._next(stop)) is not None:
                fault, size = self._verify(*place, buffer)
                with self._turn:
                    self._done += size
                    if fault:
                        self._faults[place] = fault
                    progress(self._done, self._all)
        except BaseException as error:  # Raised again in the caller's thread.
            self._failure = self._failure or error

    def _next(self, stop: Stop) -> tuple[int, int] | None:
        with self._turn:
            if self._failure is not None or self._faults:
                return None
            if stop():
                raise OSError(errno.ECANCELED, "stopped", self._storage.where)
            return next(self._work, None)

    def _verify(self, index: int, chunk: int, buffer: mmap.mmap) -> tuple[str, int]:
        file = self._files[index]
        first = chunk * CHUNK_BYTES
        size = min(CHUNK_BYTES, file.size_bytes - first)
        try:
            found = self._bytes(f"{self._folder}/{file.name}", first, size, buffer)
        except OSError as error:
            return file_fault(file.name, error), size
        if len(found) < size:
            return f"{file.name} ends at byte {first + len(found)} of {file.size_bytes}", size
        if digest_of([found]) != file.digests[chunk]:
            return (
                f"{file.name}: bytes {first} to {first + size - 1} are not what was written",
                size,
            )
        return "", size

    def _bytes(self, path: str, first: int, size: int, buffer: mmap.mmap) -> bytes | memoryview:
        descriptor = self._storage.open_local(path)
        if descriptor is None:
            return self._storage.read(path, first, size)
        try:
            if self._fresh:
                _bypass_cache(descriptor)
            return memoryview(buffer)[: _fill(descriptor, first, size, buffer)]
        finally:
            os.close(descriptor)


def _bypass_cache(descriptor: int) -> None:
    """Make a descriptor read from the disk, because the page cache does not prove what is there.

    It costs a tenth more processor time, and leaves the cache to the training's data.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # EINVAL: the file system has no O_DIRECT.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(descriptor: int, first: int, size: int, buffer: mmap.mmap) -> int:
    """Read into a buffer; return how many of `size` bytes exist."""
    done = 0
    # O_DIRECT reads whole blocks; a read at the end of a file is shorter.
    end = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
    while done < size:
        try:
            got = os.preadv(descriptor, [memoryview(buffer)[done:end]], first + done)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # This disk has larger blocks, or a read ended inside one.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if got == 0:
            break
        done += got
    return min(done, size)


def _ignore(done: int, all_bytes: int) -> None:
    """Report no progress."""
