"""The rules of access to the page: who may read it, and what no request can do.

The page listens on the loopback, which any program and any web site of this machine's users can
reach. So a connection must come from a process of this user or of root; `Host` must name this
server, which keeps out names that were made to resolve here; and `Origin` and `Sec-Fetch-Site` must
not name another site. On other addresses a request must also prove the job's secret, by a cookie or
a bearer token. Every answer forbids the browser to load or embed anything of other sites.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

COOKIE = "elastane-dashboard"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_SOCKET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


@dataclass(frozen=True, kw_only=True)
class RequestRefusal:
    """Why a request is refused, with its status."""

    status: int
    what: str
    next_step: str


class Guard:
    """The rules of one server. `token`: what requests prove, or "" on the loopback alone."""

    def __init__(self, host: str, token: str, names: tuple[str, ...] = ()) -> None:
        self._token = token
        own = {host} | set(names)
        if not is_loopback(host):
            own |= {socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower().strip("[]") for name in (*own, *_LOOPBACK_NAMES)}

    @property
    def asks_for_token(self) -> bool:
        """Whether requests must prove the secret."""
        return bool(self._token)

    def refusal(
        self, method: str, headers: Mapping[str, str], server: str
    ) -> RequestRefusal | None:
        """Return why a request is refused, or None; `server` is the address that it reached."""
        if not self._is_own_name(headers.get("host", ""), server):
            host = headers.get("host", "")
            return RequestRefusal(
                status=421,
                what=f"Host {host[:80]!r} is not this server",
                next_step="use the address that elastane dashboard printed, or --allow-host NAME",
            )
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _other_site(f"a request from {headers['sec-fetch-site']!r}")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return _other_site(f"Origin {origin[:80]!r}")
        if method not in ("GET", "HEAD") and not (method == "POST" and self._token):
            return RequestRefusal(
                status=405, what=f"{method[:20]} changes something", next_step="the page only reads"
            )
        return None

    def is_proven(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request proves the secret, if it has to."""
        if not self._token:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(bearer.strip(), self._token):
            return True
        return _equal(_cookie(headers.get("cookie", "")), self.cookie())

    def is_token(self, token: str) -> bool:
        """Return whether a person typed the secret."""
        return bool(self._token) and _equal(token.strip(), self._token)

    def cookie(self) -> str:
        """Return what a browser keeps in place of the secret."""
        return hmac.new(self._token.encode(), COOKIE.encode(), hashlib.sha256).hexdigest()

    def _is_own_name(self, host: str, server: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.lower().strip("[]").rstrip(".")
        return name in self._names or (self.asks_for_token and name == server)


def is_loopback(host: str) -> bool:
    """Return whether an address or name is that of the loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_of_this_user(peer: tuple[str, int], server: tuple[str, int]) -> bool:
    """Return whether a connection over the loopback was made by this user, or by root."""
    uid = peer_uid(peer, server)
    return uid in (os.getuid(), 0)


def peer_uid(peer: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the uid of the process that made a connection of this machine; None if unknown."""
    wanted = (_entry(*peer), _entry(*server))
    for table in _SOCKET_TABLES:
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (fields[1], fields[2]) in (wanted, tuple(map(_mapped, wanted))):
                return int(fields[7])
    return None


def _entry(host: str, port: int) -> str:
    """Return an address as the kernel's table has it: words of four bytes in the host's order."""
    packed = ipaddress.ip_address(host).packed
    words = [packed[index : index + 4][::-1].hex() for index in range(0, len(packed), 4)]
    return f"{''.join(words)}:{port:04x}".upper()


def _mapped(entry: str) -> str:
    """Return an IPv4 entry as a socket of IPv6 has it."""
    return f"0000000000000000FFFF0000{entry}" if len(entry) == 13 else entry


def _other_site(what: str) -> RequestRefusal:
    return RequestRefusal(
        status=403, what=f"{what} comes from another site", next_step="open the page itself"
    )


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
