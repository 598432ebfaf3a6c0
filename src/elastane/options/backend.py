"""Which rendezvous a command line asks for, and where its coordinator is.

The default name `static` is torchrun's; without an endpoint it means a job of one machine. The
rules are those in the help of `--rdzv-backend`; each refusal says what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastane.errors import ConfigurationError, UsageError
from elastane.options.conf import Conf
from elastane.options.config import RendezvousConfig
from elastane.options.parser import Options
from elastane.options.spelling import nearest
from elastane.process.endpoint import Endpoint, parse_endpoint
from elastane.stores import registry

PORT = 29400  # torchrun's for c10d
STATIC_PORT = 29500  # torchrun's for static
# The backends without a store; those with one are in stores.registry.
_WITHOUT_STORE = {"elastane": "elastane", "c10d": "elastane", "static": "static"}
_STATIC_OPTIONS = {"node_rank", "master_addr", "master_port"}


def resolve(
    options: Options, conf: Conf, nodes: tuple[int, int], environ: Mapping[str, str]
) -> tuple[RendezvousConfig, list[str]]:
    """Return the requested rendezvous, without its secrets, and notes for the user."""
    _, max_nodes = nodes
    backend = _backend(options, max_nodes)
    _check_store_keys(conf, backend)
    if backend == "standalone":
        return _standalone(options, nodes)
    if backend not in _WITHOUT_STORE:
        if options.flag("standalone"):
            return _sidecar(options, conf, nodes)
        return _in_store(backend, options, conf, environ), []
    if backend == "static":
        return _static(options, conf, nodes), []
    endpoint = options.text("rdzv_endpoint")
    notes = []
    if not endpoint:
        endpoint = "localhost"
        notes.append(
            f"no --rdzv-endpoint: meeting at localhost:{PORT}, where only agents of this machine "
            "can come"
        )
    where = parse_endpoint(endpoint, default_port=PORT)
    _check_port(where, endpoint)
    return RendezvousConfig("elastane", where.host, where.port, hosts=conf.is_host), notes


def names() -> list[str]:
    """Return the names that `--rdzv-backend` accepts, without handlers of other packages."""
    return [*_WITHOUT_STORE, *registry.names()]


def is_builtin(name: str) -> bool:
    """Return whether elastane's own coordinator serves `--rdzv-backend NAME`."""
    return name.lower() in _WITHOUT_STORE or registry.is_store(name.lower())


def requested_rank(options: Options, conf: Conf) -> int | None:
    """Return the node rank that this node asks for; None without a request."""
    rank = options.whole("node_rank") if "node_rank" in options.given else conf.rank
    if rank is not None and rank < 0:
        raise UsageError(f"--node-rank = {rank}", slug="node-rank", expected="0 or higher")
    return rank


def _backend(options: Options, max_nodes: int) -> str:
    written = options.text("rdzv_backend").lower()
    if options.flag("standalone") and not _brings_server(written):
        return "standalone"
    endpoint = options.text("rdzv_endpoint")
    backend = _known(written)
    single = max_nodes == 1
    if backend == "static" and single and not endpoint and "master_port" not in options.given:
        return "standalone"
    if "rdzv_backend" not in options.given and endpoint:
        backend = "elastane"
    if backend == "elastane" and single and endpoint in ("", "localhost:0", "127.0.0.1:0"):
        return "standalone"
    return backend


def _brings_server(written: str) -> bool:
    return registry.is_store(written) and registry.backend(written).brings_server


def _known(written: str) -> str:
    if written in _WITHOUT_STORE:
        return _WITHOUT_STORE[written]
    if registry.is_store(written):
        return written
    near = nearest(written, names())
    raise UsageError(
        f"no such --rdzv-backend: {written}",
        slug="bad-option-value",
        expected=f"did you mean {near}?" if near else "one of " + ", ".join(names()),
        next_step=f"a package that brings it has an entry point {written!r} in the group "
        f"{registry.GROUP}",
    )


def _standalone(options: Options, nodes: tuple[int, int]) -> tuple[RendezvousConfig, list[str]]:
    notes = _check_alone(options, nodes)
    return RendezvousConfig("standalone", "127.0.0.1", 0, hosts=True, alone=True), notes


def _check_alone(options: Options, nodes: tuple[int, int]) -> list[str]:
    min_nodes, max_nodes = nodes
    if min_nodes > 1:
        raise ConfigurationError(
            f"--standalone with --nnodes {options.text('nnodes')}: one machine cannot be "
            f"{min_nodes} nodes",
            slug="standalone-nodes",
            expected="--nnodes 1 with --standalone",
            next_step="several nodes meet with --rdzv-endpoint HOST:PORT in place of --standalone",
        )
    return [] if max_nodes == 1 else [f"--standalone: one node, not up to {max_nodes}"]


def _sidecar(
    options: Options, conf: Conf, nodes: tuple[int, int]
) -> tuple[RendezvousConfig, list[str]]:
    """Return the rendezvous with an etcd server that this agent starts for its own job."""
    if options.text("rdzv_endpoint"):
        raise ConfigurationError(
            f"--standalone with --rdzv-endpoint {options.text('rdzv_endpoint')}",
            slug="standalone-nodes",
            expected="--standalone, which starts an etcd of its own, or the endpoint of one",
            next_step="leave --standalone out to use that server",
        )
    notes = _check_alone(options, nodes)
    notes += [f"--rdzv-conf {key} has no effect on an etcd of the job's own" for key in conf.store]
    # The server is of this job alone: it speaks v3, whatever was written.
    return RendezvousConfig("etcd", sidecar=True, alone=True), notes


def _in_store(
    backend: str, options: Options, conf: Conf, environ: Mapping[str, str]
) -> RendezvousConfig:
    endpoint = options.text("rdzv_endpoint")
    place = registry.backend(backend).place(endpoint, conf.store, environ)
    return RendezvousConfig(backend, store=place.endpoint, store_conf=place.conf)


def _check_store_keys(conf: Conf, backend: str) -> None:
    """Refuse keys of --rdzv-conf that belong to another store."""
    for key in conf.store:
        owners = registry.backends_of_key(key)
        if backend not in owners:
            raise ConfigurationError(
                f"--rdzv-conf {key}=... is for {' or '.join(owners)}, and the backend is {backend}",
                slug="bad-rdzv-conf",
                expected=f"--rdzv-backend {owners[0]} with it; tls_cert, tls_key and tls_ca are "
                "for the coordinator's own connections",
            )


def _static(options: Options, conf: Conf, nodes: tuple[int, int]) -> RendezvousConfig:
    min_nodes, max_nodes = nodes
    if min_nodes != max_nodes:
        raise ConfigurationError(
            f"--nnodes {options.text('nnodes')} with the static backend, whose nodes are fixed",
            slug="static-elastic",
            expected="--nnodes N, or a backend that is elastic",
            next_step="--rdzv-backend elastane --rdzv-endpoint HOST:PORT",
        )
    written = options.text("rdzv_endpoint")
    if not written and max_nodes > 1 and not _STATIC_OPTIONS & options.given:
        raise ConfigurationError(
            f"--nnodes {options.text('nnodes')} without a place to meet",
            slug="endpoint-missing",
            expected="--rdzv-endpoint, or --master-addr and --node-rank",
            next_step="--rdzv-endpoint HOST:PORT, the same on all nodes, HOST one of them",
        )
    rank = requested_rank(options, conf) or 0
    if rank >= max_nodes:
        raise ConfigurationError(
            f"--node-rank {rank} of --nnodes {max_nodes}",
            slug="node-rank",
            expected=f"0 to {max_nodes - 1}",
        )
    if not written:
        addr = options.text("master_addr")
        bare = ":" in addr and not addr.startswith("[")
        written = f"[{addr}]" if bare else addr
        written += f":{options.whole('master_port')}"
    where = parse_endpoint(written, default_port=STATIC_PORT)
    _check_port(where, written)
    return RendezvousConfig("static", where.host, where.port, hosts=rank == 0)


def _check_port(where: Endpoint, written: str) -> None:
    if where.port == 0:
        raise ConfigurationError(
            f"port 0 in {written}: other nodes cannot find a port chosen at random",
            slug="endpoint-syntax",
            expected="HOST:PORT with a port from 1 to 65535",
            next_step="--standalone needs no port",
        )
