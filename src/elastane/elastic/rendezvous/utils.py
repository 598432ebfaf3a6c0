"""Endpoints and configuration strings of a rendezvous, parsed as torch parses them.

torch's module is not used, since importing its package loads all plug-ins (`rendezvous.api`).
"""

from __future__ import annotations

import re

__all__ = ["parse_rendezvous_endpoint"]

_HOST = re.compile(r"[\w.:-]+")


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `[v6]` or `[v6]:port`.

    An empty endpoint is localhost. ValueError for an invalid port or host.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    if text[0] == "[" and text[-1] == "]":
        host, port = text, None
    else:
        host, colon, rest = text.rpartition(":")
        host, port = (host, rest) if colon else (rest, None)
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536):
        raise ValueError(
            f"rendezvous endpoint {text!r}: port {port!r}: expected an integer from 0 to 65535"
        )
    if not _HOST.fullmatch(host):
        raise ValueError(f"rendezvous endpoint {text!r}: {host!r} is not a host name or address")
    return host, default_port if port is None else int(port)


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Return the pairs of `k=v,k=v`; ValueError for an invalid pair."""
    config: dict[str, str] = {}
    for pair in config_str.split(",") if config_str.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise ValueError(f"rendezvous configuration {pair!r}: expected KEY=VALUE")
        config[key] = value
    return config
