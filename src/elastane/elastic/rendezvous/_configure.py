"""Builds a membership from the parameters of a rendezvous: endpoint, secret, bounds.

Owns the parsing of `--rdzv-conf` for handlers (the same keys as `elastane run`, and `store`), and
the names of nodes. Its only I/O is reading the files of the secret and of TLS. Invalid parameters
raise ValueError or ElastaneError with the key and the value.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastane.agent.membership import MemberConfig, Membership
from elastane.elastic.rendezvous.api import RendezvousParameters
from elastane.errors import ConfigurationError
from elastane.options.rendezvous import Conf, read_conf, timing_of
from elastane.options.secret import read_tls
from elastane.process.endpoint import STANDALONE, Endpoint, parse_endpoint
from elastane.process.tls import TlsConfig
from elastane.protocol.limits import Timing
from elastane.protocol.model import JobSpec
from elastane.stores import Store, registry

PORT = 29400  # torchrun's port for c10d
# The restart budget of the membership. It must never be used up, since the agent that runs the
# workers has its own budget.
MAX_RESTARTS = 1_000_000
_WITHOUT_STORE = ("elastane", "c10d")
_CLOSE_GRACE_S = 30.0
# The silence timeout is longer than the 3 s of `elastane run`: heartbeats share the interpreter
# with the user's code, and loading a large library holds the GIL. The death of a process is
# detected at once by its connection.
_SILENCE_S = 10.0
# torch's LaunchConfig always fills this in; only torch's oldest backend reads it.
_LAUNCH_CONFIG_TIMEOUT = 900
_handlers = itertools.count()


@dataclass(frozen=True)
class RendezvousOptions:
    """The rendezvous that a handler joins, independent of the spelling of its options."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timing: Timing
    local_addr: str | None = None
    close_grace_s: float = _CLOSE_GRACE_S


def membership_over(
    options: RendezvousOptions, open_store: Callable[[], Store], token: str = ""
) -> Membership:
    """Return a membership whose coordinator is elected in a store."""
    return _membership(_member_config(options, open_store=open_store, token=token or _token()))


def membership_of(params: RendezvousParameters) -> Membership:
    """Return a membership in the job that `params` describe, for one of elastane's backends."""
    config = {key: value for key, value in params.config.items() if value is not None}
    kind = str(config.pop("store", "") or params.backend)
    if "join_timeout" in config or config.get("timeout") == _LAUNCH_CONFIG_TIMEOUT:
        config.pop("timeout", None)
    in_store = registry.is_store(kind)
    if not in_store and kind not in _WITHOUT_STORE:
        raise ConfigurationError(
            f"--rdzv-conf store = {kind!r}",
            slug="bad-rdzv-conf",
            expected="one of " + ", ".join(registry.names()),
            next_step="--rdzv-conf store=file with a shared folder as --rdzv-endpoint",
        )
    close_grace_s = float(params.get_as_int("close_timeout") or _CLOSE_GRACE_S)
    conf = read_conf(",".join(f"{key}={value}" for key, value in config.items()))
    options = RendezvousOptions(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        _timing(conf, registry.backend(kind).timing if in_store else None),
        params.local_addr,
        close_grace_s,
    )
    token = conf.token or _token()
    if in_store:
        open_store = _opener(kind, params.endpoint, conf.store)
        return _membership(_member_config(options, open_store=open_store, token=token), conf)
    where = _endpoint(params)
    if where.port == 0:
        token = token or secrets.token_hex(16)
    return _membership(_member_config(options, endpoint=where, token=token), conf)


def _opener(kind: str, endpoint: str, conf: dict[str, str]) -> Callable[[], Store]:
    # Report wrong settings before anything starts.
    place = registry.backend(kind).place(endpoint, conf, os.environ)
    return lambda: registry.make_store(kind, place.endpoint, place.conf)


def node_name() -> str:
    """Return a unique node id, also among the handlers of this process."""
    return f"{socket.gethostname()}.{os.getpid()}.{next(_handlers)}-{secrets.token_hex(3)}"


def _membership(config: MemberConfig, conf: Conf | None = None) -> Membership:
    if conf is None:
        return Membership(config, node_name)
    tls = read_tls(
        (conf.tls.get("tls_cert", ""), conf.tls.get("tls_key", ""), conf.tls.get("tls_ca", ""))
    )
    return Membership(
        replace(
            config,
            hosts=conf.is_host,
            tls=TlsConfig(cert=tls.cert, key=tls.key, ca=tls.ca) if tls else None,
        ),
        node_name,
    )


def _member_config(
    options: RendezvousOptions,
    *,
    endpoint: Endpoint = STANDALONE,
    open_store: Callable[[], Store] | None = None,
    token: str = "",
) -> MemberConfig:
    return MemberConfig(
        spec=JobSpec(
            job=options.run_id,
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            max_restarts=MAX_RESTARTS,
            timing=options.timing,
        ),
        endpoint=endpoint,
        open_store=open_store,
        local_addr=options.local_addr or "",
        token=token,
        close_grace_s=options.close_grace_s,
    )


def _endpoint(params: RendezvousParameters) -> Endpoint:
    alone = params.max_nodes == 1 and params.endpoint in ("", "localhost:0", "127.0.0.1:0")
    if alone:
        return STANDALONE
    where = parse_endpoint(params.endpoint or "localhost", default_port=PORT)
    if where.port == 0:
        raise ConfigurationError(
            f"port 0 in --rdzv-endpoint {params.endpoint}: no other node could find it",
            slug="endpoint-syntax",
            expected="HOST:PORT with a port from 1 to 65535",
        )
    return where


def _timing(conf: Conf, defaults: Timing | None) -> Timing:
    durations = dict(conf.durations)
    if "heartbeat_s" not in durations:
        durations.setdefault("silence_s", _SILENCE_S)
    # Agents of this job give their workers this long to stop, so the coordinator waits as long.
    text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if "shutdown_timeout_s" not in durations and text:
        durations["shutdown_timeout_s"] = max(0.0, float(text))
    return timing_of(durations, defaults)


def _token() -> str:
    return os.environ.get("ELASTANE_TOKEN", "").strip()
