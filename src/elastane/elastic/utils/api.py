"""Small helpers of launchers. Source: torch.distributed.elastic.utils.api."""

from __future__ import annotations

import os
import socket
from string import Template
from typing import Any


def get_env_variable_or_raise(env_name: str) -> str:
    """Return a variable of the environment; ValueError where it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """Return a socket that holds a free port of this host's loopback; RuntimeError without any."""
    last: OSError | None = None
    for family, kind, number, _, _ in socket.getaddrinfo(
        "localhost", None, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM
    ):
        found = socket.socket(family, kind, number)
        try:
            found.bind(("localhost", 0))
            found.listen(0)
        except OSError as error:
            found.close()
            last = error
            continue
        return found
    raise RuntimeError(f"no socket can be bound to localhost: {last}")


class macros:  # noqa: N801 - the reference's name
    """What stands for a value of its own in the arguments of each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[str]:
        """Return `args` with the local rank in place; what is no text is left as it is."""
        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
