"""Rendezvous as torch.distributed.elastic has it by name, over our own membership.

Every built-in name (elastane, c10d, etcd, etcd-v2, file) is one engine; what differs is where its
coordinator is found. `static` has fixed ranks and a store, as the reference.
"""

from elastane.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from elastane.elastic.rendezvous.registry import (
    _register_default_handlers,
    _register_out_of_tree_handlers,
)

_register_default_handlers()
_register_out_of_tree_handlers()

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]
