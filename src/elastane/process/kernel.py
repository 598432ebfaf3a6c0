"""Kernel calls that the standard library lacks, and the placing of descriptors.

Owns: prctl, membarrier, holes in files, private maps, affinity, the memory of the command line.
Knows nothing of workers or commands. Fails with OSError as the os module does. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Of proc(5), by the names of struct prctl_mm_map; `brk` is not among them.
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
# Number of membarrier(2), which no header of Python names.
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_BARRIER_FOR_REGISTERED, _BARRIER_REGISTER = 2, 4
# Where there is no membarrier: a store buffer drains within microseconds.
_DRAIN_S = 0.001
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_NO_ACCESS, _MAP_FIXED, _MAP_FAILED, _MADV_POPULATE_WRITE = 0, 0x10, ctypes.c_void_p(-1).value, 23
# Past the largest descriptor that anybody holds; close_range(2) is what closerange calls.
_DESCRIPTOR_MAX = 1 << 20

# The soft and hard limit that this process was started with; it may raise its own.
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
    """Adopt every descendant that loses its parent, so that it can be waited for here."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; raise when it already has.

    The signal comes at the death of the parent's thread that made this process (or adopted
    it: then the main thread), so workers are started from the agent's main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(f"parent {parent} is gone")


def restore_descriptor_limit() -> None:
    """Give this child of the agent the limit that a program started by hand would have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, _DESCRIPTORS_AT_START)


def accept_barriers() -> None:
    """Have this process pass a full barrier whenever another one calls `impose_barrier`."""
    if _MEMBARRIER is not None:
        _libc.syscall(_MEMBARRIER, _BARRIER_REGISTER, 0, 0)


def impose_barrier() -> None:
    """Make every running thread of processes that accept it pass a full memory barrier."""
    if _MEMBARRIER is None or _libc.syscall(_MEMBARRIER, _BARRIER_FOR_REGISTERED, 0, 0) != 0:
        time.sleep(_DRAIN_S)


def punch_hole(fd: int, end: int) -> None:
    """Give back the memory of a file's first `end` bytes; its size stays, and it reads as NUL."""
    offset, length = ctypes.c_longlong(0), ctypes.c_longlong(end)
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def allocate(fd: int, size_bytes: int) -> None:
    """Have blocks set aside for a file of this size, where the file system has such a way.

    posix_fallocate(3) would write zeros there, which is worse than nothing. Raises ENOSPC.
    """
    if _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def map_privately(parts: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Map parts of files one behind the other; returns address and size.

    Each part is (descriptor, offset, size): offsets are whole pages, and sizes all but the last's.
    What is written there goes to nobody; a page that was not written to follows its file.
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
    """Have this process's own pages under a range of its memory, with what can be read there.

    OSError EINVAL where the kernel does not know how (before Linux 5.14).
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
    """Let this process, which has one thread yet, run on these CPUs only; none: where it may."""
    wanted = frozenset(cpus)
    if wanted:
        os.sched_setaffinity(0, wanted)


def place_descriptors(wanted: Mapping[int, int], keep: Iterable[int] = ()) -> dict[int, int]:
    """Make `wanted` (number -> descriptor here) so, inheritable, and close all others but `keep`.

    Those of `keep` may be in the way of a wanted number; returns where each of them went.
    """
    floor = max(wanted, default=2) + 1
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


# What /proc shows of a process is read from its memory, for as long as it lives.
_shown: list[mmap.mmap] = []


def show_program(argv: Iterable[str], env: Mapping[str, str] | None = None) -> None:
    """Show `argv` and `env` where ps and /proc look, as an exec of them would.

    Without `env` the environment shown stays. Where the kernel refuses the call, `argv` is shown as
    one string, cut to the room that this process was started with, and the environment stays too.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    words = [os.fsencode(argument) for argument in argv]
    text = b"".join(word + b"\0" for word in words)
    room = end - start
    # In the old place where it fits: there setproctitle writes as well.
    at = start if len(text) <= room else _kept(text)
    areas = {"arg_start": at, "arg_end": at + len(text)}
    if env is not None:
        shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        at_env = _kept(shown)
        areas |= {"env_start": at_env, "env_end": at_env + len(shown)}
    if _show_areas(fields, areas):
        if at == start:
            ctypes.memmove(start, text, len(text))
        return
    # One string whose area does not end in NUL: the kernel shows it up to its own NUL, where
    # a list would show all the NULs that pad it (get_mm_proctitle of fs/proc/base.c).
    title = b" ".join(words)[: room - 2].ljust(room - 1, b"\0") + b"\1"
    ctypes.memmove(start, title, room)


def _kept(text: bytes) -> int:
    """Return the address of memory that holds `text` from now on."""
    # Private: /proc reads no memory that may be a file's.
    memory = mmap.mmap(-1, max(1, len(text)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: len(text)] = text
    _shown.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _show_areas(fields: list[bytes], areas: Mapping[str, int]) -> bool:
    """Tell the kernel where arguments and environment are; False where it takes no such word.

    PR_SET_MM_MAP needs no privilege, and sets all that it knows of: the rest to what it is.
    `fields` are those of /proc/self/stat, from the third on.
    """
    number = {name: int(fields[place - 3]) for name, place in _STAT_PLACES.items()}
    wanted = _MemoryMap(**{**number, **areas}, auxv=0, auxv_size=0, exe_fd=0xFFFFFFFF)
    libc, size = ctypes.CDLL(None), ctypes.c_ulong(ctypes.sizeof(wanted))
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = (ctypes.c_ssize_t,)
    where = ctypes.byref(wanted)
    option, kind, none = ctypes.c_int(_PR_SET_MM), ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.c_ulong(0)
    # Nothing between the two moves the break.
    wanted.brk = libc.sbrk(0)
    return bool(libc.prctl(option, kind, where, size, none) == 0)


def suspended_s() -> float:
    """Return for how long this host was suspended since its boot, as CLOCK_MONOTONIC leaves out."""
    # In this order: what passes between the two makes it less, and nobody takes it for sleep.
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s - time.monotonic()
