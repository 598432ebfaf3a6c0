"""HTTP to one API server: connections, TLS, identity, bounds.

Owns the use of httpx; knows nothing of objects. It fails with `errors`, with `sent` set if a
request may have been carried out although no answer came.

A GET is repeated once. Another request is repeated only if it was certainly not carried out: it
found no connection, it was rejected for an old token (once, after the token was read again), or the
server postponed it (429). All repetitions happen within the timeout of the one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from elastane.errors import missing_extra
from elastane.kubernetes.client.credentials import ClusterAccess
from elastane.kubernetes.client.errors import (
    ApiError,
    ApiUnreachableError,
    garbage,
    read_status,
    refusal,
    unreachable,
)
from elastane.kubernetes.client.identity import ClientProof

if TYPE_CHECKING:
    import httpx

# etcd takes objects of 1.5 MiB at most, and managed fields come on top.
ANSWER_BYTES_MAX = 4 << 20
# 500 objects of 128 KiB; a pod is 5 to 10 KiB.
PAGE_BYTES_MAX = 64 << 20
CONNECT_TIMEOUT_S = 3.0
# A postponed request is repeated after the pause that the server asks for, and at least this long.
PUT_OFF_MIN_S = 0.2


class ApiRequest(msgspec.Struct, frozen=True):
    """One request. `label` names it in messages."""

    method: str
    path: str
    label: str
    query: dict[str, str] = {}
    body: bytes = b""
    content_type: str = "application/json"
    bytes_max: int = ANSWER_BYTES_MAX


class Transport:
    """Connections to the server that `access` names. Opens nothing before the first request."""

    def __init__(self, access: ClusterAccess, *, timeout_s: float, connections_max: int) -> None:
        self.access = access
        self._timeout_s = timeout_s
        self._connections_max = connections_max
        self._pool: _Pool | None = None

    async def ask(self, request: ApiRequest) -> bytes:
        """Return the body of the answer; raises one of `errors` for a refusal or no answer."""
        failed: ApiUnreachableError | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._ask(request)
                    except ApiUnreachableError as error:
                        again = request.method == "GET" and failed is None
                        if not again:
                            raise
                        failed = error
                    await asyncio.sleep(PUT_OFF_MIN_S)
        except TimeoutError:
            raise failed or unreachable(
                request.label,
                f"no answer within {self._timeout_s:g} s",
                where=self.access.where,
                sent=request.method != "GET",
            ) from None

    @contextlib.asynccontextmanager
    async def stream(
        self, request: ApiRequest, *, silence_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the lines of a streamed answer; ApiUnreachableError if it breaks or stalls."""
        timeout = _timeout(self._timeout_s, silence_s)
        async with contextlib.AsyncExitStack() as stack:
            for last in (False, True):
                response = await stack.enter_async_context(self._response(request, timeout))
                if response.status_code == 200:
                    break
                refused = self._refused(request, response, await self._whole(response, request))
                if refused.status != 401 or last or not self.access.renew():
                    raise refused
            # The iterating task closes the stream; the garbage collector would do so too late.
            async with contextlib.aclosing(self._lines(response, request)) as lines:
                yield lines

    async def close(self) -> None:
        """Close all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.client.aclose()

    async def _ask(self, request: ApiRequest) -> bytes:
        """Send a request; repeat it once with new credentials, and when the server postpones it."""
        timeout = _timeout(self._timeout_s)
        renewed = False
        while True:
            async with self._response(request, timeout) as response:
                content = await self._whole(response, request)
                if response.status_code in (200, 201, 202):
                    return content
                refused = self._refused(request, response, content)
            if refused.status == 401 and not renewed and self.access.renew():
                renewed = True
            elif refused.status == 429 and refused.retry_after_s is not None:
                await asyncio.sleep(max(refused.retry_after_s, PUT_OFF_MIN_S))
            else:
                raise refused

    @contextlib.asynccontextmanager
    async def _response(
        self, request: ApiRequest, timeout: httpx.Timeout
    ) -> AsyncIterator[httpx.Response]:
        """Send the request, and return the answer, whatever its status."""
        import httpx

        proof = await self.access.proof()
        pool = await self._connected(proof)
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "elastane",
        }
        if proof.authorization:
            headers["Authorization"] = proof.authorization
        if request.body:
            headers["Content-Type"] = request.content_type
        try:
            async with (
                pool.used(),
                pool.client.stream(
                    request.method,
                    self.access.server + request.path,
                    params=request.query,
                    content=request.body,
                    headers=headers,
                    timeout=timeout,
                    extensions=self.access.extensions(),
                ) as response,
            ):
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            pool.note_failure(error)
            raise self._unreachable(request, error, sent=False) from error
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise self._unreachable(request, error, sent=request.method != "GET") from error

    async def _connected(self, proof: ClientProof) -> _Pool:
        """Return the connections to use: new ones after a change of the certificates."""
        pool, shown = self._pool, (proof.certificate, proof.key)
        if pool is None or pool.stale or pool.shown != shown:
            self._pool = _Pool(self._client(proof), shown)
            if pool is not None:
                await pool.retire()
            pool = self._pool
        return pool

    def _client(self, proof: ClientProof) -> httpx.AsyncClient:
        import httpx

        # httpx logs each request at INFO; a lease is renewed twice a second.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        most = self._connections_max
        return httpx.AsyncClient(
            verify=self.access.context(proof),
            timeout=httpx.Timeout(self._timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            # The environment's proxy is for hosts outside, never for the cluster's API server.
            trust_env=False,
            proxy=self.access.proxy or None,
        )

    def _refused(self, request: ApiRequest, response: httpx.Response, content: bytes) -> ApiError:
        said = read_status(content)
        if response.status_code < 400:
            fault = f"HTTP {response.status_code}: {said.message[:200]}"
            return garbage(request.label, fault, where=self.access.where)
        return refusal(
            request.label,
            response.status_code,
            said,
            where=self.access.where,
            retry_after_s=_seconds(response.headers.get("Retry-After", "")),
        )

    def _unreachable(
        self, request: ApiRequest, error: Exception, *, sent: bool
    ) -> ApiUnreachableError:
        fault = f"{self.access.server}: {str(error) or type(error).__name__}"
        return unreachable(request.label, fault, where=self.access.where, sent=sent)

    async def _whole(self, response: httpx.Response, request: ApiRequest) -> bytes:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > request.bytes_max:
                raise self._too_large(request)
        return bytes(content)

    async def _lines(
        self, response: httpx.Response, request: ApiRequest
    ) -> AsyncGenerator[bytes, None]:
        pending = bytearray()
        async with contextlib.aclosing(response.aiter_bytes()) as parts:  # type: ignore[type-var]
            async for part in parts:
                pending += part
                if b"\n" in part:
                    *lines, rest = bytes(pending).split(b"\n")
                    pending = bytearray(rest)
                    for line in lines:
                        yield line
                if len(pending) > request.bytes_max:
                    raise self._too_large(request)

    def _too_large(self, request: ApiRequest) -> ApiError:
        fault = f"more than {request.bytes_max} bytes"
        return garbage(request.label, fault, where=self.access.where)


class _Pool:
    """Connections with one client certificate; after a change, their last user closes them."""

    def __init__(self, client: httpx.AsyncClient, shown: tuple[str, str]) -> None:
        self.client = client
        self.shown = shown
        self.stale = False
        self._users = 0
        self._retired = False

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await self._close_idle()

    def note_failure(self, error: Exception) -> None:
        """Mark this pool stale after a TLS error: certificates may have been renewed on disk."""
        self.stale = self.stale or _is_tls(error)

    async def retire(self) -> None:
        self._retired = True
        await self._close_idle()

    async def _close_idle(self) -> None:
        if self._retired and not self._users:
            await self.client.aclose()


def _is_tls(error: BaseException | None) -> bool:
    """Whether an error comes from TLS."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _seconds(written: str) -> float | None:
    return float(written) if written.isdecimal() and len(written) < 6 else None


def _timeout(timeout_s: float, silence_s: float | None = None) -> httpx.Timeout:
    """Return the limits of a request; ConfigurationError if httpx is not installed."""
    try:
        import httpx
    except ImportError:
        raise missing_extra(
            "Kubernetes needs the package httpx, which is not installed", "kubernetes"
        ) from None
    read_s = timeout_s if silence_s is None else silence_s
    return httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), read=read_s)
