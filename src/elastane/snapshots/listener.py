"""The port at which snapshot servers of other nodes deliver replicas, with a thread for each.

Owns admission: the bound of connections that are not yet authenticated, and of replicas that arrive
at one time. It knows nothing of their contents. How it fails: a caller that cannot authenticate, or
sends garbage, is disconnected and logged once for each reason.
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
from elastane.snapshots.background import lower_priority
from elastane.snapshots.messages import TO_RECEIVER, ReplicaOffer, ReplicationSettings

if TYPE_CHECKING:
    from elastane.snapshots.connection import PeerConnection
    from elastane.snapshots.messages import ToReceiver

_log = logging.getLogger("elastane.snapshots")
_PAUSE_S = 0.05


class SnapshotListener:
    """Passes the offers of authenticated callers to `accept`. `about` may be set meanwhile."""

    def __init__(
        self,
        about: ReplicationSettings,
        accept: Callable[[ReplicaOffer, PeerConnection[ToReceiver]], None],
    ) -> None:
        self.about = about
        self._offered = accept
        self._proven = threading.Semaphore(KEEPER_CALLERS_MAX)
        self._lock = threading.Lock()
        self._unproven = Unproven[socket.socket](KEEPER_UNPROVEN_MAX, UNPROVEN_TIMEOUT_S)
        self._listener: socket.socket | None = None
        self._logged = ""

    def open(self) -> str:
        """Listen on this node's address; returns it as HOST:PORT. Raises OSError."""
        self._listener = bound(self.about.host, 0)
        self._listener.listen(KEEPER_BACKLOG)
        threading.Thread(target=self._accept, name="replica-listener", daemon=True).start()
        host = self.about.host
        return f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        assert self._listener is not None, "open() comes first"
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:  # The caller is gone, or this process has no free descriptor for now.
                time.sleep(_PAUSE_S)
                continue
            self._make_room()
            try:
                # TLS takes the socket over; this duplicate can still shut it down.
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
        """Wait until one more unauthenticated caller fits; disconnect the oldest if necessary."""
        while True:
            with self._lock:
                wait_s = self._unproven.wait_s(time.monotonic())
                if not wait_s:
                    oldest = self._unproven.make_room()
                    if oldest is not None:
                        with contextlib.suppress(OSError):  # It is closed already.
                            oldest.shutdown(socket.SHUT_RDWR)
                        oldest.close()
                    return
            time.sleep(min(wait_s, _PAUSE_S))

    def _forget(self, known: socket.socket) -> None:
        with self._lock:
            if self._unproven.discard(known):
                known.close()

    def _serve(self, end: socket.socket, known: socket.socket, host: str) -> None:
        from elastane.snapshots.connection import answer, reason_of

        lower_priority()
        try:
            with contextlib.closing(answer(end, self.about, TO_RECEIVER)) as line:
                self._forget(known)
                self._receive(line)
        except (OSError, ElastaneError, ValueError) as error:
            self._log_once(f"no replica of a snapshot came from {host}: {reason_of(error)}")
        except Exception:
            _log.exception("a replica was not accepted, because of a bug in the snapshot server")
        finally:
            end.close()
            self._forget(known)

    def _receive(self, line: PeerConnection[ToReceiver]) -> None:
        """Accept the offer of an authenticated caller, unless too many replicas are arriving."""
        if not self._proven.acquire(blocking=False):
            raise ConnectionError(f"{KEEPER_CALLERS_MAX} other replicas are arriving")
        try:
            offer = line.receive()
            if not isinstance(offer, ReplicaOffer):
                raise ConnectionError("it did not send an offer")
            self._offered(offer, line)
        finally:
            self._proven.release()

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            self._logged, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)
