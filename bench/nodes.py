"""Whole nodes come and go: killed, cut off, drained, joining; also the host of the rendezvous."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from bench.harness import (
    CAP_S,
    START_CAP_S,
    BenchError,
    BenchJob,
    Launcher,
    Node,
    Sample,
    kill,
    recovery_after,
    tree_of,
    wait_until,
)
from bench.network import BenchNetwork
from bench.recovery import node_flags

WORKERS = 1  # of each node: two cores carry two workers
SETTLE_S = 10.0  # an agent that lives this long after its coordinator's death has survived it


def start_pair(job: BenchJob, nnodes: str = "1:2") -> tuple[Node, Node]:
    """Start two nodes, the first of which hosts the rendezvous, and wait until both train."""
    pair = Node("a", "127.0.0.1"), Node("b", "127.0.0.2")
    for node in pair:
        job.start(node, node_flags(job, node, nnodes, WORKERS))
        # The first agent must own the endpoint before the second starts.
        job.wait_for(lambda: listening(job.port), "rendezvous at the endpoint", START_CAP_S)
    job.wait_training(2 * WORKERS)
    return pair


def listening(port: int) -> bool:
    """Return whether a socket of this machine listens at a port, without connecting to it."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            rows = [row.split() for row in file.readlines()[1:]]
        if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):
            return True
    return False


def node_killed(launcher: Launcher) -> Sample:
    """SIGKILL the agent and all workers of the node that does not host the rendezvous."""
    with BenchJob(launcher) as job:
        _, b = start_pair(job)
        pids = tree_of(b.pid)
        at = time.monotonic()
        kill(pids)
        return recovery_after(job, at, node="a", cap_s=CAP_S)


def agent_killed(launcher: Launcher) -> Sample:
    """SIGKILL the agent alone; measure how long its workers outlive it."""
    with BenchJob(launcher) as job:
        _, b = start_pair(job)
        worker = job.pid_of("b", 1)
        at = time.monotonic()
        kill([b.pid])
        if not wait_until(lambda: not is_running(worker), SETTLE_S):
            return Sample(None, note=f"its worker still runs after {SETTLE_S:g} s")
        return Sample(time.monotonic() - at)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def node_drained(launcher: Launcher, mode: str = "sigterm") -> Sample:
    """SIGTERM the agent of the node that does not host the rendezvous."""
    with BenchJob(launcher, mode=mode) as job:
        _, b = start_pair(job)
        at = time.monotonic()
        kill([b.pid], signal.SIGTERM)
        return recovery_after(job, at, node="a", cap_s=CAP_S)


def node_arrives(launcher: Launcher, newcomer: str = "127.0.0.2", mode: str = "sigterm") -> Sample:
    """A second node joins; measure the gap in the first one's steps, until a common step."""
    with BenchJob(launcher, mode=mode) as job:
        incumbent = "127.0.0.2" if newcomer == "127.0.0.1" else "127.0.0.1"
        a, b = Node("a", incumbent), Node("b", newcomer)
        job.start(a, node_flags(job, a, "1:2", WORKERS))
        job.wait_training(WORKERS)
        job.start(b, node_flags(job, b, "1:2", WORKERS))
        done = recovery_after(job, time.monotonic(), node="a", world_size=2 * WORKERS, cap_s=CAP_S)
        if done.seconds is None:
            return done
        new = next(line for line in job.steps("a") if line.world_size == 2 * WORKERS)
        last = max(line.at for line in job.steps("a") if line.pid != new.pid)
        return replace(done, seconds=new.at - last)


def start_on(network: BenchNetwork, job: BenchJob, name: str) -> Node:
    """Start a node in its namespace; the rendezvous is at the address of node a."""
    node = Node(name, network.addresses[name], network.prefix(name))
    flags = node_flags(job, node, "1:2", WORKERS, f"{network.addresses['a']}:{job.port}")
    if not job.launcher.is_elastane:
        # It looks for itself among its host name's addresses, which a namespace lacks.
        flags += ["--rdzv-conf", f"is_host={'1' if name == 'a' else '0'}"]
    job.start(node, flags, {"GLOO_SOCKET_IFNAME": network.interface})
    return node


def host_killed(launcher: Launcher) -> Sample:
    """SIGKILL the host of the rendezvous, with the default store; it returns after a while."""
    with BenchNetwork(("a", "b")) as network, BenchJob(launcher) as job:
        a, b = (start_on(network, job, name) for name in network.addresses)
        job.wait_training(2 * WORKERS)
        at = time.monotonic()
        kill(tree_of(a.pid))
        if wait_until(lambda: not b.alive, SETTLE_S):
            return Sample(None, note=f"the other agent is gone after {time.monotonic() - at:.1f} s")
        at = time.monotonic()
        start_on(network, job, "a")
        done = recovery_after(job, at, node="b", cap_s=CAP_S)
        return replace(done, note=f"alive after {SETTLE_S:g} s; time from the return of the host")


def host_killed_file_store(launcher: Launcher) -> Sample:
    """SIGKILL the node that coordinates, with the file store; the other one continues."""
    with BenchJob(launcher) as job:
        folder = job.folder / "store"
        folder.mkdir()
        nodes = Node("a"), Node("b", "127.0.0.2")
        for node in nodes:
            flags = node_flags(job, node, "1:2", WORKERS, endpoint=str(folder))
            flags[flags.index("c10d")] = "file"
            job.start(node, flags)
            job.wait_for(lambda: any(folder.rglob("*")), "entry in the store", START_CAP_S)
        job.wait_training(2 * WORKERS)
        at = time.monotonic()
        kill(tree_of(nodes[0].pid))
        return recovery_after(job, at, node="b", cap_s=CAP_S)


def network_cut(launcher: Launcher) -> Sample:
    """Two nodes in network namespaces; every packet between them is lost from one moment on."""
    with BenchNetwork(("a", "b")) as network, BenchJob(launcher) as job:
        for name in network.addresses:
            start_on(network, job, name)
        job.wait_training(2 * WORKERS)
        at = time.monotonic()
        network.cut("b")
        sample = recovery_after(job, at, node="a", cap_s=CAP_S)
        if any(line.at > at + 1.0 for line in job.steps("b")):
            raise BenchError(f"{launcher.name}: both sides of the cut trained\n{job.tail()}")
        return sample
