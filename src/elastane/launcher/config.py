"""What one agent is told at its start: a frozen configuration, complete and checked.

Only values: `launch.build` makes one from options and environment, and nothing changes it later.
The secret is in it and therefore not in its repr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elastane.core.model import JobSpec
from elastane.runtime.process import WorkerKind
from elastane.runtime.streams.plan import LogPlan

Backend = Literal["standalone", "elastane", "static", "file"]


@dataclass(frozen=True)
class Tls:
    """Files (PEM) for mutual TLS: this node's certificate and key, and the common authority."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class Rendezvous:
    """Where this agent finds its coordinator, and what it proves itself with.

    `hosts` is whether this node serves the coordinator; None where the address decides. `token`
    is empty where the job has no secret; `alone` means that no other machine is to join.
    """

    backend: Backend
    host: str = ""
    port: int = 0
    folder: str = ""
    hosts: bool | None = None
    alone: bool = False
    token: str = field(default="", repr=False)
    tls: Tls | None = None


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
class LaunchConfig:
    """One agent's whole configuration. `notes` are lines that the user should see once."""

    spec: JobSpec
    node: NodeWish
    rendezvous: Rendezvous
    command: Command
    logs: LogPlan
    signals: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = ()
