"""Changes as they happen: one watch after another, each from the last version seen.

Owns the stream of events. A server ends each watch after a while, which is normal. A watch that is
silent for longer than that, without even a bookmark, counts as a broken connection. It fails with
ApiGoneError for a version that is too old (list again), ApiUnreachableError for a broken connection
(resume from the version of the last event), and ApiAnswerError for anything that is no event.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec

from elastane.kubernetes.client.decode import Versioned, decoded
from elastane.kubernetes.client.errors import Status, garbage, refusal

if TYPE_CHECKING:
    from elastane.kubernetes.client.transport import Request, Transport

T = TypeVar("T")
# A server ends a watch after about so long, and sends a bookmark each minute until then.
WATCH_S = 60.0
# ... and a connection over which nothing came for that long and this is dead.
SILENCE_MARGIN_S = 5.0
# Between two watches of a server that ends each at once: the first pause and the longest.
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0

Change = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class SeenObject(msgspec.Struct, Generic[T], frozen=True):
    """One event. `object` is None for a BOOKMARK, which only says how far the watch is.

    There is one at the beginning of each watch, too: the server answers.
    """

    change: Change
    object: T | None
    version: str


class _Line(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


async def follow(
    http: Transport, request: Request, kind: type[T], from_version: str, watch_s: float
) -> AsyncGenerator[SeenObject[T], None]:
    """Give every event after `from_version`, over as many watches as it takes."""
    version, pause_s = from_version, PAUSE_S
    while True:
        # Not all watches of all clients at one moment.
        asked_s = max(1, round(watch_s * random.uniform(0.9, 1.0)))
        query = request.query | {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(asked_s),
        }
        began = msgspec.structs.replace(request, query=query, told="watch" + request.told[4:])
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with http.stream(began, silence_s=watch_s + SILENCE_MARGIN_S) as lines:
            yield SeenObject("BOOKMARK", None, version)
            async for line in lines:
                if line.strip():
                    seen = _seen(line, kind, began.told, http.access.where)
                    version = seen.version or version
                    yield seen
        lived = loop.time() - begun_s >= min(1.0, asked_s / 2)
        pause_s = PAUSE_S if lived else min(2 * pause_s, PAUSE_MAX_S)
        if not lived:
            await asyncio.sleep(pause_s)


def _seen(line: bytes, kind: type[T], told: str, where: str) -> SeenObject[T]:
    event = decoded(line, _Line, told, where)
    if event.type == "ERROR":
        status = decoded(event.object, Status, told, where)
        if not 400 <= status.code < 600:
            raise garbage(told, f"an error of code {status.code}", where=where)
        raise refusal(told, status.code, status, where=where)
    version = decoded(event.object, Versioned, told, where).metadata.resourceVersion
    if event.type == "BOOKMARK":
        return SeenObject(event.type, None, version)
    return SeenObject(event.type, decoded(event.object, kind, told, where), version)
