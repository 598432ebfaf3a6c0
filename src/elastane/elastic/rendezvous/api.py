"""The interface of a rendezvous: handlers, their parameters, their results and errors.

Owns the names that agents and authors of handlers share, and the translation of elastane's errors
to them. It does not know any backend. Invalid parameters raise ValueError.

torch.distributed.elastic.rendezvous is not imported, since its import loads every plug-in of the
entry point group `torchrun.handlers`. Elastane's own is one of them, and imports this module.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from elastane import errors

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

_YES = ("1", "true", "t", "yes", "y")
_NO = ("0", "false", "f", "no", "n")
_SHORT_FORM = 3
_LOOPBACK = "127.0.0.1"
# The slugs of elastane's errors that mean an unreachable coordinator, or unreadable data.
_CONNECTION_SLUGS = (
    "no-coordinator",
    "endpoint-unresolvable",
    "not-a-coordinator",
    "endpoint-closed",
)
_STATE_SLUGS = ("store-record", "membership-forked")


class RendezvousError(Exception):
    """Base of all errors of a rendezvous."""


class RendezvousClosedError(RendezvousError):
    """The job has ended or was closed: no node can join it."""


class RendezvousTimeoutError(RendezvousError):
    """Too few nodes came in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend, or the coordinator, is unreachable."""


class RendezvousStateError(RendezvousError):
    """The backend's data cannot be read, or the handler is used in a wrong process."""


class RendezvousGracefulExitError(RendezvousError):
    """The job succeeded while this node was a spare in it: nothing is left to do."""


def raise_as_api(error: errors.ElastaneError) -> NoReturn:
    """Raise the error of the rendezvous API that corresponds to `error`."""
    raise kind_of(error)(str(error)) from error


def kind_of(error: errors.ElastaneError) -> type[RendezvousError]:
    """Return the class of the rendezvous API for `error`."""
    if isinstance(error, errors.JoinTimeoutError):
        return RendezvousTimeoutError
    if isinstance(error, errors.JobClosedError) or error.slug == "job-closed":
        return RendezvousClosedError
    if isinstance(error, errors.StoreError) or error.slug in _CONNECTION_SLUGS:
        return RendezvousConnectionError
    if error.slug in _STATE_SLUGS:
        return RendezvousStateError
    return RendezvousError


@dataclass
class RendezvousStoreInfo:
    """The address of the workers' process-group store: MASTER_ADDR and MASTER_PORT."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Store, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree over `store`: rank 0 publishes its address and port, all others read them.

        Without `server_port` rank 0 publishes a port that was free a moment ago, for the worker of
        rank 0 to bind.
        """
        if rank == 0:
            addr = local_addr or socket.getfqdn()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr)
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or _free_port()))
        return RendezvousStoreInfo(
            master_addr=store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode("utf-8"),
            master_port=int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode("utf-8")),
        )


@dataclass(frozen=True, eq=False)
class RendezvousInfo:
    """The result of a rendezvous: where this node is in its world.

    `store` is that of the world's agents, `rank` this node's, and `world_size` the number of nodes.
    `bootstrap_store_info` is the address of the workers' own store.
    """

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None


def info_of(found: Any, local_addr: str | None) -> Any:
    """Return the result of `next_rendezvous` as a RendezvousInfo, torch's or elastane's.

    For the short form `(store, rank, world_size)`, the nodes agree on the address of their workers'
    store over `store`. TypeError for anything else.
    """
    if all(hasattr(found, name) for name in ("store", "rank", "world_size")):
        return found
    if not isinstance(found, tuple) or len(found) != _SHORT_FORM:
        raise TypeError(
            f"next_rendezvous() returned {found!r}: expected a RendezvousInfo, or "
            "(store, rank, world_size)"
        )
    store, rank, world_size = found
    # On a single node no other host has to resolve the name.
    where = local_addr or (_LOOPBACK if world_size == 1 else None)
    return RendezvousInfo(store, rank, world_size, RendezvousStoreInfo.build(rank, store, where))


class RendezvousHandler(ABC):
    """One node's way into a job, for elastane's agents and torch's.

    A subclass has to implement only `next_rendezvous`. The other methods have defaults for a job of
    fixed nodes, with the name and id in the parameters.
    """

    _params: RendezvousParameters | None = None
    _is_closed = False

    def __init__(self, params: RendezvousParameters | None = None) -> None:
        self._params = params

    def get_backend(self) -> str:
        """Return the backend's name, under which the handler was registered."""
        return self._params.backend if self._params is not None else type(self).__name__

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent serves the workers' store, so that the worker of rank 0 must not."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo | tuple[Store, int, int]:
        """Block until this node is in a world, and return its rank there.

        The short form is a store for the agents of this world, this node's rank and the number of
        nodes. The agents then use that store to agree on the address of their workers' store. Each
        world needs a new store, or a new prefix in one.

        Raises RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError or
        RendezvousStateError; RendezvousGracefulExitError if this node was never needed.
        """

    def is_closed(self) -> bool:
        """Whether this node knows that the job is closed, so that no node can join."""
        return self._is_closed

    def set_closed(self) -> None:
        """Close the job for all nodes; the default closes only this handler."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return more than 0 if this node has to call `next_rendezvous` again."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._params.run_id if self._params is not None else type(self).__name__

    def shutdown(self) -> bool:
        """Close the job and release all resources; return whether that succeeded."""
        self.set_closed()
        return True


class RendezvousParameters:
    """The parameters of a handler; `kwargs` are the backend's own (`--rdzv-conf`)."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("backend = '': expected the name of a rendezvous backend")
        if min_nodes < 1:
            raise ValueError(f"min_nodes = {min_nodes}: expected 1 or more")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes = {max_nodes}: expected min_nodes ({min_nodes}) or more")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return the backend's own parameter `key`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return `key` as a bool; ValueError if it is none."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if str(value).lower() in _YES and isinstance(value, (int, str)):
            return True
        if str(value).lower() in _NO and isinstance(value, (int, str)):
            return False
        raise ValueError(f"rendezvous configuration {key} = {value!r}: expected true or false")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return `key` as an int; ValueError if it is none."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError as error:
            raise ValueError(
                f"rendezvous configuration {key} = {value!r}: expected a whole number"
            ) from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    _registry: dict[str, RendezvousHandlerCreator]

    def __init__(self) -> None:
        self._registry = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend; ValueError if the name is empty or belongs to another creator."""
        if not backend:
            raise ValueError("backend = '': expected the name of a rendezvous backend")
        known = self._registry.get(backend)
        if known is not None and known != creator:
            raise ValueError(f"rendezvous backend {backend!r} is registered already, by {known}")
        self._registry[backend] = creator

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler of `params.backend`; ValueError if that is not registered."""
        creator = self._registry.get(params.backend)
        if creator is None:
            raise ValueError(
                f"rendezvous backend {params.backend!r} is not registered: expected one of"
                f" {', '.join(sorted(self._registry))}; others are added by `register`"
            )
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler made for rendezvous backend {params.backend!r} calls itself"
                f" {handler.get_backend()!r}"
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
