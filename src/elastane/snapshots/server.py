"""The server side of the workers' connections, with one thread for each.

Owns the set of connected workers. A worker is gone when its connection ends or its process dies,
whichever is first, because a process that it forked may keep the connection open. How it fails: a
wrong request ends the connection of its sender and nothing else.
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
from elastane.snapshots.events import RestoredEvent, SnapshotEvent
from elastane.snapshots.listener import SnapshotListener
from elastane.snapshots.messages import ReplicaOffer, ReplicationSettings, ToReceiver
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.store import SnapshotStore

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection

_log = logging.getLogger("elastane.snapshots")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: see SO_PEERCRED of unix(7)
_Answer = tuple[messages.Answer, Sequence[int]]


class SnapshotServer:
    """Answers each worker from the store of its group. `wake` is called when a connection ends."""

    def __init__(
        self, wake: Callable[[], None], report: Callable[[SnapshotEvent], None], *, survives: bool
    ) -> None:
        self.id = os.urandom(8).hex()  # Not from `secrets`, which loads 5 MB of OpenSSL.
        self._wake, self._report, self._survives = wake, report, survives
        self._lock = threading.Lock()
        self._stores: dict[str, SnapshotStore] = {}
        self._connected: set[int] = set()
        self._numbered = 0
        self._listener: SnapshotListener | None = None
        self._door = ""  # The listener's address.

    def replicate(self, about: ReplicationSettings) -> None:
        """Start to replicate: listen for other nodes' replicas, and send this node's."""
        if self._listener is not None:
            self._listener.about = about
            return
        listener = SnapshotListener(about, self._accept_replica)
        try:
            self._door = listener.open()
        except OSError as error:
            text = "snapshots are not replicated to other nodes: no port: %s [%s]"
            _log.error(text, error, "snapshot-replicas")
            return
        self._listener = listener

    def _neighbours(self) -> ReplicationSettings | None:
        return self._listener.about if self._listener is not None else None

    def _accept_replica(self, offer: ReplicaOffer, line: PeerConnection[ToReceiver]) -> None:
        self._store(offer.group).replicas.accept(offer, line)

    @property
    def workers(self) -> int:
        """Return the number of connected workers."""
        with self._lock:
            return len(self._connected)

    @property
    def stores(self) -> list[SnapshotStore]:
        """Return the snapshot stores of all groups."""
        with self._lock:
            return [*self._stores.values()]

    def serve(self, end: socket.socket) -> None:
        """Serve a connection in a new thread; closes a connection of another user."""
        pid, uid, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        with self._lock:
            self._numbered += 1
            number = self._numbered
            refused = uid != os.getuid() or len(self._connected) >= KEEPER_CONNECTIONS_MAX
            if not refused:
                self._connected.add(number)
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
        store = None
        try:
            store = self._welcome(number, channel)
            while True:
                request = messages.request_of(channel.receive(KEEPER_FRAME_BYTES_MAX, None))
                answer, descriptors = _answer(store, number, request)
                try:
                    channel.send(messages.encode(answer), descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except (EOFError, OSError):
            _log.debug("worker %d (pid %d) is gone", number, pid)
        except ValueError as error:
            _log.error("worker %d (pid %d) is disconnected: %s", number, pid, error)
        finally:
            channel.close()
            if store is not None and ends >= 0 and store.reads(number):
                # Its tensors may lie in snapshots that it reads, though its connection ended.
                poll = select.poll()
                poll.register(ends, select.POLLIN)
                poll.poll()
            if ends >= 0:
                os.close(ends)
            if store is not None:
                store.gone(number)
            self._forget(number)
        if store is not None:
            with contextlib.suppress(OSError):  # The next reader gets the error.
                store.check_ahead()

    def _welcome(self, number: int, channel: SnapshotChannel) -> SnapshotStore:
        """Receive a worker's first message, and admit it to its group."""
        hello = messages.request_of(channel.receive(KEEPER_HELLO_BYTES_MAX, KEEPER_STALL_S))
        if not isinstance(hello, messages.Hello):
            raise ValueError("its first message was no hello")
        store = self._store(hello.group)
        store.joined(number)
        try:
            answer = messages.SnapshotWelcome(messages.VERSION, self.id, self._survives, self._door)
            page = store.status.page.descriptor()
            try:
                channel.send(messages.encode(answer), [page])
            finally:
                os.close(page)
        except BaseException:
            store.gone(number)
            raise
        return store

    def _store(self, group: str) -> SnapshotStore:
        with self._lock:
            store = self._stores.get(group)
            if store is None:
                if len(self._stores) >= KEEPER_GROUPS_MAX:
                    raise ValueError(f"there are {KEEPER_GROUPS_MAX} groups already")
                store = self._stores[group] = SnapshotStore(
                    self._wake, self.id, self._neighbours, self._report
                )
                store.open()
            return store

    def _forget(self, number: int) -> None:
        with self._lock:
            self._connected.discard(number)
        self._wake()


def _answer(store: SnapshotStore, number: int, request: messages.Request) -> _Answer:
    try:
        return _handle(store, number, request)
    except ValueError as error:
        return messages.SnapshotRefused(0, str(error)), ()
    except OSError as error:
        return messages.SnapshotRefused(error.errno or 0, error.strerror or str(error)), ()


def _handle(store: SnapshotStore, number: int, request: messages.Request) -> _Answer:
    answer: messages.Answer = messages.Done()
    descriptors: Sequence[int] = ()
    match request:
        case messages.Keep(slot=slot, snapshot=snapshot):
            store.keep(number, slot, snapshot)
            answer = messages.Granted(store.grant(number, spare=True))
        case messages.SlotGrant(overdue=overdue, together=together):
            answer = messages.Granted(store.grant(number, overdue=overdue, together=together))
        case messages.WriteStatusQuery(fence=fence):
            answer = messages.WriteStatus(store.progress(fence))
        case messages.LayoutFiles():
            store.add_layout(request)
        case messages.Slots():
            slots, descriptors = store.slots(number, request)
            answer = messages.SlotNumbers(slots)
        case messages.Read():
            held, descriptors = store.read(number)
            answer = messages.HeldSnapshots(tuple(held))
        case messages.ReleaseSnapshot(key=key, nonce=nonce):
            store.release(number, Name(key, nonce))
        case messages.RestoreReport(key=key, place=place, why=why):
            store.report(RestoredEvent(key, place, why))
        case messages.Hello():
            raise ValueError("it has said hello before")
    return answer, descriptors


def _watch(pid: int) -> int:
    """Return a descriptor that becomes readable when this process ends; -1 if there is none.

    A process of another PID namespace has the number 0 here. A process that has ended needs none:
    its connection has ended too, unless a child holds it.
    """
    with contextlib.suppress(OSError):
        if pid > 0:
            return os.pidfd_open(pid)
    return -1
