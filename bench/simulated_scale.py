"""Whole agents and a coordinator at scale, in virtual time: seconds on one core, messages, bytes.

Each node has the agent's rules, workers that train, and a session with heartbeats; the store has a
lease and a record. The job forms, loses a hundredth of its nodes at once, forms again, and accepts
a twentieth. Bytes are those of the frames' payloads. Run: python bench/simulated_scale.py
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass

import msgspec

from elastane.protocol.limits import Timing
from elastane.protocol.messages import Alive, Heartbeat, ToAgent, ToCoordinator
from elastane.protocol.model import JobSpec
from simulation.cluster import SimulatedCluster
from simulation.network import SimulatedSession
from simulation.workers import Script

SIZES = (100, 1_000, 10_000)
TIMING = Timing(last_call_s=1.0)
SCRIPT = Script(
    steps=1_000_000, step_s=60.0, checkpoint_every=1, asks=False, leaves_on_sigterm=False, trap_s=0
)


@dataclass
class ScaleRow:
    """The cost of one change of the membership."""

    nodes: int
    stage: str
    seconds: float
    virtual_s: float
    messages: float
    bytes: float
    bytes_max: int


class Counted(SimulatedCluster):
    """A cluster that counts the sent messages, heartbeats separately."""

    def __init__(self, nodes: int) -> None:
        spec = JobSpec(
            job="scale", min_nodes=nodes // 2, max_nodes=nodes, max_restarts=3, timing=TIMING
        )
        super().__init__(spec, SCRIPT, random.Random(1), store_backed=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self.messages = self.bytes = self.largest = 0

    def send_up(self, session: SimulatedSession, message: ToCoordinator) -> None:
        self._count(message)
        super().send_up(session, message)

    def send_down(self, session: SimulatedSession, message: ToAgent) -> None:
        self._count(message)
        super().send_down(session, message)

    def _count(self, message: ToCoordinator | ToAgent) -> None:
        if not isinstance(message, Heartbeat | Alive):
            size = len(self._encode(message))
            self.messages += 1
            self.bytes += size
            self.largest = max(self.largest, size)

    def members(self) -> int:
        record = self.store.filed.record
        return len(record.world.members) if record and record.world else 0

    def run_until(self, members: int, limit_s: float = 60.0) -> None:
        """Let time pass until a world of `members` nodes trains."""
        end_s = self.clock.now_s + limit_s
        while not self._computes(members):
            assert self.clock.now_s < end_s, (members, self.members())
            self.clock.run_until(self.clock.now_s + 0.05)

    def _computes(self, members: int) -> bool:
        if self.members() != members:
            return False
        groups = [node.group for node in self.nodes.values() if node.alive and node.group]
        return len(groups) == members and all(group.computes for group in groups)


def measure(nodes: int) -> list[ScaleRow]:
    """Return a row for each change of the membership of a job of up to `nodes` nodes."""
    cluster, rows = Counted(nodes), list[ScaleRow]()
    lost, arriving = max(1, nodes // 100), nodes // 20
    here = nodes - arriving

    def change(stage: str, members: int) -> None:
        cluster.messages = cluster.bytes = cluster.largest = 0
        began_s, virtual_s = time.perf_counter(), cluster.clock.now_s
        cluster.run_until(members)
        rows.append(
            ScaleRow(
                nodes,
                stage,
                time.perf_counter() - began_s,
                cluster.clock.now_s - virtual_s,
                cluster.messages / members,
                cluster.bytes / members,
                cluster.largest,
            )
        )

    def boot(count: int) -> None:
        for _ in range(count):
            node = cluster.add(8)
            cluster.clock.after(cluster.rng.random(), lambda n=node: cluster.boot(n))  # type: ignore[misc]

    boot(here)
    change("form", here)
    victims = [name for name in [*cluster.nodes][1:] if name not in cluster.coordinators][:lost]
    for name in victims:
        cluster.crash(name, "killed")
    change(f"lose {lost}", here - lost)
    boot(arriving)
    change(f"add {arriving}", here - lost + arriving)
    return rows


def main() -> None:
    """Print a table."""
    head = f"{'nodes':>6}  {'change':<12}{'core s':>8}{'virtual s':>10}{'messages':>10}{'bytes':>8}"
    sys.stdout.write(f"{head}{'largest':>9}\n")
    for nodes in map(int, sys.argv[1:] or SIZES):
        rows = measure(nodes)
        for row in rows:
            sys.stdout.write(
                f"{nodes:>6}  {row.stage:<12}{row.seconds:>8.2f}{row.virtual_s:>10.2f}"
                f"{row.messages:>10.2f}{row.bytes:>8.0f}{row.bytes_max:>9}\n"
            )
        sys.stdout.write(f"{nodes:>6}  {'all':<12}{sum(row.seconds for row in rows):>8.2f}\n")
    sys.stdout.write("messages and bytes: of each node of the new world, heartbeats apart\n")


if __name__ == "__main__":
    main()
