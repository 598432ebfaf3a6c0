"""One object and its changes.

Owns the reading and watching of a single name, which a Role can allow where a list of all is too
much. It fails with ApiError of a read. A broken watch only leads to another read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from elastane.kubernetes.client.api import Api
from elastane.kubernetes.client.decode import Versioned, decoded
from elastane.kubernetes.client.errors import ApiError, ApiGoneError
from elastane.kubernetes.client.resource import Resource, one

T = TypeVar("T")
# After this long without an event the object is read: the server may be cut off.
LOOK_S = 10.0
_PAUSE_S = 0.1
# ... and after a watch that broke, or is not allowed.
_BROKEN_PAUSE_S = 1.0


async def follow_one(
    api: Api, resource: Resource, namespace: str, name: str, kind: type[T]
) -> AsyncGenerator[T | None, None]:
    """Give the current object, None where there is none, and again at each change and read."""
    begin = ""
    while True:
        raw = await api.find(resource, namespace, name, msgspec.Raw)
        version = ""
        if raw is None:
            yield None
        else:
            told, where = f"get {resource.told(namespace, name)}", api.access.where
            version = decoded(raw, Versioned, told, where).metadata.resourceVersion
            yield decoded(raw, kind, told, where)
        # From the version that was read, or from now on where the server has dropped that version.
        watch = api.watch(
            resource, namespace, kind, "" if begin == "gone" else version, one(name), LOOK_S
        )
        begin = ""
        pause_s = _PAUSE_S
        until_s = asyncio.get_running_loop().time() + LOOK_S
        async with contextlib.aclosing(watch):
            try:
                while True:
                    # Not around the yield: it would cancel the iterating task there.
                    async with asyncio.timeout_at(until_s):
                        seen = await anext(watch)
                    if seen.change != "BOOKMARK":
                        yield None if seen.change == "DELETED" else seen.object
            except TimeoutError:
                pass
            except ApiGoneError:
                begin = "gone"
            except ApiError:  # The next read shows whether the server is away.
                pause_s = _BROKEN_PAUSE_S
        await asyncio.sleep(pause_s)
