"""The control socket between an agent and one worker that recovers in place, and its messages.

It is a pair of SOCK_SEQPACKET sockets: one message is one packet, so no framing is needed. The
socket has no name in the file system; the worker inherits its end. This module decides nothing. A
packet that is no message of this version raises ValueError.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Annotated

import msgspec

from elastane.protocol.limits import WHERE_CHARS_MAX
from elastane.protocol.model import Count, Fence, Joining, LocalRank, Port, Sharding, Text
from elastane.protocol.unreadable import decoded

Where = Annotated[str, msgspec.Meta(max_length=WHERE_CHARS_MAX)]
Traffic = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None
CONTROL_FD_VARIABLE = "ELASTANE_CONTROL_FD"
# The longest messages hold a reason, which protocol.limits bounds.
PACKET_BYTES_MAX = 64 << 10


class AssignedPlace(msgspec.Struct, frozen=True, tag="place", kw_only=True):
    """To a worker: its rank in a world, and the address at which that world meets.

    `agent_store`: a process-group store already listens there; otherwise the worker of rank 0
    starts one. `env`: the same values as environment variables.
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
    """To a worker: it has no rank yet, because no world includes it.

    `world_size`: of the current world with the workers of this node that are to join it. Another
    world may follow before they do.
    """

    local_rank: LocalRank
    world_size: Count


class InterruptWorker(msgspec.Struct, frozen=True, tag="interrupt"):
    """To a worker: its world has ended. It ends the step and waits for another assignment."""

    reason: Text


class End(msgspec.Struct, frozen=True, tag="end"):
    """To a worker: the agent stops it. A worker without a rank has nothing to save and exits."""


class StatusQuery(msgspec.Struct, frozen=True, tag="ask"):
    """To a worker: report the current activity."""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """From a worker, as the answer to `StatusQuery`: what it is doing.

    `waits`: it waits for other workers. `held`: a debugger holds it. `where`: its position in the
    program, in words. `rank`: its rank. `traffic`: bytes exchanged with the other workers so far;
    None if they cannot be counted.
    """

    waits: bool
    held: bool = False
    rank: Count = 0
    where: Where = ""
    traffic: Traffic = None


class Spare(msgspec.Struct, frozen=True, tag="spare"):
    """To a worker, as its first message: it is a warm spare.

    `Begin` follows, or the end of the socket.
    """


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """To a warm spare: start as a worker. `AssignedPlace` or `Wait` follows.

    Two descriptors come with it, for standard output and standard error. `env`: the variables that
    change.
    """

    env: dict[str, str]


class SpareReady(msgspec.Struct, frozen=True, tag="ready"):
    """From a warm spare: it has reached `init()` and waits there."""


class CanRecoverInPlace(msgspec.Struct, frozen=True, tag="able"):
    """From a worker: it can enter another world with its process and its state.

    `sharding`: the layout of the state that it holds. The worker sends the message again in each
    world in which that layout has changed, or if `joining` has: when others can join its world.
    """

    sharding: Sharding | None = None
    joining: Joining = Joining.ANYTIME


class CheckpointWritten(msgspec.Struct, frozen=True, tag="written"):
    """From a worker: the script has just written a whole checkpoint, so a restart costs little.

    `where`: the last file or folder of it, for people. `resumed`: this process has read one itself.
    """

    where: Text = ""
    resumed: bool = False


class WorkerFinished(msgspec.Struct, frozen=True, tag="finished"):
    """From a worker: it has completed all its steps and enters no further world.

    `program_ended`: its program has ended well, as those of all others; only its exit is left.
    """

    program_ended: bool = False


class PeerLost(msgspec.Struct, frozen=True, tag="lost"):
    """From a worker: it lost a peer in the world of this fence."""

    fence: Fence
    reason: Text


class Differed(msgspec.Struct, frozen=True, tag="differed"):
    """From a worker: after `steps` steps its replica differs from the majority's."""

    rank: Count
    steps: Count
    reason: Text


ToWorker = AssignedPlace | Wait | InterruptWorker | End | StatusQuery | Spare | Begin
FromWorker = (
    CanRecoverInPlace
    | CheckpointWritten
    | WorkerFinished
    | PeerLost
    | Doing
    | SpareReady
    | Differed
)
_encode = msgspec.json.Encoder().encode
_to_worker: Callable[[bytes], ToWorker] = msgspec.json.Decoder(ToWorker).decode
_from_worker: Callable[[bytes], FromWorker] = msgspec.json.Decoder(FromWorker).decode


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the agent's end, which is non-blocking, and the worker's end; raises OSError."""
    agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.setblocking(False)
    return agent, worker


def send_begin(end: socket.socket, begin: Begin, stdout: int, stderr: int) -> None:
    """Send `begin` with its two descriptors; raises OSError."""
    socket.send_fds(end, [_encode(begin)], [stdout, stderr])


def receive_begin(end: socket.socket) -> tuple[Begin, int, int]:
    """Wait for `Begin` and its two descriptors; raises OSError or ValueError."""
    packet, fds, _, _ = socket.recv_fds(end, PACKET_BYTES_MAX, 2)
    begin = to_worker(packet) if packet else None
    if not isinstance(begin, Begin) or len(fds) != 2:
        for fd in fds:
            os.close(fd)
        raise ValueError("the socket was closed" if not packet else "no message to begin")
    return begin, fds[0], fds[1]


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return the packet of a message."""
    return _encode(message)


def to_worker(packet: bytes) -> ToWorker:
    """Return the agent's message in a packet; raises ValueError."""
    return decoded(_to_worker, packet, "message")


def from_worker(packet: bytes) -> FromWorker:
    """Return the worker's message in a packet, which may hold any bytes; raises ValueError."""
    return decoded(_from_worker, packet, "message")
