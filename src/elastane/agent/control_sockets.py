"""The lines to the workers of a group that recover in place: who is able, who finished.

Owns one line for each local worker, from before it starts. It passes on what the core decides and
posts what workers say; a worker that says nothing, or garbage, is one that does not recover in
place. Whether a worker lives is seen from its process, not from here.
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
    Differed,
    Doing,
    FromWorker,
    PeerLost,
    SpareReady,
    ToWorker,
    Wait,
    WorkerFinished,
)
from elastane.process.streams import WorkerStreams
from elastane.process.worker_environment import place_variables
from elastane.protocol.model import Assignment, Fence
from elastane.protocol.sharding import Sharding, of_node

_log = logging.getLogger("elastane.workers")
# How long after its line ended a worker's own end is waited for, till it counts as one that has
# left its steps and lives on. A killed one's is told in some 10 ms.
_END_S = 1.0


class Lines:
    """`changed` hears that other workers are able; `lost` that one lost a peer, and where."""

    def __init__(self, changed: Callable[[], None], lost: Callable[[Fence, str], None]) -> None:
        self.able: set[int] = set()
        self._shardings: dict[int, Sharding] = {}
        self.ready: set[int] = set()  # spares that wait in init(); their numbers are negative
        self.finished: set[int] = set()
        # Were able, and have hung up: most have ended, and are soon told as failed.
        self._parted: set[int] = set()
        self._changed, self._lost = changed, lost
        # Hears what a worker is at, which it was asked.
        self.answered: Callable[[int, Doing], None] = lambda _local_rank, _doing: None
        # Hears of a worker whose replica differed.
        self.differed: Callable[[int, Differed], None] = lambda _local_rank, _differed: None
        self._ends: dict[int, socket.socket] = {}

    def open(self, local_rank: int) -> socket.socket:
        """Return the worker's end of a new line, to be closed once the worker has it."""
        self.hang_up(local_rank)
        self._parted.discard(local_rank)
        own, theirs = control_socket.pair()
        self._ends[local_rank] = own
        asyncio.get_running_loop().add_reader(own, self._read, local_rank, own)
        return theirs

    def send(self, local_rank: int, message: ToWorker) -> None:
        """Tell a worker; dropped where it has hung up, for its process has ended or will."""
        end = self._ends.get(local_rank)
        if end is not None:
            with contextlib.suppress(OSError):
                end.send(control_socket.encode(message))

    def hand_over(self, key: int, local_rank: int, begin: Begin, streams: WorkerStreams) -> bool:
        """Make the line of a spare that of a local rank; False where the spare has hung up."""
        end = self._ends[key]
        try:
            control_socket.send_begin(end, begin, streams.stdout, streams.stderr)
        except OSError:
            return False
        del self._ends[key]
        self.ready.discard(key)
        self.hang_up(local_rank)
        self._ends[local_rank] = end
        loop = asyncio.get_running_loop()
        loop.remove_reader(end)
        loop.add_reader(end, self._read, local_rank, end)
        return True

    def hang_up(self, local_rank: int) -> None:
        """Forget the line of a worker, and that it was able."""
        end = self._ends.pop(local_rank, None)
        if end is not None:
            asyncio.get_running_loop().remove_reader(end)
            end.close()
        if local_rank in self.able:
            self._parted.add(local_rank)
        for ranks in (self.able, self.ready, self.finished):
            ranks.discard(local_rank)
        self._shardings.pop(local_rank, None)

    @property
    def not_known_unable(self) -> set[int]:
        """Who is able, or was when its process ended, of which nobody was told yet.

        One that is neither able nor known to have ended has finished its steps, to a coordinator.
        """
        return self.able | self._parted

    @property
    def sharding(self) -> Sharding | None:
        """What they hold together of a state that is sharded; None: it is not."""
        return of_node(self._shardings.values())

    def explained(self, local_rank: int) -> None:
        """Forget a worker that has hung up: its end was told, or it lives on."""
        if local_rank in self._parted:
            self._parted.discard(local_rank)
            self._changed()

    def close(self) -> None:
        """Forget all lines."""
        for local_rank in [*self._ends]:
            self.hang_up(local_rank)

    def _read(self, local_rank: int, end: socket.socket) -> None:
        """Take one packet; the loop comes again for the next."""
        try:
            packet = end.recv(control_socket.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.hang_up(local_rank)
            asyncio.get_running_loop().call_later(_END_S, self.explained, local_rank)
            return
        try:
            self._take(local_rank, control_socket.from_worker(packet))
        except ValueError as error:
            _log.warning("worker of local rank %d: %s; its line is closed", local_rank, error)
            self.hang_up(local_rank)
            self._changed()

    def _take(self, local_rank: int, message: FromWorker) -> None:
        match message:
            case SpareReady():
                self.ready.add(local_rank)
            case CanRecoverInPlace(sharding=sharding) if local_rank >= 0:
                self.able.add(local_rank)
                if sharding is not None:
                    self._shardings[local_rank] = sharding
                self.finished.discard(local_rank)
                self._changed()
            case WorkerFinished():
                self.able.discard(local_rank)
                self.finished.add(local_rank)
                self._changed()
            case PeerLost(fence=fence, reason=reason):
                self._lost(fence, reason)
            case Doing():
                self.answered(local_rank, message)
            case Differed():
                self.differed(local_rank, message)


def place_of(assignment: Assignment, local_rank: int) -> AssignedPlace | Wait:
    """Return the message that tells a worker its place in an assignment of its node."""
    if assignment.waiting:
        return Wait(local_rank=local_rank)
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
