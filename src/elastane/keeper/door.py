"""Where the keepers of other nodes come in: a port, and a thread for each that has come.

Owns who is let in: who proves in a few seconds that it knows the job's secret, and so many at one
time. It must not know what a copy is of. How it fails: whoever does not prove itself, or sends what
makes no sense, is hung up on, and told of once for each reason.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastane.core.limits import KEEPER_CALLERS_MAX
from elastane.errors import ElastaneError
from elastane.keeper.background import step_back
from elastane.keeper.peers import TO_RECEIVER, Neighbours, Offer

if TYPE_CHECKING:
    from elastane.keeper.line import Line
    from elastane.keeper.peers import ToReceiver

_log = logging.getLogger("elastane.keeper")
_BACKLOG = 64
_PAUSE_S = 0.05


class Door:
    """Gives each offer of a proven caller to `take`. `about` may be changed while it is open."""

    def __init__(self, about: Neighbours, take: Callable[[Offer, Line[ToReceiver]], None]) -> None:
        self.about = about
        self._take = take
        self._room = threading.Semaphore(KEEPER_CALLERS_MAX)
        self._listener: socket.socket | None = None
        self._told = ""

    def open(self) -> str:
        """Listen at all addresses of this node; returns where, as HOST:PORT. Raises OSError."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual
        )
        threading.Thread(target=self._accept, name="keeper-door", daemon=True).start()
        host = self.about.host
        return f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        assert self._listener is not None, "open() comes first"
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:  # it gave up, or this process is out of descriptors for now
                time.sleep(_PAUSE_S)
                continue
            if not self._room.acquire(blocking=False):
                end.close()
                continue
            try:
                caller = end, str(address[0])
                threading.Thread(target=self._serve, args=caller, daemon=True).start()
            except RuntimeError:
                end.close()
                self._room.release()

    def _serve(self, end: socket.socket, host: str) -> None:
        from elastane.keeper.line import answer, told

        step_back()
        try:
            with contextlib.closing(answer(end, self.about, TO_RECEIVER)) as line:
                offer = line.hear()
                if not isinstance(offer, Offer):
                    raise ConnectionError("it offered nothing")
                self._take(offer, line)
        except (OSError, ElastaneError, ValueError) as error:
            self._tell(f"no copy of a snapshot came from {host}: {told(error)}")
        except Exception:
            _log.exception("a copy could not be taken, for a fault of the keeper's own")
        finally:
            end.close()
            self._room.release()

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told, slug = text, "snapshot-replicas"
            _log.warning("%s [%s]", text, slug)
