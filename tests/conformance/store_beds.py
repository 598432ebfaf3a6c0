"""Real servers of each kind of store, with faults of the servers and of their connections.

A bed has the specification of each client and starts a fault by its name. `begin` returns the
function that ends it. Each client has relays of its own, so that one connection can be cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, EtcdMember, need_etcd
from kube_bed import ControlPlane, need_control_plane
from redis_server import RedisServer, need_redis
from relay import Mode, Relay, Relays
from timed_faults import End

SMALL_BYTES = 4 << 20
# etcd allocates 128 MiB for its log at its start.
SMALL_ETCD_BYTES = 160 << 20
_LINKS = {"cut": Mode.CUT, "stall": Mode.STALL, "deaf": Mode.DEAF}


def _nothing() -> None:
    """End a fault that changed nothing."""


class Bed:
    """A store without a server. Only its clients can have faults."""

    faults: tuple[str, ...] = ()
    # The factor by which faults and runs of this bed are longer than the shortest.
    pace = 1.0

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def specification(self, client: int) -> str:
        raise NotImplementedError

    def direct(self) -> str:
        """Return the specification of a client without a relay."""
        return self.specification(0)

    def begin(self, fault: str, draw: random.Random) -> End:
        raise NotImplementedError

    def story(self) -> str:
        """Return the last lines of the servers' logs."""
        return ""


class FileBed(Bed):
    def __init__(self, clients: int, folder: Path) -> None:
        super().__init__(clients)
        self.folder = folder

    def specification(self, client: int) -> str:
        return f"file:{self.folder}"


class RegisterBed(FileBed):
    def specification(self, client: int) -> str:
        return f"register:{self.folder / 'register'}"


class SmallDiskBed(FileBed):
    faults = ("full-disk",)

    def begin(self, fault: str, draw: random.Random) -> End:
        return fill(self.folder)


class LinkedBed(Bed):
    """A store whose clients have a relay in front of each server."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.relays: list[list[Relay]] = []

    def link(self, relays: Relays, ports: list[int]) -> None:
        self.relays = [
            [relays.open(("127.0.0.1", port)) for port in ports] for _ in range(self.clients)
        ]

    def begin_at_link(self, fault: str, draw: random.Random) -> End:
        """Start a fault on all links of one client, on all links to one server, or on one link."""
        client = draw.randrange(len(self.relays))
        server = draw.randrange(len(self.relays[0]))
        hit = draw.choice(
            [
                self.relays[client],
                [each[server] for each in self.relays],
                [self.relays[client][server]],
            ]
        )
        for relay in hit:
            relay.set(_LINKS[fault])

        def end() -> None:
            for relay in hit:
                relay.set(Mode.OPEN)

        return end


class EtcdBed(LinkedBed):
    faults = (
        *("kill-leader", "stop-leader", "end-leader", "kill-member", "stop-member", "end-member"),
        *_LINKS,
    )

    def __init__(self, clients: int, cluster: EtcdCluster, kind: str) -> None:
        super().__init__(clients)
        self.cluster, self.kind = cluster, kind

    def specification(self, client: int) -> str:
        urls = ",".join(f"http://127.0.0.1:{relay.port}" for relay in self.relays[client])
        return f"{self.kind}:{urls}#run"

    def direct(self) -> str:
        return f"{self.kind}:{self.cluster.endpoint}#run"

    def begin(self, fault: str, draw: random.Random) -> End:
        if fault in _LINKS:
            return self.begin_at_link(fault, draw)
        if fault == "full-disk":
            return self._fill(self.cluster.members[0])
        what, _, which = fault.partition("-")
        member = draw.choice(self.cluster.members)
        if which == "leader":
            member = self.leader() or member
        return self._harm(what, member)

    def _harm(self, what: str, member: EtcdMember) -> End:
        process = member.process
        assert process is not None
        if process.poll() is not None:
            return _nothing
        if what == "stop":
            member.send(signal.SIGSTOP)
            return lambda: self._continue(member)
        if what == "kill":
            member.kill()
        else:
            member.send(signal.SIGCONT)
            member.send(signal.SIGTERM)
        return lambda: self._restart(member)

    def _continue(self, member: EtcdMember) -> None:
        with contextlib.suppress(ProcessLookupError):
            member.send(signal.SIGCONT)

    def _restart(self, member: EtcdMember) -> None:
        assert member.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(1.0)
        member.kill()
        member.start(self.cluster.cluster)

    def _fill(self, member: EtcdMember) -> End:
        freed = fill(member.data.parent)

        def end() -> None:
            freed()
            assert member.process is not None
            if member.process.poll() is not None:  # as it ends on a full disk
                member.start(self.cluster.cluster)

        return end

    def leader(self) -> EtcdMember | None:
        """Return the member that reports itself as the leader, or None."""
        for member in self.cluster.members:
            request = urllib.request.Request(f"{member.url}/v3/maintenance/status", b"{}")
            with (
                contextlib.suppress(OSError, ValueError, KeyError),
                urllib.request.urlopen(request, timeout=0.2) as answer,
            ):
                status = json.loads(answer.read())
                if status["leader"] == status["header"]["member_id"]:
                    return member
        return None

    def story(self) -> str:
        logs = [(member.folder / "log").read_text()[-1000:] for member in self.cluster.members]
        return "\n".join(logs)


class RedisBed(LinkedBed):
    faults = ("kill-server", "stop-server", "end-server", *_LINKS)

    def __init__(self, clients: int, server: RedisServer) -> None:
        super().__init__(clients)
        self.server = server
        self.is_full = False

    def specification(self, client: int) -> str:
        return f"redis:127.0.0.1:{self.relays[client][0].port}#run"

    def direct(self) -> str:
        return f"redis:{self.server.endpoint}#run"

    def begin(self, fault: str, draw: random.Random) -> End:
        if fault in _LINKS:
            return self.begin_at_link(fault, draw)
        if fault == "full-disk":
            return self._fill()
        process = self.server.process
        if process is None or process.poll() is not None:
            return _nothing
        if fault == "stop-server":
            self.server.send(signal.SIGSTOP)
            return self._continue
        if fault == "end-server":
            self.server.send(signal.SIGCONT)
            self.server.send(signal.SIGTERM)
        else:
            self.server.kill()
        return self._start

    def _continue(self) -> None:
        if self.server.process is not None:
            self.server.send(signal.SIGCONT)

    def _start(self) -> None:
        if not self.is_full:
            self.server.kill()
            self.server.start()

    def _fill(self) -> End:
        self.is_full, freed = True, fill(self.server.folder)

        def end() -> None:
            freed()
            self.is_full = False
            process = self.server.process
            if process is None or process.poll() is not None:  # as it ends on a full disk
                self._start()

        return end

    def story(self) -> str:
        return (self.server.folder / "log").read_text()[-3000:]


class KubernetesBed(LinkedBed):
    faults = (
        *("kill-kube-apiserver", "stop-kube-apiserver", "kill-etcd", "stop-etcd"),
        *_LINKS,
    )
    pace = 4.0

    def __init__(self, clients: int, plane: ControlPlane, folder: Path) -> None:
        super().__init__(clients)
        self.plane = plane
        self.folder = folder
        self.namespace = plane.namespace()

    def specification(self, client: int) -> str:
        path = self.folder / f"client-{client}.kubeconfig"
        text = self.plane.admin.read_text()
        path.write_text(text.replace(f":{self.plane.port}", f":{self.relays[client][0].port}"))
        return f"kubernetes:{path}#{self.namespace}"

    def direct(self) -> str:
        return f"kubernetes:{self.plane.admin}#{self.namespace}"

    def begin(self, fault: str, draw: random.Random) -> End:
        if fault in _LINKS:
            return self.begin_at_link(fault, draw)
        what, _, name = fault.partition("-")
        if not self.plane[name].is_alive:
            return _nothing
        if what == "stop":
            self.plane.pause(name)
            return lambda: self.plane.resume(name)
        self.plane[name].kill()
        return lambda: self._start(name)

    def _start(self, name: str) -> None:
        if self.plane[name].is_alive:
            return
        if name == "kube-apiserver":  # The API server is not ready without etcd.
            if self.plane["etcd"].is_alive:
                self.plane.resume("etcd")
            else:
                self.plane.start_part("etcd")
        self.plane.start_part(name)

    def story(self) -> str:
        return self.plane.report()


def fill(folder: Path) -> End:
    """Fill the file system of a folder; return the function that frees it."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        piece = bytes(4096)
        while file.write(piece):
            pass
    return lambda: ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int = SMALL_BYTES) -> Iterator[Path]:
    """Mount a small file system; skip the test if none can be mounted."""
    path = folder / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    if os.getuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    path.chmod(0o700)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def file_bed(folder: Path, clients: int) -> Iterator[Bed]:
    yield FileBed(clients, folder / "store")


@contextlib.contextmanager
def register_bed(folder: Path, clients: int) -> Iterator[Bed]:
    yield RegisterBed(clients, folder)


@contextlib.contextmanager
def small_disk_bed(folder: Path, clients: int) -> Iterator[Bed]:
    with small_disk(folder) as path:
        yield SmallDiskBed(clients, path)


@contextlib.contextmanager
def etcd_bed(
    folder: Path, clients: int, kind: str = "etcd", members: int = 3, *, start: bool = True
) -> Iterator[EtcdBed]:
    need_etcd()
    # A follower starts an election after 0.2 s, not after a second.
    extra = ["--heartbeat-interval", "20", "--election-timeout", "200"]
    if kind == "etcd-v2":
        extra.append("--enable-v2")
    cluster = EtcdCluster(folder, members, extra)
    with Relays() as relays:
        try:
            if start:
                cluster.start()
            bed = EtcdBed(clients, cluster, kind)
            bed.link(relays, [member.port for member in cluster.members])
            yield bed
        finally:
            cluster.stop()


@contextlib.contextmanager
def small_etcd_bed(folder: Path, clients: int) -> Iterator[Bed]:
    """Start three members, one of them on a small disk."""
    with (
        etcd_bed(folder, clients, start=False) as bed,
        small_disk(folder, SMALL_ETCD_BYTES) as path,
    ):
        member = bed.cluster.members[0]
        member.data = path / member.name
        bed.faults = ("full-disk", "kill-member", "kill-leader")
        bed.cluster.start()
        yield bed
        bed.cluster.stop()


@contextlib.contextmanager
def redis_bed(folder: Path, clients: int, *, is_small: bool = False) -> Iterator[Bed]:
    need_redis()
    with contextlib.ExitStack() as stack:
        relays = stack.enter_context(Relays())
        where = stack.enter_context(small_disk(folder)) if is_small else folder / "redis"
        server = RedisServer(where)
        stack.callback(server.kill)
        bed = RedisBed(clients, server.start())
        if is_small:
            bed.faults = ("full-disk", "kill-server")
        bed.link(relays, [server.port])
        yield bed


@contextlib.contextmanager
def kubernetes_bed(folder: Path, clients: int) -> Iterator[Bed]:
    need_control_plane()
    with Relays() as relays, ControlPlane(whole=False) as plane:
        bed = KubernetesBed(clients, plane, folder)
        bed.link(relays, [plane.port])
        yield bed
