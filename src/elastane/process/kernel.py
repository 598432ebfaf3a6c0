"""Kernel calls that the standard library lacks, and the placement of descriptors.

The calls are prctl, membarrier, fallocate, private maps, affinity and the display of the command
line. Linux only. They fail with OSError, as the os module does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Field numbers of proc(5), by the names of struct prctl_mm_map; `brk` has none.
_STAT_PLACES = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
}
# The number of membarrier(2), for which Python has no name.
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_BARRIER_FOR_REGISTERED, _BARRIER_REGISTER = 2, 4
# The wait without membarrier: a store buffer drains within microseconds.
_DRAIN_S = 0.001
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_NO_ACCESS, _MAP_FIXED, _MAP_FAILED, _MADV_POPULATE_WRITE = 0, 0x10, ctypes.c_void_p(-1).value, 23
# Larger than any open descriptor; closerange calls close_range(2).
_DESCRIPTOR_MAX = 1 << 20

# The soft and hard limit that this process was started with; it may raise its own later.
_DESCRIPTORS_AT_START = resource.getrlimit(resource.RLIMIT_NOFILE)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Adopt each descendant that loses its parent, so that this process can reap it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies; raise if it has died already.

    The signal comes when the parent's thread that started this process dies (after an adoption: the
    main thread). So workers are started only from the agent's main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(f"parent {parent} is gone")


def restore_descriptor_limit() -> None:
    """Give this child of the agent the descriptor limit of a program started by hand."""
    resource.setrlimit(resource.RLIMIT_NOFILE, _DESCRIPTORS_AT_START)


def accept_barriers() -> None:
    """Let `impose_barrier` in other processes impose a full memory barrier on this one."""
    if _MEMBARRIER is not None:
        _libc.syscall(_MEMBARRIER, _BARRIER_REGISTER, 0, 0)


def impose_barrier() -> None:
    """Impose a full memory barrier on every running thread of the processes that accept it."""
    if _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _BARRIER_FOR_REGISTERED, 0, 0) != 0:
        time.sleep(_DRAIN_S)


def punch_hole(fd: int, end: int) -> None:
    """Free the memory of a file's first `end` bytes; its size stays, and the bytes read as NUL."""
    offset, length = ctypes.c_longlong(0), ctypes.c_longlong(end)
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def allocate(fd: int, size_bytes: int) -> None:
    """Reserve blocks for a file of this size, if the file system supports it; raises ENOSPC.

    posix_fallocate(3) would write zeros instead, which is worse than no reservation.
    """
    if _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def map_privately(parts: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Map parts of files one after the other, privately; return address and size.

    Each part is (descriptor, offset, size). Offsets are whole pages, and so are all sizes but the
    last. A write goes to this process's memory only; a page without a write keeps following its
    file.
    """
    size = sum(part_size for _, _, part_size in parts)
    address = at = _map(0, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        for descriptor, offset, part_size in parts:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _map(at, part_size, access, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset)
            at += part_size
    except OSError:
        unmap(address, size)
        raise
    return address, size


def unmap(address: int, size: int) -> None:
    """Undo `map_privately`."""
    _libc.munmap(address, size)


def take_pages(address: int, size: int) -> None:
    """Copy the pages of a range into this process's own memory, with their present content.

    Raises OSError EINVAL before Linux 5.14, which lacks the call.
    """
    before = address % mmap.PAGESIZE
    if _libc.madvise(address - before, size + before, _MADV_POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _map(address: int, size: int, access: int, kind: int, descriptor: int, offset: int) -> int:
    found = _libc.mmap(address, size, access, kind, descriptor, offset)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def bind_to_cpus(cpus: Iterable[int]) -> None:
    """Restrict this process, which has one thread so far, to these CPUs; empty: no change."""
    wanted = frozenset(cpus)
    if wanted:
        os.sched_setaffinity(0, wanted)


@contextlib.contextmanager
def _raised_descriptor_limit() -> Iterator[None]:
    """Use descriptors up to the hard limit here; one above the soft limit stays open afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # more than the kernel's fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def place_descriptors(wanted: Mapping[int, int], keep: Iterable[int] = ()) -> dict[int, int]:
    """Give each descriptor of `wanted` (number -> descriptor) its number; close all but `keep`.

    The placed descriptors are inheritable. Descriptors of `keep` are moved out of the way; returns
    the new number of each.
    """
    floor = max(wanted, default=2) + 1
    with _raised_descriptor_limit():
        high = {n: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for n, fd in wanted.items()}
        moved = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in keep}
        for number, fd in high.items():
            os.dup2(fd, number, inheritable=True)
    lowest = 0
    for fd in sorted({*wanted, *moved.values()}):
        if lowest < fd:  # an empty range at 0 would mean all
            os.closerange(lowest, fd)
        lowest = fd + 1
    os.closerange(lowest, _DESCRIPTOR_MAX)
    return moved


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _names = (
        *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
        *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
    )
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _names),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


# The kernel reads the displayed command line from this memory as long as the process lives.
_shown: list[mmap.mmap] = []


def show_program(argv: Iterable[str], env: Mapping[str, str] | None = None) -> None:
    """Display `argv` and `env` in ps and /proc, as an exec of them would.

    Without `env` the displayed environment stays. If the kernel refuses the call, `argv` is
    displayed as one string, cut to the room that this process was started with, and the environment
    stays.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    words = [os.fsencode(argument) for argument in argv]
    text = b"".join(word + b"\0" for word in words)
    room = end - start
    # Use the old place if the text fits, because setproctitle writes there as well.
    at = start if len(text) <= room else _hold_text(text)
    areas = {"arg_start": at, "arg_end": at + len(text)}
    if env is not None:
        shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        at_env = _hold_text(shown)
        areas |= {"env_start": at_env, "env_end": at_env + len(shown)}
    if _show_areas(fields, areas):
        if at == start:
            ctypes.memmove(start, text, len(text))
        return
    # One string whose area does not end in NUL: the kernel displays it up to its own NUL. A list
    # would show all the NULs that pad it (get_mm_proctitle of fs/proc/base.c).
    title = b" ".join(words)[: room - 2].ljust(room - 1, b"\0") + b"\1"
    ctypes.memmove(start, title, room)


def _hold_text(text: bytes) -> int:
    """Return the address of memory that holds `text` from now on."""
    # Private, because /proc does not read memory that may belong to a file.
    memory = mmap.mmap(-1, max(1, len(text)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: len(text)] = text
    _shown.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _show_areas(fields: list[bytes], areas: Mapping[str, int]) -> bool:
    """Set the areas of arguments and environment; return False if the kernel does not support it.

    PR_SET_MM_MAP needs no privilege and sets every field, so the other fields keep their present
    values. `fields`: those of /proc/self/stat, from the third on.
    """
    number = {name: int(fields[place - 3]) for name, place in _STAT_PLACES.items()}
    wanted = _MemoryMap(**{**number, **areas}, auxv=0, auxv_size=0, exe_fd=0xFFFFFFFF)
    libc, size = ctypes.CDLL(None), ctypes.c_ulong(ctypes.sizeof(wanted))
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = (ctypes.c_ssize_t,)
    where = ctypes.byref(wanted)
    option, kind, none = ctypes.c_int(_PR_SET_MM), ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.c_ulong(0)
    # Nothing between these two calls moves the break.
    wanted.brk = libc.sbrk(0)
    return bool(libc.prctl(option, kind, where, size, none) == 0)


def suspended_s() -> float:
    """Return how long this host was suspended since its boot; CLOCK_MONOTONIC omits that time."""
    # Read in this order, time between the two calls makes the result smaller, never larger.
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s - time.monotonic()


# System calls that wait for a file, by machine: reads of a descriptor, and opens by a path.
_READS = {"x86_64": (0, 17, 19, 295, 327), "aarch64": (63, 65, 67, 69, 286)}
_OPENS = {"x86_64": (2, 257, 437), "aarch64": (56, 437)}


def blocking_descriptor(syscall: str) -> int | None:
    """Return the descriptor that a thread waits to read, from /proc/PID/syscall; -1: it opens one.

    None if it waits for something else, or runs.
    """
    words = syscall.split()
    if len(words) < 2 or not words[0].isdecimal():
        return None
    number, machine = int(words[0]), os.uname().machine
    if number in _OPENS.get(machine, ()):
        return -1
    return int(words[1], 16) if number in _READS.get(machine, ()) else None
