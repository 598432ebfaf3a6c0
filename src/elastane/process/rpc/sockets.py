"""Socket options, addresses and descriptor limits of the control plane.

`make_room_for` never fails: it returns the limit that it reached. `insist_on_room` raises
ConfigurationError if that limit is too low for a coordinator's job.
"""

from __future__ import annotations

import resource
import socket

from elastane.errors import ConfigurationError
from elastane.protocol.limits import DESCRIPTORS_SPARED, TCP_USER_TIMEOUT_S

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 3
_KEEPALIVE_PROBES = 3
# The largest limit to ask for, because some programs walk all descriptors up to the limit.
_DESCRIPTORS_MAX = 65_536


def tune(sock: socket.socket) -> None:
    """Set the options of every control connection: small frames at once, dead peers detected."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    timeout_ms = round(TCP_USER_TIMEOUT_S * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def host_of(address: object) -> str:
    """Return the host of a socket address; an IPv4 address that came over IPv6 as IPv4."""
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    return host.removeprefix("::ffff:") if "." in host else host


def make_room_for(descriptors: int) -> int:
    """Raise this process's soft descriptor limit towards `descriptors`; return the limit.

    A sufficient limit stays: workers inherit it, and few programs are tested with large ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= min(descriptors, ceiling):
        return _DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    wanted = min(max(descriptors, 2 * soft), ceiling)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def insist_on_room(nodes: int) -> None:
    """Check that this process can hold a connection for each node; raises ConfigurationError.

    Its own agent's connection is one of them, and would be refused until the job is given up.
    """
    needed = DESCRIPTORS_SPARED + nodes + 1  # one more for a connection that is not proven yet
    limit = make_room_for(needed)
    if limit < needed:
        raise ConfigurationError(
            f"coordinator: this process may open {limit} files, too few for {nodes} nodes",
            slug="descriptor-limit",
            expected=f"{needed} or more: {DESCRIPTORS_SPARED} for the agent's own processes and"
            " files, and one for each connection",
            next_step=f"ulimit -n {max(1024, 2 * needed)}",
        )
