"""The rendezvous of one machine alone: what an agent uses that is given no handler.

Each call serves a new process-group store on the loopback, so no attempt reads the keys of an
earlier one. There is nobody to wait for, and nothing to close. How it fails: OSError where no port
can be had.
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
# Workers of one machine that connect at once; the kernel caps it at somaxconn.
_BACKLOG = 4096
_PREFIX = "elastane.agents"


class OneMachineRendezvous(RendezvousHandler):
    """See the module."""

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
        """Return rank 0 of 1, with a new store; the store before it ends."""
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
        """Return a name that no other handler has."""
        return self._run_id
