"""The keeper's side of its workers' connections: a thread for each, which mostly sleeps.

Owns who is there. A worker is gone when its connection ends or its process does, whichever is
first: a process that it forked may hold the connection open. Whatever a worker sends that makes no
sense ends its own connection and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastane.protocol.limits import (
    KEEPER_CONNECTIONS_MAX,
    KEEPER_FRAME_BYTES_MAX,
    KEEPER_GROUPS_MAX,
    KEEPER_HELLO_BYTES_MAX,
    KEEPER_STALL_S,
)
from elastane.snapshots import messages
from elastane.snapshots.channel import SnapshotChannel
from elastane.snapshots.events import News, RestoredEvent
from elastane.snapshots.listener import SnapshotListener
from elastane.snapshots.peers import Neighbours, ReplicaOffer, ToReceiver
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.store import Shelf

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection

_log = logging.getLogger("elastane.snapshots")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: see SO_PEERCRED of unix(7)
_Answer = tuple[messages.Answer, Sequence[int]]


class SnapshotServer:
    """Answers workers, each from the shelf of its group. `wake`: something has ended."""

    def __init__(
        self, wake: Callable[[], None], tell: Callable[[News], None], *, survives: bool
    ) -> None:
        self.id = os.urandom(8).hex()  # Not of `secrets`, which costs 5 MB of OpenSSL.
        self._wake, self._tell, self._survives = wake, tell, survives
        self._lock = threading.Lock()
        self._shelves: dict[str, Shelf] = {}
        self._here: set[int] = set()
        self._numbered = 0
        self._door: SnapshotListener | None = None
        self._at = ""  # where the door is

    def meet(self, about: Neighbours) -> None:
        """Take copies from other nodes' keepers from now on, and bring them copies."""
        if self._door is not None:
            self._door.about = about
            return
        door = SnapshotListener(about, self._take_copy)
        try:
            self._at = door.open()
        except OSError as error:
            line, slug = (
                "no copies of snapshots go to other nodes: no port: %s [%s]",
                "snapshot-replicas",
            )
            _log.error(line, error, slug)
            return
        self._door = door

    def _neighbours(self) -> Neighbours | None:
        return self._door.about if self._door is not None else None

    def _take_copy(self, offer: ReplicaOffer, line: PeerConnection[ToReceiver]) -> None:
        self._shelf(offer.group).neighbour.take(offer, line)

    @property
    def workers(self) -> int:
        """How many workers are there."""
        with self._lock:
            return len(self._here)

    @property
    def shelves(self) -> list[Shelf]:
        """Return what is held, of all groups."""
        with self._lock:
            return [*self._shelves.values()]

    def take(self, end: socket.socket) -> None:
        """Serve a connection, in a thread of its own; one of another user's is closed."""
        pid, uid, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        with self._lock:
            self._numbered += 1
            number = self._numbered
            refused = uid != os.getuid() or len(self._here) >= KEEPER_CONNECTIONS_MAX
            if not refused:
                self._here.add(number)
        if refused:
            end.close()
            return
        try:
            threading.Thread(target=self._serve, args=(number, end, pid), daemon=True).start()
        except RuntimeError as error:
            _log.error("a worker cannot be served: %s", error)
            end.close()
            self._forget(number)

    def _serve(self, number: int, end: socket.socket, pid: int) -> None:
        ends = _watch(pid)
        channel = SnapshotChannel(end, ends)
        shelf = None
        try:
            shelf = self._welcomed(number, channel)
            while True:
                request = messages.request_of(channel.receive(KEEPER_FRAME_BYTES_MAX, None))
                answer, descriptors = _answer(shelf, number, request)
                try:
                    channel.send(messages.encode(answer), descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except (EOFError, OSError):
            _log.debug("worker %d (pid %d) is gone", number, pid)
        except ValueError as error:
            _log.error("worker %d (pid %d) is not listened to any more: %s", number, pid, error)
        finally:
            channel.close()
            if shelf is not None and ends >= 0 and shelf.reads(number):
                # Its tensors may lie in what it has not released, and its line alone have ended.
                poll = select.poll()
                poll.register(ends, select.POLLIN)
                poll.poll()
            if ends >= 0:
                os.close(ends)
            if shelf is not None:
                shelf.gone(number)
            self._forget(number)
        if shelf is not None:
            with contextlib.suppress(OSError):  # Who asks for it is told then.
                shelf.check_ahead()

    def _welcomed(self, number: int, channel: SnapshotChannel) -> Shelf:
        """Hear a worker's first words, and let it in."""
        hello = messages.request_of(channel.receive(KEEPER_HELLO_BYTES_MAX, KEEPER_STALL_S))
        if not isinstance(hello, messages.Hello):
            raise ValueError("it did not say hello")
        shelf = self._shelf(hello.group)
        shelf.came(number)
        try:
            answer = messages.SnapshotWelcome(messages.VERSION, self.id, self._survives, self._at)
            page = shelf.standing.page.descriptor()
            try:
                channel.send(messages.encode(answer), [page])
            finally:
                os.close(page)
        except BaseException:
            shelf.gone(number)
            raise
        return shelf

    def _shelf(self, group: str) -> Shelf:
        with self._lock:
            shelf = self._shelves.get(group)
            if shelf is None:
                if len(self._shelves) >= KEEPER_GROUPS_MAX:
                    raise ValueError(f"there are {KEEPER_GROUPS_MAX} groups already")
                shelf = self._shelves[group] = Shelf(
                    self._wake, self.id, self._neighbours, self._tell
                )
                shelf.open()
            return shelf

    def _forget(self, number: int) -> None:
        with self._lock:
            self._here.discard(number)
        self._wake()


def _answer(shelf: Shelf, number: int, request: messages.Request) -> _Answer:
    try:
        return _done(shelf, number, request)
    except ValueError as error:
        return messages.SnapshotRefused(0, str(error)), ()
    except OSError as error:
        return messages.SnapshotRefused(error.errno or 0, error.strerror or str(error)), ()


def _done(shelf: Shelf, number: int, request: messages.Request) -> _Answer:
    answer: messages.Answer = messages.Done()
    descriptors: Sequence[int] = ()
    match request:
        case messages.Keep(slot=slot, snapshot=snapshot):
            shelf.keep(number, slot, snapshot)
            answer = messages.Granted(shelf.grant(number, spare=True))
        case messages.SlotGrant(overdue=overdue, together=together):
            answer = messages.Granted(shelf.grant(number, overdue=overdue, together=together))
        case messages.WriteStatusQuery(fence=fence):
            answer = messages.Stands(shelf.progress(fence))
        case messages.LayoutFiles():
            shelf.layout(request)
        case messages.Slots():
            slots, descriptors = shelf.slots(number, request)
            answer = messages.HasSlots(slots)
        case messages.Read():
            held, descriptors = shelf.read(number)
            answer = messages.Given(tuple(held))
        case messages.ReleaseSnapshot(key=key, nonce=nonce):
            shelf.release(number, Name(key, nonce))
        case messages.WentOn(key=key, place=place, why=why):
            shelf.tell(RestoredEvent(key, place, why))
        case messages.Hello():
            raise ValueError("it has said hello before")
    return answer, descriptors


def _watch(pid: int) -> int:
    """Return what becomes readable when this process has ended; -1 where it cannot be told.

    A process of another PID namespace has the number 0 here. One that has ended already leaves
    nothing to watch, and its connection has ended unless a child of its holds it.
    """
    with contextlib.suppress(OSError):
        if pid > 0:
            return os.pidfd_open(pid)
    return -1
