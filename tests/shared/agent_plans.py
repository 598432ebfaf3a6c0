"""What happens to the hosts, agents and workers of a job in one history, drawn from a seed. Pure.

`AgentHistory.drawn` returns the shape of the job and all faults with their times. The worker that a
fault hits is drawn too, among those that run at that time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

WORKER_FAULTS = ("kill-worker", "stop-worker")
# A process from which workers are forked, or one that serves the rendezvous of their process group.
ZYGOTE_FAULTS = ("kill-zygote", "stop-zygote")
# `part`: between two hosts. The others of the network: between one host and all.
CUTS = ("cut", "mute", "deafen", "part")
DEATHS = ("kill-agent", "power", "leave")
# `suspend`: every process of a host is stopped, as where a virtual machine is moved.
HOST_FAULTS = (*CUTS, *DEATHS, "stop-agent", "suspend")
# `clock`: a host's time of day jumps, and back at the end. `garbage`: to all ports of a host.
STRANGE_FAULTS = ("clock", "garbage")
# By which a clock jumps.
JUMPS_S = (-86400.0, -3.0, 3.0, 3600.0)
# `store-part`: between the store and one host.
STORE_FAULTS = ("store-killed", "store-stopped", "store-cut", "store-part")
# The disk of the checkpoints, which all hosts share, is full.
DISK_FAULTS = ("disk-full",)
# Below and above the time after which a silent host is departed, which is 3 s.
LASTS_S = ((0.2, 1.5), (2.0, 5.0), (5.0, 12.0))
# Of one cut of every fifth history: longer than the other faults together.
LONG_S = (40.0, 60.0)
# The default backend's coordinator keeps no record. When its agent is started again, at least one
# other agent must reach it within this time, and tells it the fences.
REMEMBERS_S = 8.0
# Hosts of the store of a backend: one, or a majority of three. A shared folder has none.
STORES = {"etcd": ("s", "stu"), "redis": ("s",)}
# Jobs of an unmodified script: all workers restart at each fault, or survivors continue.
SCRIPTS = ("script", "script-in-place")


@dataclass(frozen=True, order=True)
class Fault:
    """A fault: when it begins and for how long, what it is, and which host it hits.

    `other` is the second host of a cut between two; `draw` says which of the workers.
    """

    at_s: float
    for_s: float
    kind: str
    host: str = ""
    other: str = ""
    draw: int = 0

    @property
    def end_s(self) -> float:
        """When it ends, in seconds after the first world began."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        hosts = " and ".join(name for name in (self.host, self.other) if name)
        return f"{self.at_s:.2f} s: {self.kind} {hosts} for {self.for_s:.2f} s (draw {self.draw})"


@dataclass(frozen=True)
class AgentHistory:
    """One history: a job of one agent on each host, and what goes wrong.

    `nodes_min`: the least number of nodes of a world. `late_s`: when the last host's agent starts,
    0.0 for with the others. `stores`: hosts of the store; empty: the backend has none.
    """

    seed: int
    recovery: str
    backend: str
    hosts: str
    workers_per_host: int
    nodes_min: int
    late_s: float
    faults: tuple[Fault, ...]
    stores: str = ""

    def __str__(self) -> str:
        store = f" at {self.stores}" if self.stores else ""
        head = (
            f"seed {self.seed}, {self.recovery}, {self.backend}{store}: hosts {self.hosts}, each of"
            f" {self.workers_per_host}, worlds of {self.nodes_min} nodes at least"
        )
        late = f"{self.late_s:.2f} s: {self.hosts[-1]} arrives" if self.late_s else ""
        return "\n".join(filter(None, [head, late, *map(str, self.faults)]))

    def agent_continues_alone(self, suspension: Fault) -> bool:
        """Whether the end of another fault continues the agent of a suspended host alone.

        Such an agent finds its workers stopped, and replaces them as hanging, which is charged.
        Otherwise agent and workers stop and continue together, so no worker is harmed.
        """
        return any(
            other.kind == "stop-agent"
            and other.host == suspension.host
            and suspension.at_s < other.end_s < suspension.end_s
            for other in self.faults
        )

    @classmethod
    def drawn(cls, seed: int, recovery: str, backend: str, duration_s: float) -> Self:
        """Return the history of a seed: every third one harms no worker directly.

        With the default backend two worlds without a common host could both train for as long as a
        partition lasts (docs/guarantees.md says so), so there a world has more than half of them.
        """
        draw = random.Random(f"{seed} {recovery} {backend}")
        is_script = recovery in SCRIPTS
        hosts = "abcd"[: draw.choice((2, 3, 3) if is_script else (3, 3, 4))]
        most = len(hosts) // 2 + 1
        has_store = backend != "elastane"
        stores = draw.choice(STORES[backend]) if backend in STORES else ""
        # A script that saves by itself ends where its disk is full.
        kinds = HOST_FAULTS + (2 * ZYGOTE_FAULTS if is_script else DISK_FAULTS)
        kinds += STRANGE_FAULTS + (STORE_FAULTS if stores else ())
        if seed % 3:
            kinds += 3 * WORKER_FAULTS
        faults: list[Fault] = []
        if seed % 5 == 4:
            cut = _drawn_fault(draw, draw.uniform(0.2, 5.0), CUTS, hosts, stores)
            faults.append(replace(cut, for_s=draw.uniform(*LONG_S)))
        at_s = 0.0
        while (at_s := at_s + draw.uniform(0.2, 5.0 if seed % 2 else 10.0)) < duration_s:
            fault = _drawn_fault(draw, at_s, kinds, hosts, stores)
            if has_store or all(_remembers(one, fault, hosts[0]) for one in faults):
                faults.append(fault)
        workers_per_host = draw.choice((1, 2))
        nodes_min = draw.randint(1, most) if has_store else most
        late_s = draw.choice((0.0, draw.uniform(0.5, duration_s)))
        return cls(
            seed,
            recovery,
            backend,
            hosts,
            workers_per_host=workers_per_host,
            nodes_min=nodes_min,
            # The first world is of all hosts but a late one.
            late_s=late_s if nodes_min < len(hosts) else 0.0,
            faults=tuple(sorted(faults)),
            stores=stores,
        )


def _drawn_fault(
    draw: random.Random, at_s: float, kinds: tuple[str, ...], hosts: str, stores: str
) -> Fault:
    kind, host = draw.choice(kinds), draw.choice(hosts)
    other, number = draw.choice(hosts.replace(host, "")), draw.randrange(1 << 16)
    for_s = draw.uniform(*draw.choice(LASTS_S))
    if kind in ("kill-worker", "kill-zygote"):
        return Fault(at_s, 0.0, kind, host, draw=number)
    if kind == "part":
        return Fault(at_s, for_s, kind, host, other)
    if kind in DISK_FAULTS:
        return Fault(at_s, for_s, kind)
    if kind in STORE_FAULTS and kind != "store-part":
        return Fault(at_s, for_s, kind, stores[number % len(stores)])
    return Fault(at_s, for_s, kind, host, draw=number)


def _remembers(one: Fault, other: Fault, endpoint: str) -> bool:
    """Whether the endpoint's agent is not away while another fault keeps an agent from it."""
    ends = [fault for fault in (one, other) if fault.kind in DEATHS and fault.host == endpoint]
    apart = one.end_s + REMEMBERS_S < other.at_s or other.end_s + REMEMBERS_S < one.at_s
    is_of_hosts = all(fault.kind in HOST_FAULTS for fault in (one, other))
    return not ends or not is_of_hosts or apart
