"""The messages between agent and zygote, over their SOCK_SEQPACKET pair.

A message is a small JSON object, with descriptors by SCM_RIGHTS. A command, whose environment may
have hundreds of KB, travels in a memfd. So every message is within a bound and below the kernel's
limit on packets. Both ends have the same version, because one starts the other.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from elastane.process.process import WorkerCommand

# A reason or a list of problems is a few KB.
MESSAGE_BYTES_MAX = 64 << 10
# The kernel lets exec have at most about 6 MB of arguments and environment.
COMMAND_BYTES_MAX = 8 << 20
# The kernel's SCM_MAX_FD is 253; a worker has its standard three, its page and a few more.
DESCRIPTORS_MAX = 64
# The number of the zygote's end of the pair.
ZYGOTE_FD = 3

Message = dict[str, Any]


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError if the other end is gone or does not read."""
    data = json.dumps(message).encode()
    assert len(data) <= MESSAGE_BYTES_MAX and len(fds) <= DESCRIPTORS_MAX, (len(data), len(fds))
    socket.send_fds(sock, [data], list(fds))


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; None at the end."""
    data, fds, _flags, _address = socket.recv_fds(sock, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
    if not data:
        return None
    message = json.loads(data)
    assert isinstance(message, dict)
    return message, fds


def pack_command(command: WorkerCommand) -> int:
    """Return a memfd with all of `command` but its descriptors; raises ValueError."""
    data = json.dumps(
        {
            "kind": command.kind,
            "target": command.target,
            "args": command.args,
            "env": dict(command.env),
            "cwd": command.cwd,
            "cpus": sorted(command.cpus),
        }
    ).encode()
    if len(data) > COMMAND_BYTES_MAX:
        raise ValueError(f"a command of {len(data)} bytes, of at most {COMMAND_BYTES_MAX}")
    if len(command.descriptors()) >= DESCRIPTORS_MAX:
        raise ValueError(f"{len(command.descriptors())} descriptors, of {DESCRIPTORS_MAX - 1}")
    return _packed(data)


def pack_names(modules: Sequence[str]) -> int:
    """Return a memfd with the names of modules."""
    return _packed(json.dumps(modules).encode())


def unpack_names(fd: int) -> list[str]:
    """Return the names of modules in a memfd."""
    names: list[str] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return names


def _packed(data: bytes) -> int:
    fd = os.memfd_create("elastane-command", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def unpack_command(fd: int, descriptors: dict[int, int]) -> WorkerCommand:
    """Return the command in a memfd, with `descriptors` as they are numbered here."""
    data = json.loads(os.pread(fd, COMMAND_BYTES_MAX, 0))
    return WorkerCommand(
        kind=data["kind"],
        target=data["target"],
        args=tuple(data["args"]),
        env=data["env"],
        cwd=data["cwd"],
        stdin=descriptors[0],
        stdout=descriptors[1],
        stderr=descriptors[2],
        fds={number: fd for number, fd in descriptors.items() if number > 2},
        cpus=frozenset(data["cpus"]),
    )
