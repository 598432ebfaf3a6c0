"""The time in which N nodes form a world, and form the next one after a node was replaced.

elastane: one coordinator process, N sessions of minimal agents in another. torchrun: N of its
DynamicRendezvousHandlers as threads of one process, over one C10d TCPStore. Neither side starts
workers: this is the cost of agreement alone. The threads share one interpreter lock, while
torchrun's agents would have their own processes. So compare the CPU seconds, and take torchrun's
wall time as an upper bound wherever its CPU seconds come near it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

NODES = (8, 32, 128, 512, 1024)
# The time for one size, connecting included.
CAP_S = 240.0
JOB = "joining"


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def raise_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))


def job_spec(nodes: int) -> Any:
    from elastane.protocol.model import JobSpec

    return JobSpec(job=JOB, min_nodes=nodes, max_nodes=nodes, max_restarts=100)


# The coordinator, in its own process: prints its port, then its CPU seconds on request.


async def coordinate(nodes: int) -> None:
    from elastane.coordinator import Coordinator
    from elastane.coordinator.rules import Rendezvous
    from elastane.process.rpc import Access
    from elastane.protocol.model import JobRecord
    from elastane.protocol.wire import derive_secret

    async def save(record: JobRecord) -> None:
        return None

    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    coordinator = Coordinator(
        Rendezvous(job_spec(nodes), time.monotonic()),
        listener,
        access=Access(JOB, derive_secret(JOB, None), None),
        save=save,
        tell=lambda note: None,
    )
    print(listener.getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: (os.read(0, 100), print(cpu_s(), flush=True)))
    await coordinator.run()


class FakeAgent:
    """An agent without workers: joins, accepts its assignment, stops on request."""

    def __init__(self, number: int, incarnation: int, port: int, nodes: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.port = port
        self.nodes = nodes
        self.fence: Any = None
        self.assigned: asyncio.Queue[int] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        from elastane.process import rpc
        from elastane.protocol.messages import Join
        from elastane.protocol.model import NodeSpec, PortOffer, Versions
        from elastane.protocol.wire import derive_secret

        secret = derive_secret(JOB, None)
        self.session = await rpc.connect("127.0.0.1", self.port, JOB, secret, None, 60.0)
        node = NodeSpec(
            node_id=f"node-{self.number}",
            incarnation=str(self.incarnation),
            local_world_size=8,
            versions=Versions(elastane="1", python="3"),
        )
        self.session.send(Join(spec=job_spec(self.nodes), node=node, offer=PortOffer(29_500, True)))
        self.tasks = [asyncio.create_task(self.listen()), asyncio.create_task(self.beat())]

    async def listen(self) -> None:
        from elastane.protocol.messages import Assign, Refused, Stop, Stopped
        from elastane.protocol.model import PortOffer

        while (message := await self.session.receive()) is not None:
            match message:
                case Assign(assignment=assignment):
                    self.fence = assignment.fence
                    self.assigned.put_nowait(assignment.fence.round)
                case Stop(fence=fence):
                    self.fence = None
                    self.session.send(Stopped(fence, PortOffer(29_501, True)))
                case Refused(what=what):
                    raise SystemExit(what)

    async def beat(self) -> None:
        from elastane.protocol.messages import Heartbeat

        while not self.session.closed:
            await asyncio.sleep(1.0)
            self.session.send(Heartbeat(fence=self.fence))

    def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.session.link.abort("killed")


async def measure_elastane(nodes: int) -> dict[str, float]:
    raise_descriptors()
    command = [sys.executable, "-m", "bench.joining", "--coordinate", str(nodes)]
    with subprocess.Popen(  # noqa: ASYNC220  before anything is measured
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        pipes = process.stdin, process.stdout

        def their_cpu_s() -> float:
            pipes[0].write("?\n")
            pipes[0].flush()
            return float(pipes[1].readline())

        try:
            port = int(pipes[1].readline())
            agents = [FakeAgent(number, 1, port, nodes) for number in range(nodes)]
            await agents[0].join()  # imports, on both sides, are no part of joining
            agents[0].leave()
            agents[0] = FakeAgent(0, 2, port, nodes)

            rounds: list[int] = []

            async def world() -> None:
                told = await asyncio.gather(*(agent.assigned.get() for agent in agents))
                assert len(set(told)) == 1, f"no one world: {set(told)}"
                assert told[0] not in rounds, f"round {told[0]} twice"
                rounds.append(told[0])

            async def first() -> None:
                await asyncio.gather(*(agent.join() for agent in agents))
                await world()

            async def again() -> None:
                agents[1].leave()
                agents[1] = FakeAgent(1, 2, port, nodes)
                await agents[1].join()
                await world()

            figures: dict[str, float] = {}
            for name, action in (("first", first), ("next", again)):
                began_s, ours_s, theirs_s = time.monotonic(), cpu_s(), their_cpu_s()
                await action()
                figures[f"{name}_s"] = time.monotonic() - began_s
                figures[f"{name}_nodes_cpu_s"] = cpu_s() - ours_s
                figures[f"{name}_coordinator_cpu_s"] = their_cpu_s() - theirs_s
            for agent in agents:
                agent.leave()
            return figures
        finally:
            process.kill()


def measure_torchrun(nodes: int) -> dict[str, float]:
    """Run all handlers in one process: CPU seconds are those of nodes and store together."""
    raise_descriptors()
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    threading.stack_size(1 << 20)
    handlers: list[Any] = []

    def connect(number: int) -> None:
        parameters = RendezvousParameters(
            "c10d",
            f"127.0.0.1:{port}",
            JOB,
            nodes,
            nodes,
            local_addr="127.0.0.1",
            is_host=number == 0,
            use_libuv=True,
        )
        backend, store = create_backend(parameters)
        handlers.append(create_handler(store, backend, parameters))

    # Not measured, and concurrent as with agents: in sequence it takes minutes for 512.
    connect(0)
    together(partial(connect, number) for number in range(1, nodes))
    figures: dict[str, float] = {}
    for name in ("first", "next"):
        began_s, ours_s = time.monotonic(), cpu_s()
        together(handler.next_rendezvous for handler in handlers)
        figures[f"{name}_s"] = time.monotonic() - began_s
        figures[f"{name}_cpu_s"] = cpu_s() - ours_s
        print(json.dumps(figures), flush=True)
    return figures


def together(actions: Iterable[Callable[[], object]]) -> None:
    """Run each in its own thread, and wait for all; any failure ends the measurement."""
    errors: list[BaseException] = []

    def act(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"{len(errors)} of {len(threads)} failed, the first: {errors[0]!r}")


def run_one(side: str, nodes: int, cap_s: float) -> dict[str, Any]:
    """Measure in a separate process; stages that ended before the cap still count."""
    command = [sys.executable, "-m", "bench.joining", "--measure", side, str(nodes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=cap_s, check=False)
        out, why = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        out = raw.decode() if isinstance(raw, bytes) else raw
        why = [f"not done in {cap_s:g} s"]
    lines = [line for line in out.splitlines() if line.startswith("{")]
    figures: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if why:
        figures["error"] = why[0]
    return figures


def cell(figures: dict[str, Any], name: str) -> str:
    seconds = figures.get(f"{name}_s")
    if seconds is None:
        return str(figures.get("error", "-"))
    cpu = figures.get(f"{name}_cpu_s")
    if cpu is None:
        coordinator = figures[f"{name}_coordinator_cpu_s"]
        return f"{seconds:.2f} s, CPU {coordinator:.2f} + {figures[f'{name}_nodes_cpu_s']:.2f} s"
    return f"{seconds:.2f} s, CPU {cpu:.2f} s"


def table(results: dict[str, dict[int, dict[str, Any]]], sizes: list[int]) -> str:
    lines = [
        "| nodes | elastane: first world (CPU: coordinator + nodes) | next world"
        " | torchrun c10d: first world | next world |",
        "|---|---|---|---|---|",
    ]
    for nodes in sizes:
        ours, theirs = results["elastane"][nodes], results["torchrun"].get(nodes, {})
        cells = [cell(side, name) for side in (ours, theirs) for name in ("first", "next")]
        lines.append(f"| {nodes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, nargs="*", default=list(NODES))
    parser.add_argument("--torchrun-max", type=int, default=512, help="largest N for torchrun")
    parser.add_argument("--cap-s", type=float, default=CAP_S)
    parser.add_argument("--coordinate", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.coordinate:
        asyncio.run(coordinate(options.coordinate))
        return
    if options.measure:
        side, nodes = options.measure[0], int(options.measure[1])
        ours = side == "elastane"
        print(json.dumps(asyncio.run(measure_elastane(nodes)) if ours else measure_torchrun(nodes)))
        sys.stdout.flush()
        os._exit(0)  # threads of torchrun's handlers would block it
    results: dict[str, dict[int, dict[str, Any]]] = {"elastane": {}, "torchrun": {}}
    for nodes in options.nodes:
        for side in ("elastane", "torchrun"):
            if side == "elastane" or nodes <= options.torchrun_max:
                results[side][nodes] = run_one(side, nodes, options.cap_s)
    print(table(results, options.nodes))
    target = Path(__file__).parent / "results" / "joining.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
