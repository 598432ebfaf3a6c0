"""The job's secret and its TLS files: where they come from, and how a running job changes them.

Precedence: `--token-file` or `--rdzv-conf token=`, then ELASTANE_TOKEN. A job of one machine
without a secret gets a random one. A token file has one line, or two while the secret is being
changed. An agent proves itself with the first, and with the second to a coordinator that does not
know the first yet; a coordinator accepts both. So the files of a job's nodes may change in any
order, and no session ends. A file that becomes missing, torn or empty is logged once, and the
secrets that were read last stay valid. No message ever contains the secret.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elastane.errors import ConfigurationError, UsageError
from elastane.options.config import RendezvousConfig, TlsFiles
from elastane.options.parser import Options
from elastane.options.rendezvous import Conf
from elastane.process.offload import Offload
from elastane.protocol.wire import derive_secret

# A secret is one line; a larger file was named by mistake.
_TOKEN_CHARS_MAX = 4096
# The current secret and, while it is being changed, the previous one.
_TOKENS_MAX = 2
_log = logging.getLogger("elastane.options")
# A person changes the file on several nodes; no process waits for it.
_LOOK_S = 1.0
# The file may be on a server that does not answer.
_READ_S = 5.0
Stamp = tuple[int, int, int]


def secured(
    rendezvous: RendezvousConfig, options: Options, conf: Conf, environ: Mapping[str, str]
) -> RendezvousConfig:
    """Return `rendezvous` with its secret and TLS files."""
    path = options.text("token_file")
    if path and conf.token:
        raise UsageError(
            "--token-file and --rdzv-conf token=... both name the job's secret",
            slug="token-unreadable",
            expected="one of them",
            next_step="leave token=... out: every user of this host can read a command line",
        )
    token = read_token(path) if path else conf.token or environ.get("ELASTANE_TOKEN", "").strip()
    if not token and rendezvous.alone:
        token = secrets.token_hex(16)

    def file(name: str) -> str:
        return options.text(name) or conf.tls.get(name, "")

    tls = read_tls((file("tls_cert"), file("tls_key"), file("tls_ca")))
    return replace(rendezvous, token=token, token_file=path, tls=tls)


def read_token(path: str) -> str:
    """Return the secret in a file; ConfigurationError if there is none."""
    return read_tokens(path)[0]


def read_tokens(path: str) -> tuple[str, ...]:
    """Return the secret in a file, and the previous one if the file has two lines."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_TOKEN_CHARS_MAX + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise _unreadable(path, reason) from None
    if not 0 < len(text) <= _TOKEN_CHARS_MAX:
        raise _unreadable(path, "empty" if not text else f"over {_TOKEN_CHARS_MAX} characters")
    tokens = tuple(filter(None, (line.strip() for line in text.splitlines())))
    if len(tokens) > _TOKENS_MAX:
        raise _unreadable(path, f"{len(tokens)} lines")
    return tokens


def _unreadable(path: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"--token-file {path}: {reason}",
        slug="token-unreadable",
        expected="a file with one line, the same on all nodes; a second line is the secret before",
        next_step=f"(umask 077; head -c 32 /dev/urandom | base64 > {path})",
    )


def read_tls(files: tuple[str, str, str]) -> TlsFiles | None:
    """Return certificate, key and authority; either all three files exist or none is given."""
    if not any(files):
        return None
    if not all(files):
        names = ("--tls-cert", "--tls-key", "--tls-ca")
        missing = [name for name, path in zip(names, files, strict=True) if not path]
        raise UsageError(
            "TLS needs three files, and not all are given",
            slug="tls-files",
            expected="--tls-cert, --tls-key and --tls-ca together",
            next_step="add " + " and ".join(f"{name} FILE" for name in missing),
        )
    for path in files:
        if not Path(path).is_file():
            raise ConfigurationError(
                f"TLS file {path} is not there",
                slug="tls-files",
                expected="a PEM file",
                next_step="correct the path, or copy the file to this node",
            )
    return TlsFiles(*files)


class Keyring:
    """The secret of this agent, and the secrets that it accepts from others."""

    def __init__(self, job: str, token: str, path: str = "") -> None:
        self._job = job
        self._path = path
        self._tokens: tuple[str, ...] = (token,)
        self._stamp: Stamp | None = None
        self._problem = ""
        self._offload = Offload()

    @property
    def token(self) -> str:
        """The token that this agent proves itself with; empty if the job has no secret."""
        return self._tokens[0]

    def secrets(self) -> tuple[bytes, ...]:
        """Return the valid secrets, this agent's own first."""
        return tuple(derive_secret(self._job, token or None) for token in self._tokens)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Read the file again and again; call `changed` after each change of the secrets."""
        while self._path:
            if await self.reload():
                _log.info("the job's secret was changed in %s", self._path)
                changed()
            await asyncio.sleep(_LOOK_S)

    async def reload(self) -> bool:
        """Read the file; return whether the secrets changed."""
        before = self._tokens
        try:
            if self._path:
                found = await self._offload.run(self._read, _READ_S)
                self._tokens = found or before
            self._problem = ""
        except (ConfigurationError, OSError) as error:  # TimeoutError is an OSError
            self._warn(str(error) or f"{self._path} cannot be read within {_READ_S:g} s")
        return self._tokens != before

    def _read(self) -> tuple[str, ...] | None:
        """Return the tokens in the file; None if it did not change since the last read."""
        found = Path(self._path).stat()
        if not stat.S_ISREG(found.st_mode):
            return None  # A pipe is read once: --token-file <(...)
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return None
        tokens = read_tokens(self._path)
        self._stamp = stamp
        return tokens

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s; the secret that was read before stays valid", problem)
