"""The configuration of one agent: frozen, complete and checked.

It holds only values: `options.build` makes it from options and environment, and nothing changes it
later. Fields with a secret are left out of its repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastane.notices.rules import NoticeSource
from elastane.process.endpoint import meets_here, reach
from elastane.process.process import WorkerKind
from elastane.process.streams.plan import ChooseFiles, LogPlan
from elastane.protocol.model import JobSpec


@dataclass(frozen=True)
class TlsFiles:
    """Files (PEM) for mutual TLS: this node's certificate and key, and the common authority."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class RendezvousConfig:
    """The place of this agent's coordinator, and the secret and TLS files to reach it.

    `backend` is standalone, elastane, static, or the name of a store in stores.registry. `hosts`:
    whether this node runs the coordinator; None if the address decides. `token` is empty for a job
    without secret, `token_file` if the secret comes from no file. `alone`: no other machine may
    join. `store` is the store's address (a folder, servers, a namespace), `store_conf` how it is
    reached. `sidecar`: this agent starts the store's server.
    """

    backend: str
    host: str = ""
    port: int = 0
    store: str = ""
    store_conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    sidecar: bool = False
    hosts: bool | None = None
    alone: bool = False
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls: TlsFiles | None = None


@dataclass(frozen=True)
class RequestedNode:
    """How this node is to present itself; an empty `node_id` is made up from the host.

    `topology`: where it is in the network, such as zone/rack/host; empty: not known.
    """

    node_id: str
    local_world_size: int
    role: str
    node_rank: int | None
    local_addr: str
    topology: str


@dataclass(frozen=True)
class Command:
    """The command of each worker; `args` may contain the `${local_rank}` macro."""

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    python: str
    zygote: bool
    preload: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class Supervision:
    """How the agent runs and watches its workers.

    `cpus` holds, by local rank, the CPUs that a worker is bound to; empty without binding.
    `stuck_s` is the limit for uninterruptible sleep; 0 means no limit. `spares` is
    --spares-per-node, `replicas` is --snapshot-replicas, `choose_files` the class of --logs-specs.
    `records`: workers record their collectives. `health_check`: the words of a program that says
    whether this node is fit, within `health_check_s`; empty: every node is.
    """

    cpus: tuple[frozenset[int], ...] = ()
    virtual_local_rank: bool = False
    watches_timers: bool = False
    timer_file: str = ""
    health_port: int | None = None
    stuck_s: float = 0.0
    spares: int = 0
    replicas: int = 0
    event_handler: str = "null"
    choose_files: ChooseFiles | None = None
    records: bool = True
    health_check: tuple[str, ...] = ()
    health_check_s: float = 0.0


@dataclass(frozen=True)
class AgentConfig:
    """The whole configuration of one agent; `notes` are lines to show the user once.

    `report_file` is where the outcome of the job is written; empty: nowhere. `repeated_signals` are
    those of `signals` that a scheduler sends more than once before it kills. `notices`: where this
    agent reads that its node is about to go. `serve`: the port of the job's page on the loopback;
    None: no page. `metrics`: the address and port of its metrics; None: none.
    """

    spec: JobSpec
    node: RequestedNode
    rendezvous: RendezvousConfig
    command: Command
    logs: LogPlan
    signals: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()
    supervision: Supervision = Supervision()
    report_file: str = ""
    repeated_signals: tuple[str, ...] = ()
    notices: tuple[NoticeSource, ...] = ()
    serve: int | None = None
    metrics: tuple[str, int] | None = None

    @property
    def is_on_one_machine(self) -> bool:
        """Whether no other machine can take part in the job."""
        meets = self.rendezvous
        endpoint = "" if meets.store else meets.host
        return meets.alone or meets_here(endpoint, self.node.local_addr)

    @property
    def reach(self) -> str:
        """The address at which others reach this node's listeners; "" while it is not known."""
        return reach(self.node.local_addr, alone=self.is_on_one_machine)
