"""A thousand real agents without workers on one coordinator: they join, 100 die, 100 join.

Each agent is a `Membership` in a thread: the agent's own rules, connection and port. A process
holds about a hundred of them, because a thousand interpreters would measure this machine's memory.
The coordinator has its own process. torchrun has no row: 512 of its handlers do not form a world in
240 s (bench.joining).
"""

from __future__ import annotations

import argparse
import collections
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.agent_cost import cpu_seconds, resident_bytes
from bench.joining import raise_descriptors

JOB = "crowd"
GONE = 100
PROCESSES = 8
CAP_S = 240.0


def take_part(first: int, count: int, port: int, nodes: int) -> None:
    """Run `count` agents until killed; report each world that includes all of them."""
    from elastane.agent.membership import MemberConfig, Membership
    from elastane.process.endpoint import Endpoint
    from elastane.protocol.model import JobSpec

    raise_descriptors()
    threading.stack_size(256 << 10)
    spec = JobSpec(job=JOB, min_nodes=1, max_nodes=nodes, max_restarts=100)
    lock, placed = threading.Lock(), collections.Counter[tuple[int, int]]()

    def be(number: int) -> None:
        config = MemberConfig(
            spec=spec, endpoint=Endpoint("127.0.0.1", port), hosts=first == 0, local_world_size=8
        )
        membership = Membership(config, lambda: f"node-{number}")
        while True:
            place = membership.join()
            with lock:
                placed[place.assignment.fence.round, place.nodes] += 1
                if placed[place.assignment.fence.round, place.nodes] == count:
                    print(place.assignment.fence.round, place.nodes, flush=True)
            while not membership.wait_change(60.0):
                pass

    for number in range(first, first + count):
        threading.Thread(target=be, args=(number,), daemon=True).start()
    threading.Event().wait()


class Crowd:
    """Processes with many agents, and the worlds that they report."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.told = threading.Condition()
        self.worlds: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, first: int, count: int) -> int:
        """Start a process of agents; return its pid."""
        words = ("--members", str(first), str(count), str(self.port), str(self.nodes))
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.crowd", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.processes[process.pid] = process
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process.pid

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.told:
                number, nodes = map(int, line.split())
                self.worlds[process.pid].append((number, nodes))
                self.told.notify_all()

    def wait_world(self, nodes: int) -> int:
        """Wait until all processes are in one world of this many nodes; return its round."""

        def there() -> set[tuple[int, int]]:
            latest = [self.worlds[pid][-1] for pid in self.processes if self.worlds[pid]]
            same = set(latest) if len(latest) == len(self.processes) else set()
            return same if len(same) == 1 and next(iter(same))[1] == nodes else set()

        with self.told:
            if not self.told.wait_for(there, CAP_S):
                raise SystemExit(f"no world of {nodes} within {CAP_S:g} s: {dict(self.worlds)}")
            return next(iter(there()))[0]

    def kill(self, pid: int) -> None:
        """SIGKILL a process, and so all of its agents at once."""
        process = self.processes.pop(pid)
        process.kill()
        process.wait()

    def close(self) -> None:
        for pid in list(self.processes):
            self.kill(pid)


def measure(nodes: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the duration of each stage."""
    crowd, found = Crowd(nodes), []
    with ExitStack() as stack:
        stack.callback(crowd.close)
        coordinator = crowd.start(0, 1)
        crowd.wait_world(1)

        def stage(title: str, world: int, begun_s: float) -> None:
            before_s = cpu_seconds(coordinator) if not found else found[-1][1]["cpu_total_s"]
            number = crowd.wait_world(world)
            cpu_s = cpu_seconds(coordinator)
            found.append(
                (
                    title,
                    {
                        "round": number,
                        "wall_s": time.monotonic() - begun_s,
                        "cpu_s": cpu_s - (before_s if found else 0.0),
                        "cpu_total_s": cpu_s,
                        "rss_mib": resident_bytes(coordinator) / (1 << 20),
                        "descriptors": len(list(Path(f"/proc/{coordinator}/fd").iterdir())),
                        "load": os.getloadavg()[0],
                    },
                )
            )

        others = nodes - 1 - GONE
        sizes = [others // PROCESSES + (n < others % PROCESSES) for n in range(PROCESSES)]
        begun_s, first = time.monotonic(), 1
        for size in sizes:
            crowd.start(first, size)
            first += size
        leavers = crowd.start(first, GONE)
        stage(f"{nodes} agents join, their interpreters' start included", nodes, begun_s)
        begun_s = time.monotonic()
        crowd.kill(leavers)
        stage(f"{GONE} of them die at once", nodes - GONE, begun_s)
        begun_s = time.monotonic()
        crowd.start(first, GONE)
        stage(f"{GONE} come, their interpreter's start included", nodes, begun_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--members", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.members:
        take_part(*options.members)
        return
    raise_descriptors()
    print("| what | until all have a place | coordinator: CPU | memory | descriptors |")
    print("|---|---|---|---|---|")
    for title, one in measure(options.nodes):
        print(
            f"| {title} | {one['wall_s']:.2f} s | {one['cpu_s']:.2f} s | {one['rss_mib']:.0f} MiB "
            f"| {one['descriptors']} |"
        )


if __name__ == "__main__":
    main()
