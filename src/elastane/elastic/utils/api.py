"""Small helpers of launchers. Source: torch.distributed.elastic.utils.api."""

from __future__ import annotations

import os
import socket
from string import Template
from typing import Any


def get_env_variable_or_raise(env_name: str) -> str:
    """Return an environment variable; ValueError if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """Return a socket bound to a free port of the loopback; RuntimeError if there is none."""
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


class macros:  # noqa: N801 - torch's name
    """Placeholders in the arguments of workers, which are replaced for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[str]:
        """Return `args` with the local rank filled in; other types than text are unchanged."""
        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
