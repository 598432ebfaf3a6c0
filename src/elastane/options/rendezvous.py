"""The rendezvous of a command line: backend, endpoint, `--rdzv-conf` and the job's name.

The default backend `static` is torchrun's; without an endpoint it means a job of one machine. A
duration that the user sets moves the defaults around it and never another duration that the user
set; two that contradict are refused. Without `--rdzv-id`, a job of one node gets a random name. The
nodes of a larger job must find the same name before they meet, so the name is a fingerprint of
endpoint, program and node count. Two different jobs at one endpoint thus have different names, and
the later one is refused. Each refusal says what to write instead.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

import msgspec

from elastane.errors import ConfigurationError, UsageError
from elastane.kubernetes.store.settings import POD_VARIABLE
from elastane.options.config import RendezvousConfig
from elastane.options.parser import Options, nearest
from elastane.process.endpoint import Endpoint, parse_endpoint
from elastane.protocol.limits import NAME_CHARS_MAX, PAIRS, Timing, check
from elastane.stores import registry

PORT = 29400  # torchrun's for c10d
STATIC_PORT = 29500  # torchrun's for static
# The backends without a store; those with one are in stores.registry.
_WITHOUT_STORE = {"elastane": "elastane", "c10d": "elastane", "static": "static"}
_STATIC_OPTIONS = {"node_rank", "master_addr", "master_port"}
# torchrun's spelling, and what it sets here.
_TORCHRUN = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_max_s",
    "keep_alive_interval": "heartbeat_s",
}
_IDLE = {
    "close_timeout": "closing a job needs no store operation",
    "heartbeat_timeout": "heartbeats are frames of a session; see silence",
    "read_timeout": "no store is read; see silence",
    "store_type": "the coordinator keeps the state itself",
}
_TLS = ("tls_cert", "tls_key", "tls_ca")
_OTHER = ("token", "is_host", "rank", "keep_alive_max_attempt", *_TLS)
_FIELDS = Timing.__struct_fields__
_STEM_CHARS_MAX = 40
_UNSPECIFIED = ("", "none")
# How many processes mpirun has started: Open MPI, and MPICH or Intel MPI.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def resolve(
    options: Options, conf: Conf, nodes: tuple[int, int], environ: Mapping[str, str]
) -> tuple[RendezvousConfig, list[str]]:
    """Return the requested rendezvous, without its secrets, and notes for the user."""
    _, max_nodes = nodes
    backend = _backend(options, max_nodes)
    _check_store_keys(conf, backend)
    if backend == "standalone":
        _refuse_mpi(options, environ)
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
        raise UsageError(
            f"--node-rank = {rank}",
            slug="node-rank",
            expected="0 or higher",
            next_step="number the nodes from 0: --node-rank 0 on the first one",
        )
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


def _refuse_mpi(options: Options, environ: Mapping[str, str]) -> None:
    """Refuse a job of one node that mpirun starts several times, unless the user asks for that."""
    if options.flag("standalone") or "nnodes" in options.given:
        return
    for name in _MPI_SIZES:
        size = environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"{name} = {size}: MPI starts {size} agents, and each would be a job of its own",
                slug="endpoint-missing",
                expected="--nnodes and --rdzv-endpoint, by which the agents meet in one job",
                next_step="docs/schedulers.md has the command; --standalone makes each a job",
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


@dataclass(frozen=True)
class Conf:
    """The content of `--rdzv-conf`."""

    durations: dict[str, float] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    is_host: bool | None = None
    rank: int | None = None
    tls: dict[str, str] = field(default_factory=dict)
    store: dict[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()


def read_conf(text: str) -> Conf:
    """Read `k=v,k=v`; UsageError for an unknown key, a missing `=` or a bad number."""
    pairs = _pairs(text)
    durations: dict[str, float] = {}
    store: dict[str, str] = {}
    for key, value in pairs.items():
        name = _duration_name(key)
        if name:
            durations[name] = _number(key, value)
        elif key not in (*_IDLE, *_OTHER):
            if not registry.backends_of_key(key):
                raise _unknown(key)
            store[key] = value
    if "keep_alive_max_attempt" in pairs:
        beat = durations.get("heartbeat_s", Timing().heartbeat_s)
        attempts = _number("keep_alive_max_attempt", pairs["keep_alive_max_attempt"])
        durations.setdefault("silence_s", beat * attempts)
    elif "keep_alive_interval" in pairs:
        durations.setdefault("silence_s", durations["heartbeat_s"] * 3)
    return Conf(
        durations=durations,
        token=pairs.get("token", ""),
        is_host=_yes(pairs["is_host"]) if "is_host" in pairs else None,
        rank=_whole("rank", pairs["rank"]) if "rank" in pairs else None,
        tls={key: pairs[key] for key in _TLS if key in pairs},
        store=store,
        notes=tuple(
            f"--rdzv-conf {key} has no effect here: {_IDLE[key]}" for key in pairs if key in _IDLE
        ),
    )


def timing_of(requested: dict[str, float], defaults: Timing | None = None) -> Timing:
    """Return the defaults with `requested` applied; ConfigurationError if durations contradict."""
    defaults = defaults or Timing()
    values = {name: getattr(defaults, name) for name in _FIELDS} | requested
    # From the wide bounds to the narrow ones: a default yields to a duration that the user set.
    for _ in PAIRS:
        for small, large, factor, _why in PAIRS:
            if values[small] * factor > values[large]:
                if small not in requested:
                    values[small] = values[large] / factor
                elif large not in requested:
                    values[large] = values[small] * factor
    timing = msgspec.structs.replace(Timing(), **values)
    faults = check(timing)
    if faults:
        raise ConfigurationError(
            "durations that cannot hold: " + "; ".join(faults),
            slug="bad-timing",
            where="--rdzv-conf, --shutdown-timeout or --drain-timeout",
            next_step="leave out a duration that is named here: its default fits the others",
        )
    return timing


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UsageError(
                f"--rdzv-conf: {part!r} is no KEY=VALUE",
                slug="bad-rdzv-conf",
                expected="KEY=VALUE,KEY=VALUE,...",
                next_step="--rdzv-conf join_timeout=600,last_call_timeout=10",
            )
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def _duration_name(key: str) -> str:
    if key in _TORCHRUN:
        return _TORCHRUN[key]
    return next((name for name in (key, f"{key}_s") if name in _FIELDS), "")


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(
            f"--rdzv-conf {key} = {value!r}",
            slug="bad-rdzv-conf",
            expected="a number, not negative; durations are seconds",
            next_step=f"--rdzv-conf {key}=10",
        )
    return number


def _whole(key: str, value: str) -> int:
    number = _number(key, value)
    if number != int(number):
        raise UsageError(
            f"--rdzv-conf {key} = {value!r}",
            slug="bad-rdzv-conf",
            expected="a whole number, not negative",
            next_step=f"--rdzv-conf {key}=10",
        )
    return int(number)


def _yes(value: str) -> bool:
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise UsageError(
        f"--rdzv-conf is_host = {value!r}",
        slug="bad-rdzv-conf",
        expected="true or false",
        next_step="is_host=true on the node that serves the coordinator, is_host=false on others",
    )


def _unknown(key: str) -> UsageError:
    import difflib

    ours = [name.removesuffix("_s") for name in _FIELDS]
    known = list(dict.fromkeys([*_TORCHRUN, *_OTHER, *registry.known_keys(), *_IDLE, *ours]))
    near = difflib.get_close_matches(key, known, n=1)
    return UsageError(
        f"--rdzv-conf: no such key: {key}",
        slug="bad-rdzv-conf",
        expected=f"did you mean {near[0]}?" if near else "one of " + ", ".join(sorted(known)),
        next_step="correct the key; docs/rdzv-conf.md says what each one means",
    )


def job_id(
    options: Options, rendezvous: RendezvousConfig, nodes: tuple[int, int]
) -> tuple[str, bool]:
    """Return the job's name, and whether no other machine is meant to join."""
    named = options.text("rdzv_id")
    # As with torchrun, a job of one machine may get any name; an unusable name is replaced.
    if named not in _UNSPECIFIED and (rendezvous.backend != "standalone" or _is_plain(named)):
        check_name("--rdzv-id", named)
        return named, rendezvous.alone
    stem = _stem(options.script)
    if rendezvous.backend == "standalone" or nodes[1] == 1:
        return f"{stem}-{secrets.token_hex(4)}", True
    if rendezvous.store:
        raise ConfigurationError(
            f"a job of several nodes in a store ({rendezvous.backend}) needs a name",
            slug="rdzv-id-missing",
            where=rendezvous.store,
            expected="--rdzv-id, since the store remembers a job that ended",
            next_step=f"--rdzv-id {stem}-1, the same on all nodes and new for each job",
        )
    return f"{stem}-{fingerprint(options, rendezvous, nodes)}", False


def new_incarnation(environ: Mapping[str, str]) -> str:
    """Return a name that no other agent has; in a pod it begins with the pod's uid."""
    pod = environ.get(POD_VARIABLE, "")
    return f"{pod}.{secrets.token_hex(8)}" if pod else secrets.token_hex(8)


def fingerprint(options: Options, rendezvous: RendezvousConfig, nodes: tuple[int, int]) -> str:
    """Return ten hexadecimal digits computed from what all nodes of a job have in common."""
    kind = [name for name in ("module", "no_python", "run_path") if options.flag(name)]
    parts = [
        rendezvous.host,
        str(rendezvous.port),
        *map(str, nodes),
        *kind,
        options.script,
        *options.script_args,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def check_name(option: str, name: str) -> None:
    """Refuse a name that cannot be part of a path or of a log line."""
    if _is_plain(name):
        return
    raise ConfigurationError(
        f"{option} = {name!r}",
        slug="bad-name",
        expected=f"1 to {NAME_CHARS_MAX} printable characters without slashes; it becomes part "
        "of file names",
    )


def _is_plain(name: str) -> bool:
    plain = name.isprintable() and not set(name) & {"/", "\\"} and name not in (".", "..")
    return plain and 0 < len(name) <= NAME_CHARS_MAX


def _stem(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", PurePath(script).name.removesuffix(".py"))
    return stem[-_STEM_CHARS_MAX:].lstrip(".-") or "job"
