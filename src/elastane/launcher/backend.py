"""Which rendezvous a command line means, and where its coordinator is.

torchrun's `static` is the default name there, and means a machine by itself where nothing else is
said. The rules are those of `--rdzv-backend`'s help; each refusal names what to write instead.
"""

from __future__ import annotations

from pathlib import Path

from elastane.errors import ConfigurationError, UsageError
from elastane.launcher.conf import Conf
from elastane.launcher.config import Backend, Rendezvous
from elastane.launcher.parser import Options
from elastane.runtime.endpoint import Endpoint, parse_endpoint

PORT = 29400  # torchrun's for c10d
STATIC_PORT = 29500  # torchrun's for static
_NAMES: dict[str, Backend] = {
    "elastane": "elastane",
    "c10d": "elastane",
    "static": "static",
    "file": "file",
}
_LATER = ("etcd", "etcd-v2", "kubernetes")
_STATIC_OPTIONS = {"node_rank", "master_addr", "master_port"}


def resolve(options: Options, conf: Conf, nodes: tuple[int, int]) -> tuple[Rendezvous, list[str]]:
    """Return the rendezvous that is meant, without its secrets, and notes for the user."""
    _, max_nodes = nodes
    backend = _backend(options, max_nodes)
    if backend == "standalone":
        return _standalone(options, nodes)
    if backend == "file":
        return _file(options), []
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
    return Rendezvous("elastane", where.host, where.port, hosts=conf.is_host), notes


def wished_rank(options: Options, conf: Conf) -> int | None:
    """Return the place that this node asks for, None where it asks for none."""
    rank = options.whole("node_rank") if "node_rank" in options.given else conf.rank
    if rank is not None and rank < 0:
        raise UsageError(f"--node-rank = {rank}", slug="node-rank", expected="0 or higher")
    return rank


def _backend(options: Options, max_nodes: int) -> Backend:
    if options.flag("standalone"):
        return "standalone"
    written = options.text("rdzv_backend").lower()
    endpoint = options.text("rdzv_endpoint")
    backend = _known(written)
    single = max_nodes == 1
    if backend == "static" and single and not endpoint and "master_port" not in options.given:
        return "standalone"
    if "rdzv_backend" not in options.given and endpoint:
        return "elastane"
    if backend == "elastane" and single and endpoint in ("", "localhost:0", "127.0.0.1:0"):
        return "standalone"
    return backend


def _known(written: str) -> Backend:
    if written in _NAMES:
        return _NAMES[written]
    if written in _LATER:
        raise ConfigurationError(
            f"--rdzv-backend {written} is not in this version",
            slug="not-in-this-version",
            expected="one of " + ", ".join(_NAMES),
            next_step="--rdzv-backend file --rdzv-endpoint /shared/folder also survives the loss "
            "of any host",
        )
    import difflib

    near = difflib.get_close_matches(written, [*_NAMES, *_LATER], n=1)
    raise UsageError(
        f"no such --rdzv-backend: {written}",
        slug="bad-option-value",
        expected=f"did you mean {near[0]}?" if near else "one of " + ", ".join(_NAMES),
    )


def _standalone(options: Options, nodes: tuple[int, int]) -> tuple[Rendezvous, list[str]]:
    min_nodes, max_nodes = nodes
    if min_nodes > 1:
        raise ConfigurationError(
            f"--standalone with --nnodes {options.text('nnodes')}: one machine cannot be "
            f"{min_nodes} nodes",
            slug="standalone-nodes",
            expected="--nnodes 1 with --standalone",
            next_step="several nodes meet with --rdzv-endpoint HOST:PORT in place of --standalone",
        )
    notes = [] if max_nodes == 1 else [f"--standalone: one node, not up to {max_nodes}"]
    return Rendezvous("standalone", "127.0.0.1", 0, hosts=True, alone=True), notes


def _file(options: Options) -> Rendezvous:
    folder = options.text("rdzv_endpoint")
    if not folder:
        raise ConfigurationError(
            "--rdzv-backend file without --rdzv-endpoint",
            slug="endpoint-missing",
            expected="a folder that all nodes share",
            next_step="--rdzv-backend file --rdzv-endpoint /shared/folder",
        )
    path = Path(folder).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigurationError(
            f"--rdzv-endpoint {folder} is no folder",
            slug="endpoint-missing",
            expected="a folder that all nodes share, which may not exist yet",
        )
    return Rendezvous("file", folder=str(path))


def _static(options: Options, conf: Conf, nodes: tuple[int, int]) -> Rendezvous:
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
    rank = wished_rank(options, conf) or 0
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
    return Rendezvous("static", where.host, where.port, hosts=rank == 0)


def _check_port(where: Endpoint, written: str) -> None:
    if where.port == 0:
        raise ConfigurationError(
            f"port 0 in {written}: nobody else could find it",
            slug="endpoint-syntax",
            expected="HOST:PORT with a port from 1 to 65535",
            next_step="--standalone needs no port",
        )
