"""What one agent is told at its start: a frozen configuration, complete and checked.

Only values: `launch.build` makes one from options and environment, and nothing changes it later.
The secret is in it and therefore not in its repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastane.process.endpoint import meets_here, reach
from elastane.process.process import WorkerKind
from elastane.process.streams.places import ChooseFiles
from elastane.process.streams.plan import LogPlan
from elastane.protocol.model import JobSpec


@dataclass(frozen=True)
class TlsFiles:
    """Files (PEM) for mutual TLS: this node's certificate and key, and the common authority."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class RendezvousConfig:
    """Where this agent finds its coordinator, and what it proves itself with.

    `backend` is standalone, elastane, static, or the name of a store in stores.registry. `hosts` is
    whether this node serves the coordinator; None where the address decides. `token`
    is empty where the job has no secret, and `token_file` where it is from no file; `alone` means
    that no other machine is to join. `store` is the store's place (a folder, servers, a
    namespace) and `store_conf` how it is reached; `sidecar` means that this agent brings the
    store's server along.
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
class NodeWish:
    """How this node is to present itself; an empty `node_id` is made up from the host."""

    node_id: str
    local_world_size: int
    role: str
    node_rank: int | None
    local_addr: str


@dataclass(frozen=True)
class Command:
    """What each worker runs. `args` may hold the `${local_rank}` macro."""

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    python: str
    zygote: bool
    preload: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class Supervision:
    """How the agent keeps its workers: where they run, what is watched, who hears of events.

    `cpus` are, by local rank, those that a worker is bound to; none where it is not. `stuck_s` is
    how long uninterruptible sleep is borne; 0 is for ever. `spares` is --spares-per-node,
    `replicas` --snapshot-replicas. `choose_files` is the class of --logs-specs.
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


@dataclass(frozen=True)
class AgentConfig:
    """One agent's whole configuration. `notes` are lines that the user should see once.

    `report_file` is where the end of the job is written, empty where nobody asked for that.
    """

    spec: JobSpec
    node: NodeWish
    rendezvous: RendezvousConfig
    command: Command
    logs: LogPlan
    signals: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()
    supervision: Supervision = Supervision()
    report_file: str = ""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether no other machine can take part in the job."""
        meets = self.rendezvous
        endpoint = "" if meets.store else meets.host
        return meets.alone or meets_here(endpoint, self.node.local_addr)

    @property
    def reach(self) -> str:
        """Where others reach this node's listeners, "" where that is not known yet."""
        return reach(self.node.local_addr, alone=self.is_on_one_machine)
