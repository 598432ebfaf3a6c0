"""Keeps one cache at what the API server has: list, then watch, for ever.

Owns the loop and its patience. How it fails: never for good. A connection that broke is told once,
tried again with a back-off, and the watch goes on from the last version that was seen; a version
that the server has no more is listed anew. What may not be read is told with the right that is
missing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
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


class WatchStream:
    """The connection to the API server, as all informers together see it: lost, or back."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def lost(self, kind: str, error: ApiError) -> None:
        """Say so where nobody has yet."""
        if not self._lost:
            _log.warning("%s: tried again until it answers", error.what)
        self._lost.add(kind)

    def back(self, kind: str) -> None:
        """Say so once all are."""
        if kind in self._lost:
            self._lost.remove(kind)
            if not self._lost:
                _log.warning("kubernetes: the API server answers again")


class Informer(Generic[T]):
    """Fills `cache` with the objects of a kind in a namespace, "" for all."""

    def __init__(
        self, api: Api, resource: Resource, namespace: str, kind: type[T], cache: Cache[T]
    ) -> None:
        self._api = api
        self._namespace = namespace if resource.namespaced else ""
        self._kind = kind
        self._cache = cache
        self.line = WatchStream()
        # Told of each list that is read anew, and of each failure.
        self.count: Callable[[str], None] = lambda _: None
        self._version = ""
        self._failures = 0
        self.resource = resource
        self.selector: Selector = EVERYTHING
        # What stands against it, for a person; empty while all is well.
        self.trouble = ""
        self.ready = asyncio.Event()
        # Set where the operator can work without this kind: then a missing right is borne.
        self.optional = False

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ApiGoneError:
                self._version = ""
                self.count("elastane_relists_total")
            except ApiError as error:
                self._bear(error)
            pause_s = min(RELIST_MAX_S, RELIST_FIRST_S * 2 ** min(self._failures, 10))
            self._failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _list(self) -> None:
        uids: set[str] = set()
        version = ""
        pages = self._api.pages(self.resource, self._namespace, self._kind, self.selector)
        # Page by page: a second list must not need twice the memory.
        async for page in pages:
            for one in page.items:
                uids.add(one.metadata.uid)
                self._cache.saw(one)
            version = page.version
        self._cache.retain(uids, version)
        self._version = version
        self._well()
        self.ready.set()

    async def _watch(self) -> None:
        events = self._api.watch(
            self.resource, self._namespace, self._kind, self._version, self.selector
        )
        try:
            async for seen in events:
                self._well()
                if seen.object is not None and seen.change == "DELETED":
                    self._cache.saw_gone(seen.object)
                elif seen.object is not None:
                    self._cache.saw(seen.object)
                # Only now: what was not taken in is to be told again.
                self._version = seen.version or self._version
        finally:
            await events.aclose()

    def _bear(self, error: ApiError) -> None:
        self.count("elastane_watch_errors_total")
        borne = self.optional and isinstance(error, ApiForbiddenError)
        if isinstance(error, ApiUnreachableError):
            # Watches are cut by any load balancer; one that comes back at once is no news.
            if self._failures:
                self.line.lost(self.resource.kind, error)
        elif error.what != self.trouble:
            (_log.info if borne else _log.warning)("%s", error)
        self.trouble = error.what
        if borne:
            self.ready.set()

    def _well(self) -> None:
        self._failures = 0
        self.line.back(self.resource.kind)
        if self.trouble:
            _log.info("%s: seen again", self.resource.told(self._namespace))
            self.trouble = ""
