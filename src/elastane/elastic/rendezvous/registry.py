"""The built-in backends, and those of other packages.

Plug-ins for torch's entry point group `torchrun.handlers` work unchanged: the entry is a callable
that returns a creator. It is loaded when its name is used, so a broken plug-in affects only jobs
that use it.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from elastane.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousParameters,
)
from elastane.elastic.rendezvous.api import rendezvous_handler_registry as handler_registry
from elastane.stores import registry as stores

__all__ = ["get_rendezvous_handler", "register"]

_TORCHS = ("c10d", "static")
_GROUP = "torchrun.handlers"
_log = logging.getLogger("elastane.rendezvous")


def _create_builtin_handler(params: RendezvousParameters) -> RendezvousHandler:
    from elastane.elastic.rendezvous.dynamic_rendezvous import create_builtin_handler

    return create_builtin_handler(params)


def _create_c10d_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.get("store_type") != "file":
        return _create_builtin_handler(params)
    from elastane.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from elastane.elastic.rendezvous.dynamic_rendezvous import create_handler

    backend, store = create_backend(params)
    return create_handler(store, backend, params)


def _create_static_handler(params: RendezvousParameters) -> RendezvousHandler:
    from elastane.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    return create_rdzv_handler(params)


def _ours() -> list[str]:
    return ["elastane", *stores.names()]


def _register_default_handlers() -> None:
    for name in _ours():
        handler_registry.register(name, _create_builtin_handler)
    handler_registry.register("c10d", _create_c10d_handler)
    handler_registry.register("static", _create_static_handler)


def _register_out_of_tree_handlers() -> None:
    for entry in entry_points(group=_GROUP):
        # elastane's own entry is for torchrun; here these backends are built in.
        if entry.name in (*_ours(), *_TORCHS):
            continue
        try:
            handler_registry.register(entry.name, _Plugin(entry))
        except ValueError as error:
            _log.warning("two packages register one name, the first is used: %s", error)


class _Plugin:
    """A creator that loads its entry point when it is first called."""

    def __init__(self, entry: EntryPoint) -> None:
        self._entry = entry

    def __call__(self, params: RendezvousParameters) -> RendezvousHandler:
        creator: RendezvousHandlerCreator = self._entry.load()()
        return creator(params)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Plugin):
            return self._entry == other._entry
        # The module of the entry may also register its creator itself when it is imported.
        return getattr(other, "__module__", None) == self._entry.module

    def __hash__(self) -> int:
        return hash(self._entry)

    def __repr__(self) -> str:
        return f"the entry point {self._entry.value} of group {_GROUP}"


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of `params.backend`; ValueError if that is not registered."""
    return handler_registry.create_handler(params)


def register(backend: str, creator: RendezvousHandlerCreator) -> None:
    """Register the creator of `backend`'s handlers: a function, or a class of handlers.

    ValueError if the name is empty or belongs to another creator.
    """
    handler_registry.register(backend, creator)
