"""Rendezvous without a coordinator: of fixed ranks, and of a single machine.

For fixed ranks, as in torch, the agent of rank 0 serves one TCPStore at a given address, and every
call of `next_rendezvous` returns that store. On a single machine each call serves a new store on
the loopback, so no attempt reads the keys of an earlier one. OSError if no port is free.
"""

from __future__ import annotations

import datetime
import socket
import uuid
from typing import cast

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastane.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elastane.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_TIMEOUT_S = 600
_HOST = "127.0.0.1"
# The most workers that connect at once; the kernel caps it at somaxconn.
_BACKLOG = 4096
_PREFIX = "elastane.agents"


class StaticTCPRendezvous(RendezvousHandler):
    """A handler with a fixed rank and world size."""

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: int,
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = datetime.timedelta(seconds=timeout)
        self._store: Store | None = None

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler: the agent of rank 0 serves it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the given rank; blocks until the store of rank 0 is reachable."""
        if self._store is None:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                self.rank == 0,
                self.timeout,
                multi_tenant=True,
            )
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def is_closed(self) -> bool:
        """Return False: it is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node can join."""
        return 0

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self.run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with its process."""
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from `rank` (of --node-rank) and an endpoint with a port."""
    if "rank" not in params.config:
        raise ValueError("static rendezvous: no rank is given: expected --node-rank N")
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "static rendezvous: no endpoint is given: expected --master-addr and --master-port"
        )
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(f"static rendezvous: endpoint {endpoint} has no port: --master-port")
    return StaticTCPRendezvous(
        host,
        port,
        cast(int, params.config.get("rank")),
        params.max_nodes,
        params.run_id,
        int(params.get("timeout", _TIMEOUT_S)),
    )


class OneMachineRendezvous(RendezvousHandler):
    """A rendezvous of this machine only, for an agent that is given no handler: rank 0 of 1."""

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
