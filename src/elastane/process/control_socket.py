"""The line between an agent and one worker that recovers in place: a pair of sockets, and words.

One message is one packet, so nothing has to be framed, and no name in the file system leads to
it: the worker inherits its end. Knows nothing of what the words mean. What is no message of this
version is a ValueError for the reader.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated

import msgspec

from elastane.protocol.limits import WHERE_CHARS_MAX
from elastane.protocol.model import Count, Fence, LocalRank, Port, Text
from elastane.protocol.sharding import Sharding
from elastane.protocol.unreadable import UNREADABLE

Where = Annotated[str, msgspec.Meta(max_length=WHERE_CHARS_MAX)]
Traffic = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None
LINE_FD_VARIABLE = "ELASTANE_LINE_FD"
# The longest holds a reason, which core bounds.
PACKET_BYTES_MAX = 64 << 10


class AssignedPlace(msgspec.Struct, frozen=True, tag="place", kw_only=True):
    """To a worker: its place in a world, and where that world meets.

    `agent_store`: a server listens there already; else the worker of rank 0 is to. `env`: the
    environment variables that say the same.
    """

    fence: Fence
    rank: Count
    world_size: Count
    local_rank: LocalRank
    master_addr: str
    master_port: Port
    agent_store: bool
    env: dict[str, str]


class Wait(msgspec.Struct, frozen=True, tag="wait", kw_only=True):
    """To a worker: it has no place in a world yet, and so no rank."""

    local_rank: LocalRank


class InterruptWorker(msgspec.Struct, frozen=True, tag="interrupt"):
    """To a worker: its world is no more; end the step, and wait for a place."""

    reason: Text


class End(msgspec.Struct, frozen=True, tag="end"):
    """To a worker: the agent stops it. One that waits for a place has nothing to lose, and ends."""


class StatusQuery(msgspec.Struct, frozen=True, tag="ask"):
    """To a worker: say what you are at."""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """From a worker, asked: whether it waits for others, or is `held` in a debugger.

    `where` it is, in words, and with which rank. `traffic`: the bytes that went over its
    connections to the other workers so far; None where it cannot count them.
    """

    waits: bool
    held: bool = False
    rank: Count = 0
    where: Where = ""
    traffic: Traffic = None


class Spare(msgspec.Struct, frozen=True, tag="spare"):
    """To a worker, first of all: it is a spare, and waits; `Begin` comes next, or its end."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """To a spare: it is to start as a worker; `AssignedPlace` or `Wait` comes next.

    With it come two descriptors, for its standard output and its standard error. `env` are the
    variables that change.
    """

    env: dict[str, str]


class SpareReady(msgspec.Struct, frozen=True, tag="ready"):
    """From a spare: it has come to `init()`, and waits there."""


class CanRecoverInPlace(msgspec.Struct, frozen=True, tag="able"):
    """From a worker: it can enter another world as it is.

    `sharding`: of the state that it holds; it says so anew in each world where that has changed.
    """

    sharding: Sharding | None = None


class WorkerFinished(msgspec.Struct, frozen=True, tag="finished"):
    """From a worker: all its steps are done; it enters no other world."""


class PeerLost(msgspec.Struct, frozen=True, tag="lost"):
    """From a worker: a peer was lost in the world of this fence."""

    fence: Fence
    reason: Text


class Differed(msgspec.Struct, frozen=True, tag="differed"):
    """From a worker: after so many steps its replica was another one than most hold."""

    rank: Count
    steps: Count
    reason: Text


ToWorker = AssignedPlace | Wait | InterruptWorker | End | StatusQuery | Spare | Begin
FromWorker = CanRecoverInPlace | WorkerFinished | PeerLost | Doing | SpareReady | Differed
_encode = msgspec.json.Encoder().encode
_to_worker = msgspec.json.Decoder(ToWorker).decode
_from_worker = msgspec.json.Decoder(FromWorker).decode


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the agent's end, which never blocks, and the worker's; raises OSError."""
    agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.setblocking(False)
    return agent, worker


def send_begin(end: socket.socket, begin: Begin, stdout: int, stderr: int) -> None:
    """Send `begin` with its descriptors; raises OSError."""
    socket.send_fds(end, [_encode(begin)], [stdout, stderr])


def receive_begin(end: socket.socket) -> tuple[Begin, int, int]:
    """Wait for `Begin` and its descriptors; raises OSError or ValueError."""
    packet, fds, _, _ = socket.recv_fds(end, PACKET_BYTES_MAX, 2)
    begin = to_worker(packet) if packet else None
    if not isinstance(begin, Begin) or len(fds) != 2:
        for fd in fds:
            os.close(fd)
        raise ValueError("it ended" if not packet else "no word to begin")
    return begin, fds[0], fds[1]


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return the packet of a message."""
    return _encode(message)


def to_worker(packet: bytes) -> ToWorker:
    """Return what the agent says; raises ValueError."""
    try:
        message: ToWorker = _to_worker(packet)
    except UNREADABLE as error:
        raise ValueError(f"no message of this version: {error}") from error
    return message


def from_worker(packet: bytes) -> FromWorker:
    """Return what a worker says, which may be anything; raises ValueError."""
    try:
        message: FromWorker = _from_worker(packet)
    except UNREADABLE as error:
        raise ValueError(f"no message of this version: {error}") from error
    return message
