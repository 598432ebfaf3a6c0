"""Jobs and etcds on hosts, and checks that every job must pass after any fault of its hosts."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etcd_server import ETCD, need_etcd
from hosts import MAIN, PYTHON, HostProcess, Lan, need_hosts
from jobs import LONE, Agent, Job, Step, newest, until
from redis_server import REDIS

from elastane.protocol.log_events import EventKind


@dataclass
class HostJob(Job):
    """A job whose agents are on hosts. All hosts share one clock and one order of steps."""

    lan: Lan = None  # type: ignore[assignment]

    def at(self, name: str, family: int = 4) -> Self:
        """Set the endpoint to a host's address."""
        address = self.lan.address(name, MAIN, family)
        self.endpoint = f"{address if family == 4 else f'[{address}]'}:{self.port}"
        return self

    def start(
        self,
        node: str,
        *options: str,
        env: dict[str, str] | None = None,
        nproc: int = 1,
        host: str = "",
    ) -> Agent:
        """Start an agent on the host of its name, or on `host`."""
        path = self.folder / f"{node}.{len(self.agents)}.log"
        process = self.lan[host or node].start(
            self.command(node, nproc, options), self.environment(env or {}), path
        )
        self.agents.append(Agent(node, process, path))  # type: ignore[arg-type]
        return self.agents[-1]

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        return super().environment({**kept, **more})

    def start_coordinator(self, host: str = "l") -> Agent:
        """Start a process on `host` that holds the coordinator and is no member."""
        words = self.command("lone", 1, ("--local-addr", self.lan.address(host)))
        words = [sys.executable, str(LONE), *words[words.index("run") + 1 :]]
        path = self.folder / "lone.log"
        process = self.lan[host].start(words, self.environment({}), path)
        self.agents.append(Agent("lone", process, path))  # type: ignore[arg-type]
        return self.agents[-1]

    def check_order(self, seen: list[Step]) -> None:
        """Check that no world makes a step after a later world has made one."""
        late = late_steps(seen)
        assert not late, f"these are of an older world than a step before them: {late}"

    def start_all(self, names: str, *options: str) -> None:
        for name in names:
            self.start(name, *options)

    def coordinator(self) -> Agent:
        """Return the newest agent of the node where the coordinator started last."""
        host = self.events(EventKind.COORDINATOR_STARTED)[-1].host
        return next(a for a in reversed(self.agents) if a.process.host.name == host)  # type: ignore[attr-defined]


def late_steps(seen: list[Step]) -> list[Step]:
    """Return the steps that their worlds made after a later world had made one.

    The lines of the file are in the order in which the steps were made. A member that could not
    hear the others may finish one step late, which they had made before: TCP delivers their part of
    it once the network is healed, even after their processes have ended.
    """
    late: list[Step] = []
    last, made, excused = (0, 0), set(), set()
    for s in seen:
        member, step = (_fence(s), s.rank), (_fence(s), s.step)
        if _fence(s) < last:
            if step not in made or member in excused:
                late.append(s)
            excused.add(member)
        last = max(last, _fence(s))
        made.add(step)
    return late


def _fence(step: Step) -> tuple[int, int]:
    return step.round, step.attempt


def wait_world(job: Job, nodes: str, fence: tuple[int, int] | None = None) -> Step:
    """Wait until the newest world is of these nodes, each of which does steps in it."""

    def is_there(seen: list[Step]) -> bool:
        last = newest(seen)
        counts = {node: sum(s.node == node for s in last) for node in nodes}
        return (
            bool(last)
            and {s.node for s in last} == set(nodes)
            and last[0].world == len(nodes)
            and (last[0].round, last[0].attempt) != fence
            and min(counts.values()) >= 3
        )

    return newest(job.wait(f"{nodes} train together after {fence}", is_there))[0]


def judge(job: HostJob) -> None:
    """Check every history: one world at a time, and one membership per round."""
    seen = job.seen()
    job.check_order(seen)
    places: dict[tuple[int, int, int], tuple[str, int]] = {}
    for s in seen:
        place = places.setdefault((s.round, s.attempt, s.rank), (s.node, s.pid))
        assert place == (s.node, s.pid), f"two have rank {s.rank} of ({s.round}, {s.attempt})"
    settled: dict[int, set[str]] = {}
    for event in job.events(EventKind.ROUND_SETTLED):
        assert event.round is not None
        settled.setdefault(event.round, set()).add(str(event.data["members"]))
    assert all(len(members) == 1 for members in settled.values()), settled
    assert {s.round for s in seen} <= set(settled), "the event log tells of each round"


def let_pass(duration_s: float) -> None:
    """Wait while the tested fault lasts."""
    end_s = time.monotonic() + duration_s
    until(lambda: time.monotonic() >= end_s, "time passes", duration_s + 10)


class StoreHosts:
    """A store with a process on each of several hosts."""

    def __init__(self, lan: Lan, names: str, folder: Path) -> None:
        self.lan, self.names, self.folder = lan, names, folder
        self.processes: dict[str, HostProcess] = {}

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Return what agents are given as the endpoint."""

    @abstractmethod
    def launch(self, name: str) -> None:
        """Start the process of a host, on its data."""


class EtcdHosts(StoreHosts):
    """An etcd with a member on each of several hosts; clients use port 2379."""

    @property
    def endpoint(self) -> str:
        return ",".join(f"{self.lan.address(name)}:2379" for name in self.names)

    def start(self, *names: str) -> Self:
        for name in names or self.names:
            self.launch(name)
        until(lambda: all(self.status(n) for n in names or self.names), "etcd is ready", 90)
        return self

    def launch(self, name: str) -> None:
        """Start a member, which answers no client before a majority runs."""
        here = f"http://{self.lan.address(name)}"
        cluster = ",".join(f"{n}=http://{self.lan.address(n)}:2380" for n in self.names)
        self.folder.mkdir(exist_ok=True)
        argv = [
            str(ETCD), "--name", name, "--data-dir", str(self.folder / name),
            "--listen-client-urls", f"{here}:2379", "--advertise-client-urls", f"{here}:2379",
            "--listen-peer-urls", f"{here}:2380", "--initial-advertise-peer-urls", f"{here}:2380",
            "--initial-cluster", cluster, "--logger", "zap",
            "--unsafe-no-fsync",
        ]  # fmt: skip
        if "--unsafe-no-fsync" not in _etcd_help():
            argv.remove("--unsafe-no-fsync")
        env = {"PATH": os.environ.get("PATH", "")}
        self.processes[name] = self.lan[name].start(argv, env, self.folder / f"{name}.log")

    def status(self, name: str) -> dict:
        """Return a member's status, queried on its own host; empty without an answer."""
        ask = (
            "import urllib.request as u, sys; print(u.urlopen(u.Request("
            "sys.argv[1], b'{}', method='POST'), timeout=2).read().decode())"
        )
        url = f"http://{self.lan.address(name)}:2379/v3/maintenance/status"
        if name not in self.lan.hosts:
            return {}
        try:
            return json.loads(self.lan[name].run(*PYTHON, "-c", ask, url))
        except OSError:
            return {}

    def leader(self) -> str:
        for name in self.names:
            status = self.status(name)
            if status and status.get("leader") == status["header"]["member_id"]:
                return name
        raise AssertionError("no leader")


class RedisHosts(StoreHosts):
    """A durable Redis on one host."""

    @property
    def endpoint(self) -> str:
        return f"{self.lan.address(self.names)}:6379"

    def start(self) -> Self:
        self.launch(self.names)
        until(self._answers, "redis is ready", 90)
        return self

    def launch(self, name: str) -> None:
        self.folder.mkdir(exist_ok=True)
        argv = [
            str(REDIS), "--bind", self.lan.address(name), "--port", "6379",
            "--protected-mode", "no", "--dir", str(self.folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        env = {"PATH": os.environ.get("PATH", "")}
        self.processes[name] = self.lan[name].start(argv, env, self.folder / f"{name}.log")

    def _answers(self) -> bool:
        ask = "import socket, sys; socket.create_connection((sys.argv[1], 6379), 2)"
        with suppress(OSError):
            self.lan[self.names].run(*PYTHON, "-c", ask, self.lan.address(self.names))
            return True
        return False


@functools.cache
def _etcd_help() -> str:
    done = subprocess.run([str(ETCD), "--help"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@contextmanager
def job_on(
    folder: Path, names: str, *, backend: str = "elastane", nnodes: str = "2:3", **more: object
) -> Iterator[HostJob]:
    """A job on hosts of these names, whose store is at host `s` (etcd) or a folder (file).

    By default the endpoint is at host `a`. No agent is started.
    """
    need_hosts()
    with Lan(names + ("s" if backend == "etcd" else "")) as lan:
        job = HostJob(folder, nnodes, backend=backend, lan=lan, **more)  # type: ignore[arg-type]
        job.at("a")
        if backend == "etcd":
            need_etcd()
            job.endpoint = EtcdHosts(lan, "s", folder / "etcd").start().endpoint
        elif backend == "file":
            job.endpoint = str(folder / "store")
        folder.mkdir(exist_ok=True, parents=True)
        with job:
            yield job
            judge(job)
