"""HTTP to a cluster of several endpoints: the one that answers is kept, one that fails is left.

Owns connections, failover, TLS and the login; knows nothing of keys. It fails with StoreError. The
slug is `store-unreachable` where no server got the request, `store-unsure` where a write may have
been done, and `store-refused` where a server refused it.

A read tries the next endpoint until one answers, within the bound. A write does so only while it is
certain that no server has it, since a write that is sent twice may conflict with itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from elastane.errors import ConfigurationError, StoreError, missing_extra
from elastane.process.tls import public_context
from elastane.protocol.limits import STORE_TIMEOUT_S
from elastane.protocol.unreadable import UNREADABLE
from elastane.stores.etcd.server import short_path
from elastane.stores.etcd.settings import EtcdSettings
from elastane.stores.protocol import STORE_VALUE_BYTES_MAX

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)
# A running member answers in milliseconds; a lease of 2 s survives one that does not.
CONNECT_TIMEOUT_S = 0.5
ATTEMPT_TIMEOUT_S = 1.5
# After this long without an event a watch reads the key: its server may have been cut off from the
# others without noticing.
WATCH_SILENCE_S = 10.0
# base64 of the largest value in a transaction's answer, and the names around it.
ANSWER_BYTES_MAX = 2 * STORE_VALUE_BYTES_MAX
# Errors of a server that did not accept a request: another member may be asked.
_NOT_TAKEN = ("no leader", "not capable", "too many requests")
# Errors of a server that may have accepted it: a write is not sent again. A server that is stopped
# says so of proposals that its cluster may still commit.
_MAY_BE_TAKEN = ("leader changed", "timed out", "unavailable", "server stopped")
# What the gateway answers when the connection to its own server broke or was closed (gRPC's
# Canceled, DeadlineExceeded and Unavailable): the server may have the request.
_BROKE = (408, 499, 503, 504)
# The host of a request over a socket; no server looks at it.
_BY_SOCKET = "http://etcd"
_NOT_ALLOWED = ("auth", "permission denied", "user name is empty")


class _GatewayError(msgspec.Struct):
    """An error of the gateway."""

    error: str = ""
    message: str = ""
    code: int = 0
    cause: str = ""  # of a v2 server: what is wrong within its cluster


class EtcdAnswer:
    """A server's complete answer."""

    def __init__(self, url: str, status: int, content: bytes, index: int = 0) -> None:
        self.url = url
        self.status = status
        self.content = content
        # The store's index as of the answer, from a v2 server.
        self.index = index


class Gateway:
    """Requests to any endpoint that answers. Opens nothing before the first request."""

    def __init__(self, settings: EtcdSettings, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.settings = settings
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None
        self._opened = contextlib.ExitStack()  # what the client's transport needs
        self._at = 0

    async def ask(
        self,
        method: str,
        path: str,
        *,
        write: bool = False,
        **what: Any,
    ) -> EtcdAnswer:
        """Return the answer of the first server that gives one, whatever its status.

        `what` is passed to httpx (json=, data=, params=, headers=).
        """
        trouble = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(2 * len(self.settings.urls)):
                    url = self._url()
                    try:
                        answer = await self._one(method, url + path, what)
                    except _Unanswered as error:
                        trouble = f"{url}: {error}"
                        self._next()
                        if write and error.sent:
                            raise self.unsure(trouble) from error
                        continue
                    if answer.status in (500, *_BROKE) and self._may_ask_another(answer, write):
                        trouble = f"{url}: {trouble_of(answer.content)}"
                        self._next()
                        continue
                    return answer
        except TimeoutError:
            self._next()
            trouble = trouble or f"{self._url()}: no answer within {self._timeout_s:g} s"
            if write:
                raise self.unsure(trouble) from None
        raise self.unreachable(trouble)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, path: str, *, silence_s: float, **what: Any
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the lines of an endless answer until it is silent; StoreError if it breaks."""
        client, url = self._http(), self._url()
        import httpx

        timeout = httpx.Timeout(ATTEMPT_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=silence_s)
        try:
            async with (
                client.stream(method, url + path, timeout=timeout, **what) as response,
                contextlib.aclosing(_lines(response)) as lines,
            ):
                yield lines
        except httpx.ReadTimeout:
            return  # No event for this long: the caller reads the key again.
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            self._next()
            raise self.unreachable(f"{url}: {_words(error)}") from error

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        self._opened.close()

    def unreachable(self, trouble: str) -> StoreError:
        """Return the error for a request that no server accepted."""
        return StoreError(
            f"etcd: {trouble or 'no server answers'}",
            slug="store-unreachable",
            where=f"servers {self.settings.names}",
            expected="an etcd cluster with a leader at --rdzv-endpoint",
            next_step=f"etcdctl --endpoints {','.join(self.settings.urls)} endpoint status",
        )

    def unsure(self, trouble: str) -> StoreError:
        """Return the error for a write that may have been done."""
        return StoreError(
            f"etcd: {trouble}: it is not known whether the write was done",
            slug="store-unsure",
            where=f"servers {self.settings.names}",
            next_step="nothing: it is tried again",
        )

    def refused(self, answer: EtcdAnswer, text: str) -> StoreError | ConfigurationError:
        """Return the error for a refusal: of the login, or of the request."""
        if answer.status in (401, 403) or any(sign in text for sign in _NOT_ALLOWED):
            return ConfigurationError(
                f"etcd: {answer.url}: {text or 'not allowed'}",
                slug="etcd-auth",
                expected=f"a user that may read and write below /{self.settings.prefix}/",
                next_step="--rdzv-conf user=NAME,password=PASSWORD",
            )
        return StoreError(
            f"etcd: {answer.url} refused: {text} (HTTP {answer.status})",
            slug="store-refused",
            where=f"servers {self.settings.names}",
            next_step="look at the server's log",
        )

    async def _one(self, method: str, url: str, what: dict[str, Any]) -> EtcdAnswer:
        client = self._http()
        import httpx

        try:
            async with (
                asyncio.timeout(ATTEMPT_TIMEOUT_S),
                client.stream(method, url, **what) as response,
            ):
                content = b""
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > ANSWER_BYTES_MAX:
                        raise _Unanswered(f"more than {ANSWER_BYTES_MAX} bytes", sent=True)
                index = response.headers.get("X-Etcd-Index", "")
                return EtcdAnswer(
                    url, response.status_code, content, int(index) if index.isdecimal() else 0
                )
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise _Unanswered(_words(error), sent=False) from error
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise _Unanswered(_words(error), sent=True) from error
        except TimeoutError:
            raise _Unanswered(f"no answer within {ATTEMPT_TIMEOUT_S:g} s", sent=True) from None

    def _may_ask_another(self, answer: EtcdAnswer, write: bool) -> bool:
        """Whether another member is asked after an error of this one."""
        text = trouble_of(answer.content)
        if any(sign in text for sign in _NOT_TAKEN):
            return True
        if answer.status in _BROKE or any(sign in text for sign in _MAY_BE_TAKEN):
            if write:
                self._next()
                raise self.unsure(f"{answer.url}: {text}")
            return True
        return False

    def _url(self) -> str:
        if self.settings.socket:
            return _BY_SOCKET
        return self.settings.urls[self._at % len(self.settings.urls)]

    def _next(self) -> None:
        """Ask another server from now on; the failed connection is not used again."""
        self._at += 1

    def _http(self) -> httpx.AsyncClient:
        """Return the client, made at the first request; without httpx, say how to install it."""
        if self._client is None:
            try:
                import httpx
            except ImportError:
                raise missing_extra(
                    "--rdzv-backend etcd needs the package httpx, which is not installed", "etcd"
                ) from None
            # httpx logs each request at INFO; a lease is renewed twice a second.
            logging.getLogger("httpx").setLevel(logging.WARNING)
            timeout = httpx.Timeout(ATTEMPT_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
            # A proxy of the environment is for the internet, never for the cluster.
            self._client = httpx.AsyncClient(
                transport=self._opened.enter_context(_transport(self.settings)),
                timeout=timeout,
                trust_env=False,
            )
        return self._client


class _Unanswered(Exception):
    """No answer came; with `sent`, the server may have the request all the same."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


def trouble_of(content: bytes) -> str:
    """Return the text of an error's body, or its beginning where it is no message."""
    try:
        found = msgspec.json.decode(content, type=_GatewayError, strict=False)
    except UNREADABLE:
        return content[:200].decode(errors="replace").strip()
    return f"{found.error or found.message} {found.cause}".strip()


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    pending = b""
    async for part in response.aiter_bytes():
        pending += part
        *lines, pending = pending.split(b"\n")
        for line in lines:
            yield line
        if len(pending) > ANSWER_BYTES_MAX:
            return


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _transport(settings: EtcdSettings) -> Iterator[httpx.AsyncHTTPTransport]:
    import httpx

    if settings.socket:
        with short_path(Path(settings.socket)) as path:
            yield httpx.AsyncHTTPTransport(uds=path)
    else:
        yield httpx.AsyncHTTPTransport(verify=_context(settings))


def _context(settings: EtcdSettings) -> ssl.SSLContext | bool:
    if not any(url.startswith("https:") for url in settings.urls):
        return False
    return public_context(settings.ca, settings.cert, settings.key, service="etcd", slug="etcd-tls")
