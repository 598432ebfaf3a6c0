"""The scale of the coordinator's rules: seconds on one core, messages and bytes for each node.

One state machine without shell or network. Nodes join and the job forms; a hundredth is lost at
once and the next world forms; a twentieth joins. Then a new coordinator recovers all of them. Run:
python bench/core_scale.py
"""

from __future__ import annotations

import sys
import time

import msgspec

from elastane.coordinator.rules import Rendezvous, Takeover
from elastane.protocol.effects import Persist, Send
from elastane.protocol.events import Broken, Received, RendezvousEvent, Tick
from elastane.protocol.limits import Timing
from elastane.protocol.messages import (
    Assign,
    Drain,
    Drained,
    DrainTarget,
    Heartbeat,
    Holding,
    Join,
    Marked,
    Stop,
    Stopped,
    ToAgent,
    ToCoordinator,
)
from elastane.protocol.model import Assignment, JobRecord, JobSpec, NodeSpec, PortOffer, Versions

# Shorter than a silence, because these agents send no heartbeats while time passes.
TIMING = Timing(last_call_s=1.0)
SIZES = (100, 1_000, 10_000)
VERSIONS = Versions(elastane="0.1.0", python="3.11", torch="2.13.0")


class Fleet:
    """Agents that answer at once, and a count of the bytes on the wire."""

    def __init__(self, nodes: int) -> None:
        self.spec = JobSpec(
            job="scale", min_nodes=nodes // 2, max_nodes=nodes, max_restarts=3, timing=TIMING
        )
        self.now_s = 0.0
        self.machine = Rendezvous(self.spec, 0.0, Takeover(store_backed=True))
        self.held: dict[int, Assignment] = {}
        self.record: JobRecord | None = None
        self.encode = msgspec.msgpack.Encoder().encode
        self.messages = 0
        self.bytes = 0

    def join(self, number: int, holding: Holding | None = None) -> None:
        node = NodeSpec(
            node_id=f"node-{number:05d}",
            incarnation=f"{number:032x}",
            local_world_size=8,
            versions=VERSIONS,
        )
        self.says(
            number, Join(spec=self.spec, node=node, offer=PortOffer(40_000, True), holding=holding)
        )

    def says(self, number: int, message: ToCoordinator) -> None:
        self.messages += 1
        self.bytes += len(self.encode(message))
        host = f"10.0.{number // 250}.{number % 250}"
        self.feed(Received(session=number, message=message, peer_host=host, local_host="10.1.0.1"))

    def feed(self, event: RendezvousEvent) -> None:
        answers: list[tuple[int, ToCoordinator]] = []
        for effect in self.machine.handle(event, self.now_s):
            if isinstance(effect, Send):
                self.messages += 1
                self.bytes += len(self.encode(effect.message))
                answers += [(effect.session, a) for a in self.answer(effect)]
            elif isinstance(effect, Persist):
                self.record = effect.record
        for number, answer in answers:
            self.says(number, answer)

    def answer(self, effect: Send) -> list[ToCoordinator]:
        message: ToAgent = effect.message
        match message:
            case Assign(assignment=assignment):
                self.held[effect.session] = assignment
            case Stop(fence=fence):
                self.held.pop(effect.session, None)
                return [Stopped(fence, PortOffer(40_001, True))]
            case Drain(fence=fence):
                return [Marked(fence=fence, calls=None)]
            case DrainTarget(fence=fence):
                return [Drained(fence)]
        return []

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    def members(self) -> int:
        assert self.record is not None and self.record.world is not None
        return len(self.record.world.members)


class Stages:
    """The stages of one job of `nodes` nodes; each returns the size of its world."""

    def __init__(self, nodes: int) -> None:
        self.fleet, self.nodes = Fleet(nodes), nodes
        self.lost, self.arriving = max(1, nodes // 100), nodes // 20

    def form(self) -> int:
        for number in range(self.nodes - self.arriving):
            self.fleet.join(number)
        self.fleet.passes(TIMING.last_call_s)
        return self.nodes - self.arriving

    def lose(self) -> int:
        for number in range(self.lost):
            self.fleet.held.pop(number, None)
            self.fleet.feed(Broken(number, "EOF"))
        self.fleet.passes(0.11)
        return self.nodes - self.arriving - self.lost

    def beat(self) -> int:
        for number in range(self.lost, self.nodes - self.arriving):
            self.fleet.says(number, Heartbeat())
        return self.nodes - self.arriving - self.lost

    def arrive(self) -> int:
        for number in range(self.nodes, self.nodes + self.arriving):
            self.fleet.join(number)
        self.fleet.passes(TIMING.gather_s)
        return self.nodes - self.lost

    def recover(self) -> int:
        fleet = self.fleet
        held, fleet.held = fleet.held, {}
        fleet.machine = Rendezvous(
            fleet.spec, fleet.now_s, Takeover(fleet.record, store_backed=True)
        )
        for number, assignment in held.items():
            fleet.join(number, Holding(assignment=assignment, state="running"))
        assert not fleet.held and fleet.machine.phase.value == "running"
        return self.nodes - self.lost


def measure(nodes: int) -> list[tuple[str, float, float, float]]:
    """Return for each stage: its name, seconds, messages and bytes per node."""
    stages = Stages(nodes)
    rows: list[tuple[str, float, float, float]] = []
    for name, act in (
        ("form", stages.form),
        (f"lose {stages.lost}, form again", stages.lose),
        ("one heartbeat each", stages.beat),
        (f"add {stages.arriving}", stages.arrive),
        ("new coordinator", stages.recover),
    ):
        fleet = stages.fleet
        fleet.messages = fleet.bytes = 0
        began_s = time.perf_counter()
        members = act()
        took_s = time.perf_counter() - began_s
        assert fleet.members() == members, (name, fleet.members(), members)
        rows.append((name, took_s, fleet.messages / nodes, fleet.bytes / nodes))
    return rows


def main() -> None:
    """Print a table."""
    sys.stdout.write(f"{'nodes':>6}  {'stage':<24}{'seconds':>9}{'messages':>10}{'bytes':>8}\n")
    for nodes in SIZES:
        rows = measure(nodes)
        for name, took_s, messages, size in rows:
            sys.stdout.write(f"{nodes:>6}  {name:<24}{took_s:>9.3f}{messages:>10.2f}{size:>8.0f}\n")
        sys.stdout.write(f"{nodes:>6}  {'all':<24}{sum(row[1] for row in rows):>9.3f}\n")
    sys.stdout.write("messages and bytes are per node of the job, both directions together\n")


if __name__ == "__main__":
    main()
