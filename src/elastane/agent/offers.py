"""The port of the next attempt's process-group store, held from before it is offered.

The socket already listens when its port is told to anybody, so a worker that connects before the
store's process runs waits in the backlog (7 ms to a process group, measured) instead of meeting
a refused connection (500 ms: torch's client then sleeps). Each attempt has a new port, so none
can read what an earlier one wrote: torchrun 2.13's default store lives on over attempts, and
recovered a killed worker in 7 of 26 runs.
"""

from __future__ import annotations

import socket

from elastane.process.endpoint import bound
from elastane.protocol.model import PortOffer

# As many connections as a large job's workers may open at once; the kernel caps it at somaxconn.
_BACKLOG = 4096


class OfferedPort:
    """One held port; `listening` where the agent's side serves the store.

    Where no zygote can serve it, the socket is bound but does not listen: the kernel gives such
    a port to nobody who asks for any, and a worker that binds it by number (with SO_REUSEADDR,
    as torch does) gets it.
    """

    def __init__(self, *, listening: bool, host: str = "") -> None:
        """`host` is where others reach this node; see runtime.endpoint.bound."""
        self.listening = listening
        self._host = host
        self._socket: socket.socket | None = None

    def open(self) -> PortOffer:
        """Bind a port of the kernel's choice.

        One that does not listen is held on all addresses: so will torch's store bind it.
        """
        self._socket = bound(self._host if self.listening else "", 0)
        if self.listening:
            self._socket.listen(_BACKLOG)
        return self.offer

    @property
    def offer(self) -> PortOffer:
        """What others are told of the port that is held."""
        return PortOffer(port=self.socket.getsockname()[1], agent_store=self.listening)

    @property
    def is_open(self) -> bool:
        """Whether a port is held."""
        return self._socket is not None

    @property
    def socket(self) -> socket.socket:
        """The bound socket."""
        assert self._socket is not None, "open() comes first"
        return self._socket

    def hand_over(self) -> OfferedPort:
        """Return one that holds what this one held, for a world that meets there; this is free."""
        taken = OfferedPort(listening=self.listening, host=self._host)
        taken._socket, self._socket = self._socket, None
        return taken

    def close(self) -> None:
        """Give the port back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
