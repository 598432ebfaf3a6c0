"""Elastane's rendezvous in stock torchrun: `torchrun --rdzv-backend=elastane --rdzv-endpoint=...`.

torchrun finds `handler` by the entry point group `torchrun.handlers`. `--rdzv-conf` takes the keys
of `elastane run`, and `store=file` or `store=etcd` for a coordinator that outlives any host (the
endpoint is then the folder, or etcd's address).

torch imports this module in each program that imports torch.distributed.elastic, as
torch.distributed.checkpoint, Lightning and Accelerate do. So the handler and what it needs are
imported when torchrun makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = ["create", "handler"]


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator of handlers, which torch registers under this package's name."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from torchrun's parameters."""
    from elastane.integrations import torchrun_handler

    return torchrun_handler.create(params)
