"""The memory of snapshots: slots that workers map and fill, and that outlive them.

Owns their making and the views into them. A slot is a memfd: it has no name that could be left
behind, and goes with the last descriptor. Its pages are there before a worker maps it, and its
size is sealed, so that no full memory and no stray truncation ends a worker by SIGBUS later. How
it fails: OSError ENOMEM where the memory is not there, in words.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from elastane.protocol.limits import KEEPER_SPARE_BYTES

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_LIMIT = 1 << 60


def make_slot(size_bytes: int) -> int:
    """Return the descriptor of a new slot; it takes some tenths of a second per GB."""
    size = max(size_bytes, mmap.PAGESIZE)
    room = room_bytes()
    if size + KEEPER_SPARE_BYTES > room:
        # Before the kernel is asked: at a cgroup's limit it would kill instead of saying no.
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
    """Return so many new slots, or none."""
    made: list[int] = []
    try:
        while len(made) < count:
            made.append(make_slot(size_bytes))
    except OSError:
        close_all(made)
        raise
    return made


@contextlib.contextmanager
def viewed(slot: int, size_bytes: int) -> Iterator[memoryview]:
    """View the first bytes of a slot, for the time of a with statement.

    Mapped for that time only: what a process has mapped counts as its own, and a keeper that had
    all slots mapped would be the first to be killed when memory runs out.
    """
    if size_bytes == 0:
        yield memoryview(b"")
        return
    memory = mmap.mmap(slot, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    try:
        with memoryview(memory) as view:
            yield view
    finally:
        # Views of this view may outlive the statement, in the trace of an error say; they hold it.
        with contextlib.suppress(BufferError):
            memory.close()


def duplicates(descriptors: Iterable[int]) -> list[int]:
    """Return new descriptors of the same; OSError where there are none left, and then nothing."""
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
    """Return how much memory this process may still take: its host's, or its cgroup's."""
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
    """Yield this process's cgroups, up to the root of what is seen here, with their files."""
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
    """Return what the kernel can take back: the page cache that is charged to a cgroup."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
