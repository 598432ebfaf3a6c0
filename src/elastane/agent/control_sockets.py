"""The agent's ends of the control sockets to the workers of a group.

Owns one socket pair for each local worker, from before the worker starts. It sends what the agent's
rules decide and reports what workers say. A worker that sends garbage or nothing counts as one that
cannot recover in place. The process of a worker, not its socket, shows whether it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from elastane.process import control_socket
from elastane.process.control_socket import (
    AssignedPlace,
    Begin,
    CanRecoverInPlace,
    CheckpointWritten,
    Differed,
    Doing,
    FromWorker,
    PeerLost,
    SpareReady,
    ToWorker,
    Wait,
    WorkerFinished,
)
from elastane.process.streams.group import WorkerStreams
from elastane.process.worker_environment import place_variables
from elastane.protocol.model import Assignment, Fence, Joining, Sharding, merge_shardings

_log = logging.getLogger("elastane.workers")
# How long the end of a worker's process is awaited after its control socket closed. After that the
# worker counts as one that left its training loop and still runs. The end of a killed worker is
# reported within some 10 ms.
_END_S = 1.0


def _ignore(local_rank: int, message: object) -> None:
    del local_rank, message


def _no_checkpoint(message: CheckpointWritten) -> None:
    del message


class ControlSockets:
    """`changed` is called when other workers are recoverable, `lost` when one lost a peer.

    `wrote` is called when a worker reports a checkpoint, with its place.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        lost: Callable[[Fence, str], None],
        answered: Callable[[int, Doing], None] = _ignore,
        differed: Callable[[int, Differed], None] = _ignore,
        wrote: Callable[[CheckpointWritten], None] = _no_checkpoint,
    ) -> None:
        """`answered` gets answers to a StatusQuery, `differed` workers whose replica differed."""
        self.recoverable: set[int] = set()
        self.joining = Joining.ANYTIME  # when others can join the world of these workers
        self._joinings: dict[int, Joining] = {}
        self._without_place: set[int] = set()
        self._shardings: dict[int, Sharding] = {}
        self.ready: set[int] = set()  # warm spares that wait in init(); their keys are negative
        self.finished: set[int] = set()
        # Workers whose programs have ended well, as have those of all other workers. A worker stays
        # in this set when it exits.
        self.programs_ended: set[int] = set()
        # Could recover, and closed their socket. Most have ended, and their failure is reported
        # soon.
        self._unreported: set[int] = set()
        # Runs `end_reported` for workers that closed their socket and may live on.
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._changed = changed
        self._peer_lost = lost
        self._answered = answered
        self._differed = differed
        self._wrote = wrote
        self._ends: dict[int, socket.socket] = {}

    def open(self, local_rank: int) -> socket.socket:
        """Return the worker's end of a new socket pair, to be closed once the worker has it."""
        self.close_one(local_rank)
        self._unreported.discard(local_rank)
        self.programs_ended.discard(local_rank)
        own, theirs = control_socket.pair()
        self._ends[local_rank] = own
        asyncio.get_running_loop().add_reader(own, self._read, local_rank, own)
        return theirs

    def send(self, local_rank: int, message: ToWorker) -> None:
        """Send to a worker; dropped if its socket is closed, as its process has ended or will."""
        if isinstance(message, Wait):
            self._without_place.add(local_rank)
        elif isinstance(message, AssignedPlace):
            self._without_place.discard(local_rank)
        end = self._ends.get(local_rank)
        if end is not None:
            with contextlib.suppress(OSError):
                end.send(control_socket.encode(message))

    def hand_over(self, key: int, local_rank: int, begin: Begin, streams: WorkerStreams) -> bool:
        """Give the socket of a spare to a local rank; False if the spare closed it."""
        end = self._ends[key]
        try:
            control_socket.send_begin(end, begin, streams.stdout, streams.stderr)
        except OSError:
            return False
        del self._ends[key]
        self.ready.discard(key)
        self.programs_ended.discard(local_rank)
        self.close_one(local_rank)
        self._ends[local_rank] = end
        loop = asyncio.get_running_loop()
        loop.remove_reader(end)
        loop.add_reader(end, self._read, local_rank, end)
        return True

    def close_one(self, local_rank: int) -> None:
        """Close the socket of a worker, which can no longer recover in place."""
        end = self._ends.pop(local_rank, None)
        if end is not None:
            asyncio.get_running_loop().remove_reader(end)
            end.close()
        if local_rank in self.recoverable:
            self._unreported.add(local_rank)
        for ranks in (self.recoverable, self.ready, self.finished):
            ranks.discard(local_rank)
        self._shardings.pop(local_rank, None)
        self._joinings.pop(local_rank, None)
        self._update_joining()

    @property
    def recoverable_or_unreported(self) -> set[int]:
        """Workers that can recover, or could until their unreported end.

        To the coordinator, a running worker outside this set has finished its steps.
        """
        return self.recoverable | self._unreported

    @property
    def sharding(self) -> Sharding | None:
        """How the workers share a sharded state; None: it is not sharded."""
        return merge_shardings(self._shardings.values())

    def _able(self, local_rank: int, message: CanRecoverInPlace) -> None:
        """Record what a worker can do; one without a place or a boundary cannot join yet."""
        self.finished.discard(local_rank)
        if message.joining is Joining.NEVER and local_rank in self._without_place:
            self.recoverable.discard(local_rank)
            self._joinings.pop(local_rank, None)
        else:
            self.recoverable.add(local_rank)
            self._joinings[local_rank] = message.joining
        self._update_joining()
        if message.sharding is not None:
            self._shardings[local_rank] = message.sharding

    def _update_joining(self) -> None:
        """Take the least value of the workers; once none is left, the last value stays."""
        self.joining = min(self._joinings.values(), default=self.joining)

    def end_reported(self, local_rank: int) -> None:
        """Forget a worker whose socket closed: its end was reported, or its training loop ended."""
        timer = self._timers.pop(local_rank, None)
        if timer is not None:
            timer.cancel()  # The next worker of this rank has a time of its own.
        if local_rank in self._unreported:
            self._unreported.discard(local_rank)
            self._changed()

    def close(self) -> None:
        """Close all sockets."""
        for local_rank in [*self._ends]:
            self.close_one(local_rank)

    def close_exited(self, local_rank: int) -> None:
        """Close the socket of a worker that has exited; first see whether it had finished.

        Its children may hold the other end open.
        """
        end = self._ends.get(local_rank)
        with contextlib.suppress(OSError, ValueError):
            while end is not None and (packet := end.recv(control_socket.PACKET_BYTES_MAX)):
                message = control_socket.from_worker(packet)
                if isinstance(message, WorkerFinished):
                    self._handle(local_rank, message)
        self.close_one(local_rank)

    def _read(self, local_rank: int, end: socket.socket) -> None:
        """Handle one packet; the event loop calls again for the next one."""
        try:
            packet = end.recv(control_socket.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.close_one(local_rank)
            loop = asyncio.get_running_loop()
            self._timers[local_rank] = loop.call_later(_END_S, self.end_reported, local_rank)
            return
        try:
            self._handle(local_rank, control_socket.from_worker(packet))
        except ValueError as error:
            _log.warning(
                "worker of local rank %d: %s; its control socket is closed", local_rank, error
            )
            self.close_one(local_rank)
            self._changed()

    def _handle(self, local_rank: int, message: FromWorker) -> None:
        match message:
            case SpareReady():
                self.ready.add(local_rank)
            case CanRecoverInPlace() if local_rank >= 0:
                self._able(local_rank, message)
                self._changed()
            case WorkerFinished(program_ended=program_ended):
                self.recoverable.discard(local_rank)
                self.finished.add(local_rank)
                if program_ended:
                    self.programs_ended.add(local_rank)
                self._changed()
            case CheckpointWritten():
                self._wrote(message)
            case PeerLost(fence=fence, reason=reason):
                self._peer_lost(fence, reason)
            case Doing():
                self._answered(local_rank, message)
            case Differed():
                self._differed(local_rank, message)


def place_message(assignment: Assignment, local_rank: int) -> AssignedPlace | Wait:
    """Return the message that gives a worker its place in an assignment of its node."""
    if assignment.waiting:
        return Wait(local_rank=local_rank, world_size=assignment.world_size)
    return AssignedPlace(
        fence=assignment.fence,
        rank=assignment.rank_base + assignment.index_of(local_rank),
        world_size=assignment.world_size,
        local_rank=local_rank,
        master_addr=assignment.master_addr,
        master_port=assignment.master_port,
        agent_store=assignment.agent_store,
        env=place_variables(assignment, local_rank),
    )
