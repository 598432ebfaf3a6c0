"""Identities that a program of the user's makes: client-go credential plugins (exec).

Owns running it and reading what it says (ExecCredential). It is run when the first proof is needed,
shortly before what it gave expires, and when the server does not know it any more. How it fails:
ConfigurationError with what the program said.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections.abc import Mapping

import msgspec

from elastane.errors import ConfigurationError
from elastane.kubernetes.client.identity import ClientProof, SingleFlight, header_safe
from elastane.process.offload import Offload
from elastane.process.process import spawning
from elastane.protocol.unreadable import UNREADABLE

# kubectl has no bound; a plugin that asks a metadata server takes a second or two.
PLUGIN_TIMEOUT_S = 30.0
# What it gave is renewed so long before it expires.
EARLY_S = 30.0


class Credential(msgspec.Struct):
    """The status of an ExecCredential."""

    token: str = ""
    clientCertificateData: str = ""  # noqa: N815 the plugin's
    clientKeyData: str = ""  # noqa: N815 the plugin's
    expirationTimestamp: datetime.datetime | None = None  # noqa: N815 the plugin's


class PluginAnswer(msgspec.Struct):
    """What a plugin prints."""

    status: Credential


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """How it is run. `api_version` is the one in which it is spoken to; `told` for a person."""

    command: str
    args: tuple[str, ...] = ()
    environ: Mapping[str, str]
    api_version: str
    cluster: Mapping[str, object] | None = None
    hint: str = ""


class PluginIdentity:
    """Whoever the plugin says that we are."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._proof: ClientProof | None = None
        self._until_s = 0.0
        self._offload = Offload(threads_max=1)
        self._flight = SingleFlight()

    async def proof(self) -> ClientProof:
        """See Identity.proof."""
        # Its expiry is a wall time, and so is what it is compared with.
        if self._proof is not None and time.time() < self._until_s:
            return self._proof
        return await self._flight.proof(self._make)

    def renew(self) -> bool:
        """See Identity.renew."""
        self._proof = None
        return True

    async def _make(self) -> ClientProof:
        with spawning():  # its exit is awaited here, and not reaped as an orphan's
            made, self._until_s = await self._offload.run(self._run, PLUGIN_TIMEOUT_S + 5.0)
        self._proof = made
        return made

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

    def _failed(self, trouble: str) -> ConfigurationError:
        return ConfigurationError(
            f"kubernetes: credential plugin {self._plugin.command}: {trouble}",
            slug="kube-exec",
            expected="a program that prints an ExecCredential with a token or a certificate",
            next_step=self._plugin.hint or f"run {self._plugin.command} by hand, or log in anew",
        )


def _proof(given: Credential) -> tuple[ClientProof, float]:
    if not given.token and not given.clientCertificateData:
        raise ValueError("neither a token nor a certificate")
    expires = given.expirationTimestamp
    bearer = f"Bearer {header_safe(given.token)}" if given.token else ""
    proof = ClientProof(bearer, given.clientCertificateData, given.clientKeyData)
    return proof, expires.timestamp() - EARLY_S if expires else float("inf")
