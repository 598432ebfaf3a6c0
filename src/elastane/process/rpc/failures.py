"""The errors of `connect`: those of the operating system and of the wire, as elastane's.

A pure mapping from exceptions to messages with a next step.
"""

from __future__ import annotations

import errno
import socket

from elastane.errors import (
    ElastaneError,
    MembershipError,
    RendezvousRefusedError,
    WireError,
)

# Another try cannot help with these: the configuration must change.
_FINAL = ("wrong-job", "wrong-token", "protocol-version")
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class ClosedEarlyError(Exception):
    """The other side closed the connection during the handshake."""


def explain(error: Exception, endpoint: str, timeout_s: float, linked: bool) -> ElastaneError:
    """Return the error to raise for `error`; `linked`: TCP and TLS had succeeded."""
    if isinstance(error, WireError):
        return _of_wire(error, endpoint)
    if isinstance(error, ElastaneError):
        return error
    if isinstance(error, TimeoutError):
        return _of_timeout(error, endpoint, timeout_s, linked)
    if isinstance(error, ClosedEarlyError):
        return _unserved(
            f"{endpoint} closed the connection before it proved to be a coordinator: {error}",
            "endpoint-closed",
            "it may be closing, busy, or speak TLS; check --rdzv-endpoint",
        )
    if isinstance(error, socket.gaierror):
        return _unserved(
            f"the host of {endpoint} does not resolve: {error.strerror}",
            "endpoint-unresolvable",
            f"check --rdzv-endpoint, and: getent hosts {endpoint.rpartition(':')[0]}",
        )
    if type(error).__module__ == "ssl":
        return _of_tls(error, endpoint)
    return _of_system(error, endpoint)


def _of_wire(error: WireError, endpoint: str) -> ElastaneError:
    kind = RendezvousRefusedError if error.slug in _FINAL else MembershipError
    return kind(
        f"{endpoint}: {error.what}",
        slug=error.slug,
        where=error.where,
        expected=error.expected,
        next_step=error.next_step or "check --rdzv-endpoint, and elastane's version on both hosts",
    )


def _of_timeout(
    error: TimeoutError, endpoint: str, timeout_s: float, linked: bool
) -> MembershipError:
    did = "took the connection but did not answer" if linked else "did not take a connection"
    bound = f"within {timeout_s:g} s" if timeout_s else f"in time: {error}"
    return _unserved(
        f"{endpoint} {did} {bound}",
        "endpoint-timeout",
        "check --rdzv-endpoint, firewalls, and whether that host lives",
    )


def _of_tls(error: Exception, endpoint: str) -> MembershipError:
    if "CERTIFICATE" in str(error).upper():
        return _unserved(
            f"{endpoint}: the certificates do not fit: {error}",
            "tls",
            "give all nodes certificates of the same tls_ca",
        )
    return _unserved(
        f"{endpoint}: no TLS session: {error}",
        "tls",
        "use TLS on all nodes or on none: --rdzv-conf tls_cert=...,tls_key=...",
    )


def _of_system(error: Exception, endpoint: str) -> MembershipError:
    number = error.errno if isinstance(error, OSError) else None
    # If several addresses failed, asyncio joins the errors' texts and drops their numbers.
    refused = number == errno.ECONNREFUSED or f"Errno {errno.ECONNREFUSED}]" in str(error)
    if refused:
        return _unserved(
            f"nobody listens at {endpoint}",
            "endpoint-unserved",
            "start the agent whose host that is, or check --rdzv-endpoint",
        )
    if number in _UNREACHABLE:
        return _unserved(
            f"{endpoint} cannot be reached: {error}",
            "endpoint-unreachable",
            f"check routes and: ping {endpoint.rpartition(':')[0]}",
        )
    return _unserved(
        f"{endpoint}: the connection failed: {error}",
        "endpoint-closed",
        "check --rdzv-endpoint, and TLS on both sides or on neither",
    )


def _unserved(what: str, slug: str, next_step: str) -> MembershipError:
    return MembershipError(what, slug=slug, expected="an elastane coordinator", next_step=next_step)
