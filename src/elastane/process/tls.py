"""TLS contexts, from configuration: of both sides of the control plane, and of store clients.

Between agents and a coordinator with a CA, both sides present certificates and verify the other's
against it. Names are not checked, because an endpoint is an address that moves; the handshake
inside proves the job's secret. So the CA must be the job's or the cluster's own, not a public one.
Without a CA the connection is protected against listeners only. An unusable file raises
ConfigurationError at the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from elastane.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files. A coordinator needs `cert` and `key`; with `ca`, agents need them too."""

    cert: str = ""
    key: str = ""
    ca: str = ""


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """Return the coordinator's context; raises ConfigurationError for unusable files."""
    import ssl

    if not config.cert:
        raise _unusable("no certificate is given", "a coordinator with TLS needs cert and key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, config)
    if config.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(config: TlsConfig) -> ssl.SSLContext:
    """Return the agent's context; raises ConfigurationError for unusable files."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if config.ca else ssl.CERT_NONE
    _load(context, config)
    return context


def public_context(ca: str, cert: str, key: str, *, service: str, slug: str) -> ssl.SSLContext:
    """Return a context for a service of the site, whose certificate has to name its host.

    Without `ca` the authorities of this machine count. ConfigurationError for unreadable files.
    """
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigurationError(
            f"certificates for {service}: {error}",
            slug=slug,
            where=f"cacert={ca} cert={cert} key={key}",
            expected="PEM files that this user can read",
        ) from error
    return context


def _load(context: ssl.SSLContext, config: TlsConfig) -> None:
    import ssl

    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if config.cert:
            context.load_cert_chain(config.cert, config.key or None)
        if config.ca:
            context.load_verify_locations(config.ca)
    except OSError as error:  # includes ssl.SSLError
        files = ", ".join(path for path in (config.cert, config.key, config.ca) if path)
        raise _unusable(f"{files}: {error}", "readable PEM files that belong together") from error


def _unusable(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"TLS cannot be used: {what}",
        slug="tls-files",
        expected=expected,
        next_step="check --rdzv-conf tls_cert=...,tls_key=...,tls_ca=...",
    )
