"""The endpoint of a coordinator: its syntax, its addresses, and the listening socket.

This module owns the form `host[:port]`, the check whether an address is local, and the listening
socket. It speaks no protocol. A port in use may be served by this job's coordinator or by another
program, which only the handshake of a client can tell apart, so `listen` returns None for both. It
fails with UsageError for a malformed endpoint, and ConfigurationError for a port that cannot be
opened. It loads no event loop, because each node's snapshot server imports it.

Every port that other users can reach counts its unproven connections in `Unproven`, apart from the
authenticated ones. At the bound, the oldest one is closed for the next, once its minimum time has
passed. So silent connections cannot use up the places of authenticated ones. `Unproven` owns no
socket: its caller closes the connection that it returns.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from elastane.errors import ConfigurationError, UsageError

DEFAULT_PORT = 29400  # as torchrun's c10d backend
_BACKLOG = 1024  # the nodes of a job of 1,024 may all connect at once
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
LOOPBACK = "127.0.0.1"
T = TypeVar("T")


class Endpoint(msgspec.Struct, frozen=True):
    """A host, by name or address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


STANDALONE = Endpoint(LOOPBACK, 0)


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Return the endpoint in `host`, `host:port`, `[v6]` or `[v6]:port`.

    Port 0 selects a free port. Raises UsageError with the value.
    """
    value = text.strip()
    if "://" in value:
        raise _usage(text, f"{value.partition('://')[0]}:// is no part of an endpoint")
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", value)
    if match is not None:
        host, port = match[1], match[2]
        if ":" not in host:
            raise _usage(text, f"{host!r} is no IPv6 address")
    elif value.count(":") > 1:  # an IPv6 address without brackets cannot carry a port
        host, port = value, None
    else:
        host, colon, rest = value.partition(":")
        port = rest if colon else None
    if not host:
        raise _usage(text, "the host is empty")
    if not _HOST.fullmatch(host) or (":" in host and not _is_ipv6(host)):
        raise _usage(text, f"{host!r} is no host name or address")
    return Endpoint(host, default_port if port is None else _parse_port(text, port))


def _parse_port(text: str, port: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise _usage(text, f"port {port!r} is not a number from 0 to 65535")
    return int(port)


def _usage(text: str, why: str) -> UsageError:
    return UsageError(
        f"--rdzv-endpoint {text!r}: {why}",
        slug="endpoint-syntax",
        expected=f"HOST or HOST:PORT, as in node0:{DEFAULT_PORT} or [::1]:{DEFAULT_PORT}",
        next_step="give all nodes the same address of one node, or of the store's server",
    )


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return False


def local_addresses() -> frozenset[str]:
    """Return every address of this machine's interfaces, including interfaces that are down."""
    return _ipv4_addresses() | _ipv6_addresses()


def _ipv4_addresses() -> frozenset[str]:
    """Read /proc/net/fib_trie, in which the line after a leaf gives the leaf's type."""
    found, leaf = set(), ""
    for line in _lines("/proc/net/fib_trie"):
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            leaf = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            found.add(leaf)
    return frozenset(found)


def _ipv6_addresses() -> frozenset[str]:
    """Read /proc/net/if_inet6, whose first column has 32 hexadecimal digits."""
    lines = _lines("/proc/net/if_inet6")
    return frozenset(
        str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines if line
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # no IPv6, or a sandbox without these files: is_mine then tries to bind
        return []


def is_mine(addresses: Iterable[str]) -> bool:
    """Return whether one of `addresses` belongs to this machine.

    A loopback address belongs to every machine. An address that is translated (NAT, a Kubernetes
    Service) belongs to none.
    """
    local = local_addresses()
    return any(_is_mine(address.partition("%")[0], local) for address in addresses)


def _is_mine(address: str, local: frozenset[str]) -> bool:
    number = ipaddress.ip_address(address)
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    number = mapped or number
    if number.is_loopback or number.is_unspecified or str(number) in local:
        return True
    # If /proc lists any address of this family, it lists all of them.
    known = any((":" in other) == (number.version == 6) for other in local)
    return not known and _can_bind(number)


def _can_bind(number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    family = socket.AF_INET6 if number.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(number), 0))
    except OSError:
        return False
    return True


def reach(local_addr: str, *, alone: bool) -> str:
    """Return the address at which others reach this node's listeners; "" if it is not known yet.

    It is the address that the user gave; for a job that is `alone` on this machine, the loopback.
    """
    return local_addr or (LOOPBACK if alone else "")


def is_loopback(host: str) -> bool:
    """Return whether a host, as the user wrote it, is the loopback."""
    number = _number(host)
    return host == "localhost" or (number is not None and number.is_loopback)


def meets_here(endpoint_host: str, local_addr: str) -> bool:
    """Return whether all agents that meet at this host, without a store, are on this machine.

    Other machines cannot reach a coordinator on the loopback. A node with a network address counts
    as one of several machines, because a tunnel may lead to that loopback.
    """
    return is_loopback(endpoint_host) and (not local_addr or is_loopback(local_addr))


def listen(host: str, port: int) -> socket.socket | None:
    """Return a listening, non-blocking socket for the endpoint; None if the port is in use.

    `bound` defines the addresses. Port 0 selects a free port. Raises ConfigurationError.
    """
    try:
        sock = bound(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise _unlistenable(Endpoint(host, port), error) from error
    try:
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise _unlistenable(Endpoint(host, port), error) from error
    return sock


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound where others reach `host`; raises OSError.

    The loopback, and a numeric address of this machine, are bound exactly; no other address reaches
    them. For "" and for a name all addresses of this machine are bound: other nodes may resolve the
    name differently (Debian resolves its own name to 127.0.1.1).
    """
    family, bind_host = _bind_address(host)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # a restarted coordinator can bind at once
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and bind_host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((bind_host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _bind_address(host: str) -> tuple[socket.AddressFamily, str]:
    number = _number(LOOPBACK if host == "localhost" else host)
    if number is not None and (number.is_loopback or str(number) in local_addresses()):
        return (socket.AF_INET6 if number.version == 6 else socket.AF_INET), str(number)
    if _has_ipv6():
        return socket.AF_INET6, "::"
    return socket.AF_INET, "0.0.0.0"


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address; None for a name and for a link-local address (`%eth0`)."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _has_ipv6() -> bool:
    return socket.has_ipv6 and _can_bind(ipaddress.IPv6Address("::"))


def _unlistenable(address: Endpoint, error: OSError) -> ConfigurationError:
    if error.errno == errno.EACCES:
        step = f"choose a port of 1024 or higher, as in --rdzv-endpoint {address.host}:29400"
    elif error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
        step = "choose an address that `ip address` shows on this node"
    else:
        step = "ss -ltnp"
    return ConfigurationError(
        f"endpoint: cannot listen on {address}: {error.strerror}",
        slug="endpoint-listen",
        next_step=step,
    )


class Unproven(Generic[T]):
    """At most `most` connections; each may stay for `min_s`, even if others arrive."""

    def __init__(self, most: int, min_s: float) -> None:
        self._most, self._min_s = most, min_s
        self._since_s: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, one: object) -> bool:
        return one in self._since_s

    def __iter__(self) -> Iterator[T]:
        return iter([*self._since_s])

    @property
    def is_full(self) -> bool:
        """Whether the next connection requires the close of another one."""
        return len(self._since_s) >= self._most

    def wait_s(self, now_s: float) -> float:
        """Return how long the next connection has to wait in the kernel's queue; 0: no wait."""
        if not self.is_full:
            return 0.0
        return max(0.0, next(iter(self._since_s.values())) + self._min_s - now_s)

    def make_room(self) -> T | None:
        """Return the oldest connection, for the caller to close, or None while there is room."""
        if not self.is_full:
            return None
        oldest = next(iter(self._since_s))
        del self._since_s[oldest]
        return oldest

    def add(self, one: T, now_s: float) -> None:
        """Count a connection that was accepted now."""
        assert not self.is_full, "make_room() comes first"
        self._since_s[one] = now_s

    def discard(self, one: T) -> bool:
        """Stop counting a connection that is proven or gone; return whether it was counted."""
        return self._since_s.pop(one, None) is not None
