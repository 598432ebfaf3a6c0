"""The rendezvous of a single machine, for an agent that is given no handler.

Each call serves a new process-group store on the loopback, so no attempt reads the keys of an
earlier one. It waits for no other node, and closing it does nothing. How it fails: OSError if no
port is free.
"""

from __future__ import annotations

import socket
import uuid

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastane.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

_HOST = "127.0.0.1"
# The most workers that connect at once; the kernel caps it at somaxconn.
_BACKLOG = 4096
_PREFIX = "elastane.agents"


class OneMachineRendezvous(RendezvousHandler):
    """A rendezvous of this machine only: rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__()
        self._run_id = uuid.uuid4().hex
        self._served: Store | None = None

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return "one-machine"

    @property
    def use_agent_store(self) -> bool:
        """Return True: this process serves the workers' store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, with a new store; the previous store ends."""
        listener = socket.create_server((_HOST, 0), backlog=_BACKLOG)
        port = listener.getsockname()[1]
        self._served = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        agents = PrefixStore(_PREFIX, self._served)
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(_HOST, port))

    def get_run_id(self) -> str:
        """Return a unique name."""
        return self._run_id
