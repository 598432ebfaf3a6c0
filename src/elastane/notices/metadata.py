"""Asks a cloud's metadata server over HTTP/1.1, by its address and nothing else.

A connection for each request, bounded in time and bytes. No proxy is asked, no name resolved, no
redirect followed and no credential sent, whatever the environment says: the answers are only for
this machine, and come from its own host.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

from elastane.notices.dialogue import Ask, MetadataAnswer, MetadataServer, UnreadableAnswerError
from elastane.notices.rules import Address
from elastane.protocol.events import Notice

# The head of an answer, and its body: a notice is a line; a document of events some kilobytes.
HEAD_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 256 << 10
_STATUS = re.compile(r"HTTP/1\.[01] ([0-9]{3})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,9}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?\r\n")


class MetadataReader:
    """The notices of one metadata server at `address`."""

    def __init__(self, server: MetadataServer, address: Address) -> None:
        self._server = server
        self._address = address

    @property
    def pause_s(self) -> float:
        """How long to wait before the next dialogue."""
        return self._server.pause_s

    async def read(self) -> list[Notice]:
        """Hold one dialogue; raises OSError, TimeoutError or UnreadableAnswerError."""
        dialogue = self._server.ask()
        try:
            ask = next(dialogue)
            while True:
                ask = dialogue.send(await answer_of(self._address, ask))
        except StopIteration as end:
            found: list[Notice] = end.value
            return found
        finally:
            dialogue.close()

    async def close(self) -> None:
        """Do nothing: no connection outlives its request."""


async def answer_of(address: Address, ask: Ask) -> MetadataAnswer:
    """Return the answer to one request."""
    try:
        async with asyncio.timeout(ask.limit_s):
            return await _exchange(address, ask)
    except TimeoutError:
        raise TimeoutError(f"no answer from {address} within {ask.limit_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise UnreadableAnswerError(f"the answer of {address} is cut off") from None
    except asyncio.LimitOverrunError:
        raise UnreadableAnswerError(f"the answer of {address} is too long") from None


async def _exchange(address: Address, ask: Ask) -> MetadataAnswer:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=HEAD_BYTES_MAX)
    try:
        lines = [f"{ask.method} {ask.path} HTTP/1.1", f"Host: {address}"]
        lines += [f"{name}: {value}" for name, value in ask.headers.items()]
        lines += ["Accept: */*", "Connection: close"]
        lines += ["Content-Length: 0"] if ask.method == "PUT" else []
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        status, headers = _head((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
        return MetadataAnswer(status, headers, await _body(reader, headers), time.time())
    finally:
        writer.transport.abort()


def _head(text: str) -> tuple[int, dict[str, str]]:
    first, *lines = text.split("\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise UnreadableAnswerError(f"no HTTP: {first[:40]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is None:
        found = b""
        while (part := await reader.read(BODY_BYTES_MAX)) and len(found) <= BODY_BYTES_MAX:
            found += part
        return _bounded(found, len(found))
    if not _LENGTH.fullmatch(length):
        raise UnreadableAnswerError(f"no length: {length[:40]!r}")
    _bounded(b"", int(length))
    return await reader.readexactly(int(length))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while True:
        head = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        if head is None:
            raise UnreadableAnswerError("the answer has no right chunks")
        size = int(head[1], 16)
        if size == 0:
            return found
        _bounded(found, len(found) + size)
        found += (await reader.readexactly(size + 2))[:-2]


def _bounded(found: bytes, size: int) -> bytes:
    if size > BODY_BYTES_MAX:
        raise UnreadableAnswerError(f"an answer of more than {BODY_BYTES_MAX} bytes")
    return found
