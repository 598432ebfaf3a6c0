"""What the process kubelet asks of the API server; it may be cut off from it, as by a partition."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

Json = dict[str, Any]
AGAIN_S = 0.3
ASK_S = 10.0
WATCH_S = 240
MERGE = "application/merge-patch+json"


class Refused(Exception):
    """The server's answer was an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


def _context(user: Json, cluster: Json) -> ssl.SSLContext:
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    with tempfile.NamedTemporaryFile() as file:
        for part in ("client-certificate-data", "client-key-data"):
            file.write(base64.b64decode(user[part]))
        file.flush()
        context.load_cert_chain(file.name)
    return context


class Api:
    """Requests as the user of a kubeconfig that holds a certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        told = json.loads(kubeconfig.read_text())
        cluster = told["clusters"][0]["cluster"]
        self.server = cluster["server"]
        self._ssl = _context(told["users"][0]["user"], cluster)
        self._session: aiohttp.ClientSession | None = None
        self.connected = asyncio.Event()
        self.connected.set()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def ask(self, method: str, path: str, body: object = None, kind: str = "") -> Json:
        """One request; Refused where the server refuses, OSError where it cannot be had."""
        await self.connected.wait()
        headers = {"Content-Type": kind or "application/json"}
        data = None if body is None else json.dumps(body)
        limit = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with self.session.request(
                method, self.server + path, data=data, headers=headers, timeout=limit
            ) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{method} {path}: {error}") from error
        if answer.status >= 400:
            raise Refused(answer.status, text)
        told: Json = json.loads(text)
        return told

    async def insist(
        self, method: str, path: str, body: object = None, kind: str = ""
    ) -> Json | None:
        """Ask until the server answers; None where it says no."""
        while True:
            try:
                return await self.ask(method, path, body, kind)
            except Refused as error:
                if error.status < 500 and error.status != 429:
                    return None
            except OSError:
                pass
            await asyncio.sleep(AGAIN_S)

    async def follow(self, path: str, query: str = "") -> AsyncIterator[tuple[str, Any]]:
        """Tell ("LISTED", objects), then changes; from the list again when the watch is lost."""
        while True:
            try:
                listed = await self.ask("GET", f"{path}?{query}")
                yield "LISTED", listed["items"]
                version = listed["metadata"]["resourceVersion"]
                more = f"watch=true&resourceVersion={version}&timeoutSeconds={WATCH_S}&{query}"
                async for told in self._stream(f"{path}?{more}"):
                    yield told
            except (OSError, Refused):
                await asyncio.sleep(AGAIN_S)

    async def _stream(self, path: str) -> AsyncIterator[tuple[str, Any]]:
        limit = aiohttp.ClientTimeout(total=None, sock_read=WATCH_S + 10)
        try:
            async with self.session.get(self.server + path, timeout=limit) as answer:
                async for line in answer.content:
                    await self.connected.wait()
                    told = json.loads(line)
                    if told["type"] == "ERROR":
                        raise Refused(told["object"].get("code", 500), "the watch ended")
                    yield told["type"], told["object"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(str(error)) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
