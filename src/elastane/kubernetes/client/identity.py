"""The identity towards the server, kept valid: tokens and certificates that are renewed.

Owns when a file is read again and when a plugin is run again. A token that a kubelet rotates is
valid long after its successor is there, so an occasional look is enough; a rejection by the server
leads to an immediate one. It fails with ConfigurationError for a file that was never readable.
After one reading the old content is kept while the file cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from elastane.errors import ConfigurationError
from elastane.process.offload import Offload

if TYPE_CHECKING:
    import ssl

# Kubelets write a new token when the old one has a fifth of its time left, ten minutes at least.
LOOK_S = 10.0
READ_TIMEOUT_S = 2.0
FILE_BYTES_MAX = 1 << 20


class ClientProof(msgspec.Struct, frozen=True):
    """The proof in a request: the Authorization header, and a client certificate (PEM texts)."""

    authorization: str = ""
    certificate: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return "Proof(...)"  # It is all secret, and a repr may get into a log.


class Identity(Protocol):
    """An identity that the server knows."""

    async def proof(self) -> ClientProof:
        """Return what to show now."""
        ...

    def renew(self) -> bool:
        """Make the next proof a new one; return False where it would be the same again."""
        ...


class SingleFlight:
    """Makes a proof once for all who want one now, and to its end whoever gives up waiting."""

    def __init__(self) -> None:
        self._making: asyncio.Task[ClientProof] | None = None

    async def proof(self, make: Callable[[], Coroutine[Any, Any, ClientProof]]) -> ClientProof:
        """Return what `make()` returns, or what the one that is under way does."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(make())
            # Where nobody waits any more, nobody asks what became of it either.
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._making)


class Anybody:
    """An identity that never changes: one of the kubeconfig itself, or none at all."""

    def __init__(self, proof: ClientProof | None = None) -> None:
        self._proof = proof or ClientProof()

    async def proof(self) -> ClientProof:
        """See Identity.proof."""
        return self._proof

    def renew(self) -> bool:
        """See Identity.renew."""
        return False


class FileIdentity:
    """An identity of files, each read again when it changes; the rest of it is `fixed`."""

    def __init__(self, paths: dict[str, Path], fixed: ClientProof | None = None) -> None:
        """`paths` has some of token, certificate and key."""
        self._paths = paths
        self._proof = fixed or ClientProof()
        self._looked_s = -LOOK_S
        self._seen: dict[str, tuple[int, int]] = {}
        self._offload = Offload(threads_max=1)
        self._flight = SingleFlight()

    async def proof(self) -> ClientProof:
        """See Identity.proof."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return self._proof
        return await self._flight.proof(self._look)

    def renew(self) -> bool:
        """See Identity.renew."""
        self._looked_s = -LOOK_S
        self._seen = dict.fromkeys(self._seen, (0, 0))
        return True

    async def _look(self) -> ClientProof:
        now_s = time.monotonic()
        try:
            self._proof = await self._offload.run(self._read, READ_TIMEOUT_S)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            if len(self._seen) < len(self._paths):
                raise self._unreadable(error) from error
        self._looked_s = now_s
        return self._proof

    def _read(self) -> ClientProof:
        changed: dict[str, str] = {}
        for part, path in self._paths.items():
            found = path.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if self._seen.get(part) != seen:
                with path.open("rb") as file:
                    text = file.read(FILE_BYTES_MAX).decode()
                changed[part] = text
                self._seen[part] = seen
        if "token" in changed:
            changed["authorization"] = f"Bearer {header_safe(changed.pop('token'))}"
        return msgspec.structs.replace(self._proof, **changed)

    def _unreadable(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"kubernetes: the credentials cannot be read: {error}",
            slug="kube-no-token",
            where=", ".join(str(path) for path in self._paths.values()),
            expected="files that this user can read",
        )


class ServiceToken(FileIdentity):
    """The token of a pod's service account, which the kubelet rotates."""

    def __init__(self, path: Path) -> None:
        super().__init__({"token": path})


def header_safe(token: str) -> str:
    """Return the token; ValueError where it holds what no header can."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("a token that is empty, or holds what no HTTP header can")
    return token


def load_certificate(context: ssl.SSLContext, proof: ClientProof) -> None:
    """Show the proof's certificate on this context's connections; the key touches no disk."""
    descriptor = os.memfd_create("elastane-certificate", os.MFD_CLOEXEC)
    try:
        with contextlib.closing(os.fdopen(os.dup(descriptor), "wb")) as file:
            file.write(f"{proof.certificate}\n{proof.key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    finally:
        os.close(descriptor)


def _no_password() -> str:
    """Refuse an encrypted key, for which OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")
