"""Elastane's rendezvous handler as one of torch's: its results and errors are of torch's classes.

It cannot change torchrun itself: torchrun's agent imports torch again for each worker, and keeps
its own restart count.
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
from elastane.observe import logging as elastane_logging

__all__ = ["TorchrunHandler", "create"]

_log = logging.getLogger("elastane.torchrun")
P = ParamSpec("P")
T = TypeVar("T")
_CLASSES: dict[type[api.RendezvousError], type[Exception]] = {
    api.RendezvousClosedError: torch_api.RendezvousClosedError,
    api.RendezvousConnectionError: torch_api.RendezvousConnectionError,
    api.RendezvousStateError: torch_api.RendezvousStateError,
    api.RendezvousTimeoutError: torch_api.RendezvousTimeoutError,
}


def create(params: torch_api.RendezvousParameters) -> torch_api.RendezvousHandler:
    """Make a handler from torchrun's parameters."""
    _setup_logging()
    return TorchrunHandler(_create_handler(params))


def _setup_logging() -> None:
    """Set up elastane's log with the host's name at torchrun's level, unless it is set up."""
    if not logging.getLogger("elastane").handlers:
        elastane_logging.setup(socket.gethostname(), os.environ.get("LOGLEVEL", ""))
        atexit.register(elastane_logging.flush)


def _torch_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Raise elastane's errors as torch's classes, with their text and as their cause."""

    @functools.wraps(call)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except api.RendezvousError as error:
            kind = _CLASSES.get(type(error), torch_api.RendezvousError)
            raise kind(str(error)) from error

    return translated


@_torch_errors
def _create_handler(params: torch_api.RendezvousParameters) -> DynamicRendezvousHandler:
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
    """A torch handler that delegates every call to elastane's."""

    def __init__(self, delegate: DynamicRendezvousHandler) -> None:
        self._delegate = delegate

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return self._delegate.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler."""
        return self._delegate.use_agent_store

    @_torch_errors
    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """See DynamicRendezvousHandler.

        A spare that the job did not need ends its torchrun with exit code 0. torch 2.13's own error
        for that makes torchrun fail: its agent then returns no result, and torchrun reads one.
        """
        try:
            found = self._delegate.next_rendezvous()
        except api.RendezvousGracefulExitError as error:
            _log.warning("%s", error)
            raise SystemExit(0) from error
        where = found.bootstrap_store_info
        assert where is not None, "the handler always returns the workers' store"
        return torch_api.RendezvousInfo(
            found.store,
            found.rank,
            found.world_size,
            torch_api.RendezvousStoreInfo(where.master_addr, where.master_port),
        )

    @_torch_errors
    def is_closed(self) -> bool:
        """See DynamicRendezvousHandler."""
        return self._delegate.is_closed()

    @_torch_errors
    def set_closed(self) -> None:
        """See DynamicRendezvousHandler."""
        self._delegate.set_closed()

    @_torch_errors
    def num_nodes_waiting(self) -> int:
        """See DynamicRendezvousHandler: also above 0 when a node failed or left."""
        return self._delegate.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._delegate.get_run_id()

    @_torch_errors
    def shutdown(self) -> bool:
        """See DynamicRendezvousHandler."""
        return self._delegate.shutdown()
