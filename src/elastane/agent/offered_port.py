"""The port of the next attempt's process-group store, held from before it is offered.

The socket listens before its port is announced. A worker that connects before the store's process
runs therefore waits in the backlog (7 ms to a process group, measured). A refused connection costs
500 ms, for which torch's client sleeps.

Each attempt has a new port, so none can read what an earlier one wrote. torchrun 2.13's default
store survives attempts, and recovered a killed worker in 7 of 26 runs.
"""

from __future__ import annotations

import socket

from elastane.process.endpoint import bound
from elastane.protocol.model import PortOffer

# As many connections as the workers of a large job may open at once; the kernel caps it at
# somaxconn.
_BACKLOG = 4096


class OfferedPort:
    """One held port; `listening` if this agent serves the store.

    Without a zygote to serve the store, the socket is bound but does not listen. The kernel gives
    such a port to no process that asks for any port. A worker that binds it by number, with
    SO_REUSEADDR as torch does, gets it.
    """

    def __init__(self, *, listening: bool, host: str = "") -> None:
        """`host` is where others reach this node; see `process.endpoint.bound`."""
        self.listening = listening
        self._host = host
        self._socket: socket.socket | None = None

    def open(self) -> PortOffer:
        """Bind a port of the kernel's choice.

        A port that does not listen is held on all addresses, since torch's store will bind all.
        """
        self._socket = bound(self._host if self.listening else "", 0)
        if self.listening:
            self._socket.listen(_BACKLOG)
        return self.offer

    @property
    def offer(self) -> PortOffer:
        """What other nodes learn about the held port."""
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
        """Return a port object that owns the held socket; this one is free afterwards."""
        owner = OfferedPort(listening=self.listening, host=self._host)
        owner._socket, self._socket = self._socket, None
        return owner

    def close(self) -> None:
        """Release the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
