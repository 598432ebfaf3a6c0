"""The sockets of verbs that serve a page or metrics: a checked port, and why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastane.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    import socket

_PORT_MAX = 65535


def check_port(port: int, *, slug: str, free: str) -> None:
    """Raise UsageError for a number that is no port; `free` is the command with a free one."""
    if not 0 <= port <= _PORT_MAX:
        raise UsageError(
            f"--port {port}",
            slug=slug,
            expected=f"0 to {_PORT_MAX}",
            next_step=f"{free}, which takes a free port",
        )


def listener_on(host: str, port: int, *, slug: str, free: str) -> socket.socket:
    """Return a listening socket; "" is all addresses.

    Raises ConfigurationError, which proposes `free`, the option or command with a free port.
    """
    from elastane.process.health import listening_socket

    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host or 'all addresses'}, port {port}: {error.strerror or error}",
            slug=slug,
            expected="an address of this machine and a port that no other process has",
            next_step=f"{free}, which takes a free port",
        ) from error


def shown_host(host: str) -> str:
    """Return an address as a URL has it; "" means all, of which localhost is one."""
    return f"[{host}]" if ":" in host else host or "localhost"
