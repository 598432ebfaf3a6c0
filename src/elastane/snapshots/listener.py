"""The port at which snapshot servers of other nodes bring copies, and a thread for each of them.

Owns admission: the bound of connections that have not proved the job's secret, and the bound of
copies that arrive at one time. It must not know what a copy is of. How it fails: a caller that does
not prove itself, or sends garbage, is disconnected and reported once for each reason.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError
from elastane.process.endpoint import bound
from elastane.process.unproven import Unproven
from elastane.protocol.limits import (
    KEEPER_BACKLOG,
    KEEPER_CALLERS_MAX,
    KEEPER_UNPROVEN_MAX,
    UNPROVEN_TIMEOUT_S,
)
from elastane.snapshots.background import step_back
from elastane.snapshots.peers import TO_RECEIVER, Neighbours, ReplicaOffer

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection
    from elastane.snapshots.peers import ToReceiver

_log = logging.getLogger("elastane.snapshots")
_PAUSE_S = 0.05


class SnapshotListener:
    """Gives each offer of a proven caller to `take`. `about` may be changed while it is open."""

    def __init__(
        self, about: Neighbours, take: Callable[[ReplicaOffer, PeerConnection[ToReceiver]], None]
    ) -> None:
        self.about = about
        self._take = take
        self._proven = threading.Semaphore(KEEPER_CALLERS_MAX)
        self._lock = threading.Lock()
        self._unproven = Unproven[socket.socket](KEEPER_UNPROVEN_MAX, UNPROVEN_TIMEOUT_S)
        self._listener: socket.socket | None = None
        self._told = ""

    def open(self) -> str:
        """Listen where others reach this node; returns where, as HOST:PORT. Raises OSError."""
        self._listener = bound(self.about.host, 0)
        self._listener.listen(KEEPER_BACKLOG)
        threading.Thread(target=self._accept, name="keeper-door", daemon=True).start()
        host = self.about.host
        return f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        assert self._listener is not None, "open() comes first"
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:  # The caller has gone, or this process is out of descriptors for now.
                time.sleep(_PAUSE_S)
                continue
            self._make_room()
            try:
                # TLS takes the socket over; by another descriptor it can still be shut down.
                known = end.dup()
            except OSError:
                end.close()
                continue
            with self._lock:
                self._unproven.add(known, time.monotonic())
            caller = end, known, str(address[0])
            try:
                threading.Thread(target=self._serve, args=caller, daemon=True).start()
            except RuntimeError:
                end.close()
                self._forget(known)

    def _make_room(self) -> None:
        """Wait until one more may be unproven; the oldest is disconnected where it has to be."""
        while True:
            with self._lock:
                wait_s = self._unproven.wait_s(time.monotonic())
                if not wait_s:
                    oldest = self._unproven.make_room()
                    if oldest is not None:
                        with contextlib.suppress(OSError):  # It has gone by itself.
                            oldest.shutdown(socket.SHUT_RDWR)
                        oldest.close()
                    return
            time.sleep(min(wait_s, _PAUSE_S))

    def _forget(self, known: socket.socket) -> None:
        with self._lock:
            if self._unproven.discard(known):
                known.close()

    def _serve(self, end: socket.socket, known: socket.socket, host: str) -> None:
        from elastane.snapshots.connection import answer, told

        step_back()
        try:
            with contextlib.closing(answer(end, self.about, TO_RECEIVER)) as line:
                self._forget(known)
                self._hear(line)
        except (OSError, ElastaneError, ValueError) as error:
            self._tell(f"no copy of a snapshot came from {host}: {told(error)}")
        except Exception:
            _log.exception("a copy could not be taken, for a fault of the keeper's own")
        finally:
            end.close()
            self._forget(known)

    def _hear(self, line: PeerConnection[ToReceiver]) -> None:
        """Take in what a proven caller has, if not too many do so already."""
        if not self._proven.acquire(blocking=False):
            raise ConnectionError(f"{KEEPER_CALLERS_MAX} other copies are arriving")
        try:
            offer = line.hear()
            if not isinstance(offer, ReplicaOffer):
                raise ConnectionError("it offered nothing")
            self._take(offer, line)
        finally:
            self._proven.release()

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)
