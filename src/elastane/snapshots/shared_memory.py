"""The shared memory of snapshots: slots that workers map and fill, and that outlive them.

Owns the creation of slots and the views into them. A slot is a memfd: it has no name that could be
left behind, and is freed with its last descriptor. Its pages are allocated and its size is sealed
before a worker maps it, so that neither full memory nor a truncation ends a worker with SIGBUS. How
it fails: OSError ENOMEM, in words.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastane.snapshots.limits import SPARE_BYTES

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Source:
    """Bytes `first` to `end` of the serialized layout; they are the first bytes of slot `slot`."""

    first: int
    end: int
    slot: int


def make_slot(size_bytes: int) -> int:
    """Return the descriptor of a new slot; takes some tenths of a second per GB."""
    size = max(size_bytes, mmap.PAGESIZE)
    room = room_bytes()
    if size + SPARE_BYTES > room:
        # Checked before the kernel is asked: at a cgroup's limit it kills instead of refusing.
        what = f"a snapshot's slot of {size} bytes, with {max(0, room)} bytes of memory left"
        raise OSError(errno.ENOMEM, what)
    slot = os.memfd_create("elastane-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(slot, size)
        os.posix_fallocate(slot, 0, size)
        fcntl.fcntl(slot, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(slot)
        what = f"a snapshot's slot of {size} bytes: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, what) from error
    return slot


def make_slots(count: int, size_bytes: int) -> list[int]:
    """Return `count` new slots, or none."""
    made: list[int] = []
    try:
        while len(made) < count:
            made.append(make_slot(size_bytes))
    except OSError:
        close_all(made)
        raise
    return made


@contextlib.contextmanager
def viewed(slot: int, size_bytes: int, *, writable: bool = False) -> Iterator[memoryview]:
    """Map the first bytes of a slot for the duration of a with statement.

    Mapped memory counts as the process's own. A snapshot server that always mapped all slots would
    be the first process to be killed when memory runs out.
    """
    if size_bytes == 0:
        yield memoryview(b"")
        return
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(slot, size_bytes, mmap.MAP_SHARED, access)
    try:
        with memoryview(memory) as view:
            yield view
    finally:
        # A view may outlive the statement, for example in a traceback, and keeps it mapped.
        with contextlib.suppress(BufferError):
            memory.close()


def duplicates(descriptors: Iterable[int]) -> list[int]:
    """Return duplicates of these descriptors; raises OSError, and then makes none."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))
    except OSError:
        close_all(made)
        raise
    return made


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def room_bytes() -> int:
    """Return how much memory this process may still use, of its host and its cgroups."""
    rooms = [_host_room()]
    for folder, limit, current in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit_bytes = int((folder / limit).read_text())
            used = int((folder / current).read_text()) - _cache(folder)
            if limit_bytes < _NO_LIMIT:
                rooms.append(limit_bytes - used)
    return min(rooms)


def _host_room() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return _NO_LIMIT


def _cgroups() -> Iterator[tuple[Path, str, str]]:
    """Yield this process's cgroups and their files, up to the root that is visible here."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(_CGROUPS, path, ("memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _upwards(_CGROUPS / "memory", path, names)


def _upwards(root: Path, path: str, files: tuple[str, str]) -> Iterator[tuple[Path, str, str]]:
    folder = root / path.strip("/")
    while True:
        yield folder, *files
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _cache(folder: Path) -> int:
    """Return the page cache charged to a cgroup, which the kernel can reclaim."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
