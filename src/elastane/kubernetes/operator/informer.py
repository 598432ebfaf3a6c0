"""Keeps one cache equal to the API server's objects: list, then watch, without end.

Owns the loop and its backoff. It never fails for good. A broken connection is logged once and
retried with backoff, and the watch resumes from the last version seen. A version that the server
has dropped leads to a new list. A missing right is logged by name.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from elastane.kubernetes.client import (
    Api,
    ApiError,
    ApiForbiddenError,
    ApiGoneError,
    ApiUnreachableError,
    Resource,
    Selector,
)
from elastane.kubernetes.client.resource import EVERYTHING
from elastane.kubernetes.operator.bounds import RELIST_FIRST_S, RELIST_MAX_S
from elastane.kubernetes.operator.cache import Cache, HasMeta

_log = logging.getLogger(__name__)
T = TypeVar("T", bound=HasMeta)


class WatchConnection:
    """The connection to the API server, as all informers together see it: lost, or back."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def lost(self, kind: str, error: ApiError) -> None:
        """Log the loss, once for all kinds."""
        if not self._lost:
            _log.warning("%s: tried again until it answers", error.what)
        self._lost.add(kind)

    def back(self, kind: str) -> None:
        """Log the return once all kinds are back."""
        if kind in self._lost:
            self._lost.remove(kind)
            if not self._lost:
                _log.warning("kubernetes: the API server answers again")


@dataclass(frozen=True)
class Watched(Generic[T]):
    """The objects that an informer reads: those of one kind in a namespace, "" for all.

    `optional`: the operator can work without this kind, so a missing right is no fault.
    """

    resource: Resource
    namespace: str
    kind: type[T]
    selector: Selector = EVERYTHING
    optional: bool = False


class Informer(Generic[T]):
    """Fills `cache` with the watched objects.

    `connection` is shared by all informers of an operator. `count` gets the name of a metric at
    each repeated list and each failure.
    """

    def __init__(
        self,
        api: Api,
        watched: Watched[T],
        cache: Cache[T],
        connection: WatchConnection,
        count: Callable[[str], None],
    ) -> None:
        self._api = api
        self._namespace = watched.namespace if watched.resource.namespaced else ""
        self._kind = watched.kind
        self._selector = watched.selector
        self._cache = cache
        self._connection = connection
        self._count = count
        self._version = ""
        self._failures = 0
        self.resource = watched.resource
        self.optional = watched.optional
        # The fault that keeps it from reading, for a person; empty while there is none.
        self.trouble = ""
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiGoneError:
                self._version = ""
                self._count("elastane_relists_total")
            except ApiError as error:
                self._handle(error)
            pause_s = min(RELIST_MAX_S, RELIST_FIRST_S * 2 ** min(self._failures, 10))
            self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _list(self) -> None:
        uids: set[str] = set()
        version = ""
        pages = self._api.pages(self.resource, self._namespace, self._kind, self._selector)
        # Page by page, so that a second list does not need twice the memory.
        async for page in pages:
            for one in page.items:
                uids.add(one.metadata.uid)
                self._cache.saw(one)
            version = page.version
        self._cache.retain(uids, version)
        self._version = version
        self._succeeded()
        self.ready.set()

    async def _watch(self) -> None:
        events = self._api.watch(
            self.resource, self._namespace, self._kind, self._version, self._selector
        )
        try:
            async for seen in events:
                self._succeeded()
                if seen.object is not None and seen.change == "DELETED":
                    self._cache.saw_gone(seen.object)
                elif seen.object is not None:
                    self._cache.saw(seen.object)
                # After the cache: an event that it did not get must be sent again.
                self._version = seen.version or self._version
        finally:
            await events.aclose()

    def _handle(self, error: ApiError) -> None:
        self._count("elastane_watch_errors_total")
        is_tolerated = self.optional and isinstance(error, ApiForbiddenError)
        if isinstance(error, ApiUnreachableError):
            # Any load balancer cuts watches; one that comes back immediately is not logged.
            if self._failures:
                self._connection.lost(self.resource.kind, error)
        elif error.what != self.trouble:
            (_log.info if is_tolerated else _log.warning)("%s", error)
        self.trouble = error.what
        if is_tolerated:
            self.ready.set()

    def _succeeded(self) -> None:
        self._failures = 0
        self._connection.back(self.resource.kind)
        if self.trouble:
            _log.info("%s: seen again", self.resource.told(self._namespace))
            self.trouble = ""
