"""The job's secret and its TLS files: where they come from, and whether they are readable.

Precedence: `--token-file` or `--rdzv-conf token=`, then ELASTANE_TOKEN. A job of one machine
without a secret gets a random one. No message ever contains the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from elastane.errors import ConfigurationError, UsageError
from elastane.options.conf import Conf
from elastane.options.config import RendezvousConfig, TlsFiles
from elastane.options.parser import Options

# A secret is one line; a larger file was named by mistake.
_TOKEN_CHARS_MAX = 4096
# The current secret and, while it is being changed, the previous one.
_TOKENS_MAX = 2


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
        raise UsageError(
            "TLS needs three files, and not all are given",
            slug="tls-files",
            expected="--tls-cert, --tls-key and --tls-ca together",
        )
    for path in files:
        if not Path(path).is_file():
            raise ConfigurationError(
                f"TLS file {path} is not there", slug="tls-files", expected="a PEM file"
            )
    return TlsFiles(*files)
