"""Our rendezvous inside a stock torchrun: `torchrun --rdzv-backend=elastane --rdzv-endpoint=...`.

torchrun finds `handler` by the entry point group `torchrun.handlers`. `--rdzv-conf` takes the keys
of `elastane run`, and `store=file` or `store=etcd` for a coordinator that outlives any host (the
endpoint is then the folder, or etcd's address).

Owns the translation only: torch's classes for what is returned and raised. What it cannot change
is torchrun itself: its agent imports torch for each worker anew, and counts restarts by itself.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.distributed.elastic import rendezvous as torch_api

from elastane.elastic.rendezvous import api
from elastane.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_builtin_handler,
)
from elastane.observe import logging as say

__all__ = ["TorchrunHandler", "create", "handler"]

_log = logging.getLogger("elastane.torchrun")
P = ParamSpec("P")
T = TypeVar("T")
_CLASSES: dict[type[api.RendezvousError], type[Exception]] = {
    api.RendezvousClosedError: torch_api.RendezvousClosedError,
    api.RendezvousConnectionError: torch_api.RendezvousConnectionError,
    api.RendezvousStateError: torch_api.RendezvousStateError,
    api.RendezvousTimeoutError: torch_api.RendezvousTimeoutError,
}


def handler() -> Callable[[torch_api.RendezvousParameters], torch_api.RendezvousHandler]:
    """Return the creator of our handlers: what torchrun loads by the entry point."""
    return create


def create(params: torch_api.RendezvousParameters) -> torch_api.RendezvousHandler:
    """Make our handler of torchrun's parameters."""
    _speak()
    return TorchrunHandler(_made(params))


def _speak() -> None:
    """Have what we say begin with who says it, at torchrun's own level, unless somebody did."""
    if not logging.getLogger("elastane").handlers:
        say.setup(socket.gethostname(), os.environ.get("LOGLEVEL", ""))
        atexit.register(say.flush)


def _torch_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Raise our errors as torch's classes, with their text and as their cause."""

    @functools.wraps(call)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except api.RendezvousError as error:
            kind = _CLASSES.get(type(error), torch_api.RendezvousError)
            raise kind(str(error)) from error

    return translated


@_torch_errors
def _made(params: torch_api.RendezvousParameters) -> DynamicRendezvousHandler:
    return create_builtin_handler(
        api.RendezvousParameters(
            backend=params.backend,
            endpoint=params.endpoint,
            run_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            local_addr=params.local_addr,
            **params.config,
        )
    )


class TorchrunHandler(torch_api.RendezvousHandler):
    """A torch handler that hands every call on to ours."""

    def __init__(self, ours: DynamicRendezvousHandler) -> None:
        self._ours = ours

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return self._ours.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler."""
        return self._ours.use_agent_store

    @_torch_errors
    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """See DynamicRendezvousHandler.

        A spare that the job did not need ends its torchrun with 0. The error that stands for it in
        torch 2.13 makes torchrun fail: its agent then returns no result, and that is looked into.
        """
        try:
            found = self._ours.next_rendezvous()
        except api.RendezvousGracefulExitError as error:
            _log.warning("%s", error)
            raise SystemExit(0) from error
        where = found.bootstrap_store_info
        assert where is not None, "our handler always names the workers' store"
        return torch_api.RendezvousInfo(
            found.store,
            found.rank,
            found.world_size,
            torch_api.RendezvousStoreInfo(where.master_addr, where.master_port),
        )

    @_torch_errors
    def is_closed(self) -> bool:
        """See DynamicRendezvousHandler."""
        return self._ours.is_closed()

    @_torch_errors
    def set_closed(self) -> None:
        """See DynamicRendezvousHandler."""
        self._ours.set_closed()

    @_torch_errors
    def num_nodes_waiting(self) -> int:
        """See DynamicRendezvousHandler: also above 0 when a node failed or left."""
        return self._ours.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._ours.get_run_id()

    @_torch_errors
    def shutdown(self) -> bool:
        """See DynamicRendezvousHandler."""
        return self._ours.shutdown()
