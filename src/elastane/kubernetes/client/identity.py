"""The identity towards the server, kept valid: tokens and certificates that are renewed.

Owns when a file is read again and when a plugin is run again. A kubelet writes a new token long
before the old one expires, so the file is read only now and then. It is read at once when the
server rejects the token. A file that was never readable is a ConfigurationError. Later the old
content is kept while the file cannot be read.

A client-go credential plugin (exec) is a program of the user's that prints an identity. It is run
when the first proof is needed, shortly before that identity expires, and when the server rejects
it. It fails with ConfigurationError that holds the program's output.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from elastane.errors import ConfigurationError
from elastane.process.offload import Offload
from elastane.process.process import spawning
from elastane.protocol.unreadable import UNREADABLE

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
        """Return the current proof."""
        ...

    def renew(self) -> bool:
        """Make the next proof a new one; return False if it would be the same again."""
        ...


class SingleFlight:
    """Makes one proof for all concurrent callers; a cancelled caller does not cancel the work."""

    def __init__(self) -> None:
        self._making: asyncio.Task[ClientProof] | None = None

    async def proof(self, make: Callable[[], Coroutine[Any, Any, ClientProof]]) -> ClientProof:
        """Return the result of `make()`, or of a call of it that is under way."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(make())
            # If all callers were cancelled, asyncio would log an exception that no one reads.
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._making)


class FixedIdentity:
    """An identity that never changes: written in the kubeconfig itself, or empty."""

    def __init__(self, proof: ClientProof | None = None) -> None:
        self._proof = proof or ClientProof()

    async def proof(self) -> ClientProof:
        """See Identity.proof."""
        return self._proof

    def renew(self) -> bool:
        """See Identity.renew."""
        return False


class FileIdentity:
    """An identity in files, each read again when it changes; `fixed` has the other parts."""

    def __init__(self, paths: dict[str, Path], fixed: ClientProof | None = None) -> None:
        """`paths` has the files by their keys: token, certificate, key; each is optional."""
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
    """Return the token; ValueError if it is empty or has characters that a header cannot have."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("the token is empty, or has characters that no HTTP header can have")
    return token


def load_certificate(context: ssl.SSLContext, proof: ClientProof) -> None:
    """Use the proof's certificate on this context's connections; the key is never on disk."""
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


# kubectl has no bound; a plugin that asks a metadata server takes a second or two.
PLUGIN_TIMEOUT_S = 30.0
# Its proof is renewed this long before it expires.
EARLY_S = 30.0


class Credential(msgspec.Struct):
    """The status of an ExecCredential."""

    token: str = ""
    clientCertificateData: str = ""  # noqa: N815 the plugin's
    clientKeyData: str = ""  # noqa: N815 the plugin's
    expirationTimestamp: datetime.datetime | None = None  # noqa: N815 the plugin's


class PluginAnswer(msgspec.Struct):
    """The output of a credential plugin."""

    status: Credential


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """How a plugin is run: `api_version` is that of its input, `hint` is shown if it fails."""

    command: str
    args: tuple[str, ...] = ()
    environ: Mapping[str, str]
    api_version: str
    cluster: Mapping[str, object] | None = None
    hint: str = ""


class PluginIdentity:
    """An identity whose token or certificate comes from an exec plugin."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._proof: ClientProof | None = None
        self._until_s = 0.0
        self._offload = Offload(threads_max=1)
        self._flight = SingleFlight()

    async def proof(self) -> ClientProof:
        """See Identity.proof."""
        # The proof expires at a wall clock time, so it is compared with one.
        if self._proof is not None and time.time() < self._until_s:
            return self._proof
        return await self._flight.proof(self._make)

    def renew(self) -> bool:
        """See Identity.renew."""
        self._proof = None
        return True

    async def _make(self) -> ClientProof:
        with spawning():  # this process must not reap the plugin as an orphan: its exit is awaited
            proof, until_s = await self._offload.run(self._run, PLUGIN_TIMEOUT_S + 5.0)
        self._until_s = until_s
        self._proof = proof
        return proof

    def _run(self) -> tuple[ClientProof, float]:
        spec: dict[str, object] = {"interactive": False}
        if self._plugin.cluster is not None:
            spec["cluster"] = self._plugin.cluster
        said = {"apiVersion": self._plugin.api_version, "kind": "ExecCredential", "spec": spec}
        try:
            done = subprocess.run(
                [self._plugin.command, *self._plugin.args],
                env={**self._plugin.environ, "KUBERNETES_EXEC_INFO": json.dumps(said)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PLUGIN_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._failed(str(error)) from error
        if done.returncode:
            words = done.stderr[-500:].decode(errors="replace").strip()
            raise self._failed(f"ended with {done.returncode}: {words}")
        try:
            return _proof(msgspec.json.decode(done.stdout, type=PluginAnswer).status)
        except UNREADABLE as error:
            raise self._failed(f"printed no ExecCredential: {error}") from error

    def _failed(self, fault: str) -> ConfigurationError:
        return ConfigurationError(
            f"kubernetes: credential plugin {self._plugin.command}: {fault}",
            slug="kube-exec",
            expected="a program that prints an ExecCredential with a token or a certificate",
            next_step=self._plugin.hint or f"run {self._plugin.command} by hand, or log in again",
        )


def _proof(given: Credential) -> tuple[ClientProof, float]:
    if not given.token and not given.clientCertificateData:
        raise ValueError("neither a token nor a certificate")
    expires = given.expirationTimestamp
    bearer = f"Bearer {header_safe(given.token)}" if given.token else ""
    proof = ClientProof(bearer, given.clientCertificateData, given.clientKeyData)
    return proof, expires.timestamp() - EARLY_S if expires else float("inf")
