"""Real etcd servers for tests: one member or several, plain or TLS, with and without v2."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_ports

START_S = 20.0
ETCD = shutil.which("etcd")
MEMORY = Path("/dev/shm")
# A member takes 128 MiB for its log at once; ten of them may run beside each other.
MEMORY_BYTES = 4 * 2**30


def memory_folder() -> Path:
    """Make a folder in memory if there is room, so that no write waits for a busy disk.

    It is removed when this process ends, if it is still there.
    """
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
    folder = tempfile.mkdtemp(prefix="elastane-etcd-", dir=MEMORY if roomy else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class EtcdMember:
    """One server; it may be stopped (SIGSTOP), killed and started again on its data."""

    def __init__(
        self, folder: Path, data: Path, name: str, ports: tuple[int, int], extra: list[str]
    ) -> None:
        self.folder = folder / name
        self.data = data / name
        self.name = name
        self.port, self.peer_port = ports
        self.extra = extra
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def scheme(self) -> str:
        return "https" if "--cert-file" in self.extra else "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self, cluster: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [
            ETCD, "--name", self.name, "--data-dir", str(self.data),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
            "--initial-cluster", cluster, "--logger", "zap",
            *self.extra,
        ]  # fmt: skip
        environ = {"PATH": os.environ.get("PATH", ""), "ETCD_UNSUPPORTED_ARCH": "arm64"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                env=environ,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )

    def send(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(90)


class EtcdCluster:
    """Members that know each other, all on loopback ports of their own."""

    def __init__(self, folder: Path, members: int = 1, extra: list[str] | None = None) -> None:
        ports = free_ports(2 * members)
        self.data = memory_folder()
        self.members = [
            EtcdMember(folder, self.data, f"m{n}", (ports[2 * n], ports[2 * n + 1]), extra or [])
            for n in range(members)
        ]
        self.cluster = ",".join(f"{m.name}={m.peer_url}" for m in self.members)

    @property
    def endpoint(self) -> str:
        """What --rdzv-endpoint is given."""
        return ",".join(m.url for m in self.members)

    def start(self) -> EtcdCluster:
        for member in self.members:
            member.start(self.cluster)
        for member in self.members:
            self.wait_ready(member)
        return self

    def wait_ready(self, member: EtcdMember) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert member.process is not None
            assert member.process.poll() is None, (member.folder / "log").read_text()[-2000:]
            if member.scheme == "https":
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", member.port), 1).close()
                    return
            else:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"{member.url}/health", timeout=2) as answer,
                ):
                    if b'"true"' in answer.read():
                        return
            time.sleep(0.02)
        raise AssertionError(f"etcd {member.name} was not ready in {START_S} s")

    def stop(self) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self.data, ignore_errors=True)


def need_etcd() -> None:
    """Skip where there is no etcd; but where everything is to be tested, that is a failure."""
    if ETCD is None:
        reason = "etcd is not installed: apt-get install etcd-server"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@contextlib.contextmanager
def etcd(folder: Path, members: int = 1, extra: list[str] | None = None) -> Iterator[EtcdCluster]:
    need_etcd()
    cluster = EtcdCluster(folder, members, extra)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@functools.cache
def shared_cluster(members: int = 1, extra: tuple[str, ...] = ()) -> EtcdCluster:
    """A cluster for all tests of this process; each takes a prefix of its own."""
    need_etcd()
    folder = tempfile.TemporaryDirectory()
    cluster = EtcdCluster(Path(folder.name), members, list(extra)).start()

    def end() -> None:
        cluster.stop()
        folder.cleanup()

    atexit.register(end)
    return cluster
