"""Cuts one node of a job off the others on this machine, as a network that loses all packets does.

Each TCP connection between the two sides gets a filter on both of its ends, by which the kernel
drops what arrives. So nothing arrives, no connection ends, and after the cut what was sent is sent
again. A socket of another process is reached by a copy of its descriptor, which takes the
right to trace that process (ptrace) and not root. It fails with UsageError without that right.

What begins during the cut is cut too, a moment later. The port at which an agent of one side serves
agents of the other takes no connection meanwhile, not even of other programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from elastane.errors import UsageError
from elastane.testing import processes

_SYS_PIDFD_GETFD = 438  # on each architecture
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LISTEN = "0A"
_MAPPED = "0000000000000000FFFF0000"  # what /proc has before an IPv4 address of an IPv6 socket
_LOOK_S = 0.05


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


# One instruction of BPF: return 0, by which the kernel drops the packet.
_DROP = (_Instruction * 1)(_Instruction(0x06, 0, 0, 0))


class _Tcp(NamedTuple):
    """A TCP socket as /proc shows it: its addresses and ports, and its state."""

    local: str
    remote: str
    state: str

    @property
    def other_end(self) -> tuple[str, str]:
        return self.remote, self.local


class Partition:
    """A cut between the node of one agent and those of others.

    `over_after` ends it by itself. The nodes' processes are looked up again while it lasts.
    """

    def __init__(self, agent: int, others: Iterable[int]) -> None:
        self._agent, self._others = agent, tuple(others)
        self._cut: dict[int, socket.socket] = {}  # by inode
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> Self:
        """Cut all connections that exist, until `end`."""
        try:
            self._look(with_ports=True)
        except BaseException:
            self._heal()
            raise
        return self

    @property
    def is_cut(self) -> bool:
        """Whether there is any connection between the two sides."""
        return bool(self._cut)

    def over_after(self, seconds: float) -> None:
        """Cut new connections as they begin, for so long, in a thread; then end the cut."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._keep_cut, args=(seconds,), name="partition")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the cut is over."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """End the cut now."""
        self._over.set()
        self.wait()
        self._heal()

    def _keep_cut(self, seconds: float) -> None:
        try:
            until_s = time.monotonic() + seconds
            while (left_s := until_s - time.monotonic()) > 0:
                if self._over.wait(min(_LOOK_S, left_s)):
                    break
                self._look()
        finally:
            self._heal()

    def _look(self, *, with_ports: bool = False) -> None:
        """Cut each connection between the two sides; `with_ports`: also the ports of agents."""
        known = _connections()
        here = _owners([self._agent, *processes.below(self._agent)], known)
        there = _owners([p for one in self._others for p in (one, *processes.below(one))], known)
        far_ends = {(known[inode].local, known[inode].remote): inode for inode in there}
        ends: dict[int, int] = {}
        for inode, pid in here.items():
            far = far_ends.get(known[inode].other_end)
            if far is not None:
                ends |= {inode: pid, far: there[far]}
        if with_ports:
            ports = {known[inode].local.rpartition(":")[2] for inode in ends}
            agents = _owners([self._agent, *self._others], known)
            ends |= {
                inode: pid
                for inode, pid in agents.items()
                if known[inode].state == _LISTEN and known[inode].local.rpartition(":")[2] in ports
            }
        for inode, pid in ends.items():
            if inode not in self._cut:
                copy = _copy_of(pid, inode)
                if copy is not None:
                    _drop_arriving(copy)
                    self._cut[inode] = copy

    def _heal(self) -> None:
        while self._cut:
            _, copy = self._cut.popitem()
            with contextlib.suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            copy.close()


def _connections() -> dict[int, _Tcp]:
    """Return the TCP sockets of this machine by inode, with addresses as hexadecimal words."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                local, remote = (word.removeprefix(_MAPPED) for word in words[1:3])
                found[int(words[9])] = _Tcp(local, remote, words[3])
    found.pop(0, None)  # ends that no process has any more
    return found


def _owners(pids: Iterable[int], known: Mapping[int, _Tcp]) -> dict[int, int]:
    """Return a process of `pids` that has it open, for each known socket, by inode."""
    found = {}
    for pid in pids:
        for inode, _ in _sockets(pid):
            if inode in known:
                found[inode] = pid
    return found


def _sockets(pid: int) -> Iterable[tuple[int, int]]:
    """Yield inode and descriptor of each open socket of a process; none of one that has ended."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, rest = str(entry.readlink()).partition(":[")
                if kind == "socket":
                    yield int(rest.removesuffix("]")), int(entry.name)


def _copy_of(pid: int, inode: int) -> socket.socket | None:
    """Return a copy of the socket of another process; None if it has closed it meanwhile."""
    numbers = [number for each, number in _sockets(pid) if each == inode]
    if not numbers:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall
        copied = call(_SYS_PIDFD_GETFD, pidfd, numbers[0], 0)
        error = ctypes.get_errno()
    finally:
        os.close(pidfd)
    if copied >= 0:
        return socket.socket(fileno=copied)
    if isinstance(OSError(error, ""), PermissionError):
        raise UsageError(
            f"the connections of process {pid} cannot be cut: {os.strerror(error)}",
            slug="usage",
            expected="the right to trace the job's processes (ptrace)",
            next_step="sysctl kernel.yama.ptrace_scope=0, or in a container --cap-add SYS_PTRACE",
        )
    return None


def _drop_arriving(end: socket.socket) -> None:
    """Let the kernel drop all packets that arrive at a socket."""
    program = struct.pack("HL", len(_DROP), ctypes.addressof(_DROP))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
