"""A local etcd server: its command line, its folder, and whether it answers.

Owns what the sidecar of an agent and EtcdServer of the API share; each starts the process in its
own way. A folder is named after the process that made it, so the next start on this machine removes
what a killed one left. It fails with ConfigurationError where there is no binary.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.process.files import process_start

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
# A first start writes its log and elects itself: half a second here, more on a slow disk.
START_TIMEOUT_S = 60.0
# Ports are free when they are chosen, and may be taken until they are used.
START_ATTEMPTS = 3
_HEALTH_TIMEOUT_S = 1.0
# etcd wants HOST:PORT, and takes all of it as the name of a socket.
_CLIENT_SOCKET, _PEER_SOCKET = "client.sock:1", "peer.sock:1"


@dataclass(frozen=True)
class LocalServer:
    """An etcd of one member on this machine: its data folder, and its ports.

    Without ports it is private: it listens on sockets in its folder, whose mode is 0700. Every user
    of the machine reaches a port of the loopback, and etcd authenticates no user by default. Start
    it in its folder: etcd takes the name of a socket as HOST:PORT, relative to there.
    """

    binary: str
    folder: Path
    port: int = 0
    peer_port: int = 0

    @property
    def endpoint(self) -> str:
        """The value for `--rdzv-endpoint`."""
        return f"127.0.0.1:{self.port}" if self.port else f"unix://{self.folder / _CLIENT_SOCKET}"

    @property
    def _urls(self) -> tuple[str, str]:
        """The addresses for clients and for other members."""
        if self.port:
            return f"http://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        return f"unix://{_CLIENT_SOCKET}", f"unix://{_PEER_SOCKET}"

    def _connection(self) -> http.client.HTTPConnection:
        if self.port:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=_HEALTH_TIMEOUT_S)
        return _SocketConnection(self.folder / _CLIENT_SOCKET)

    def command(self) -> list[str]:
        """Return its command line; v2 is served too where the binary still has it."""
        client, peer = self._urls
        argv = [self.binary, "--name", "elastane", "--data-dir", str(self.folder / "data")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        return [*argv, "--initial-cluster", f"elastane={peer}"]

    def is_healthy(self) -> bool:
        """Whether the server answers, and has elected itself."""
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return bool(json.loads(connection.getresponse().read(4096)).get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return False
        finally:
            connection.close()


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("etcd", timeout=_HEALTH_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with short_path(self._path) as path:
            self.sock.connect(path)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a path for the same socket that is short enough for the kernel (107 bytes)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def find_binary(environ: Mapping[str, str]) -> str:
    """Return the etcd program: what the variable names, else the one on the path."""
    named = environ.get(BINARY_VARIABLE, "")
    found = shutil.which(named or "etcd", path=environ.get("PATH"))
    if found is None:
        raise ConfigurationError(
            f"no etcd program: {named or 'etcd'} cannot be found or executed",
            slug="etcd-binary",
            where=BINARY_VARIABLE if named else "PATH",
            expected="etcd, as Debian's package etcd-server installs it",
            next_step="--standalone without --rdzv-backend needs no etcd; or install it: "
            "apt-get install etcd-server",
        )
    return found


def prepare(binary: str, base: Path, *, private: bool = False) -> LocalServer:
    """Return a server with an empty folder below `base`; `private`: on no port."""
    folder = _folder(base)
    if private:
        return LocalServer(binary, folder)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        port, peer_port = (sock.getsockname()[1] for sock in sockets)
    return LocalServer(binary, folder, port, peer_port)


def _folder(base: Path) -> Path:
    remove_leftovers(base)
    name = f"etcd.{os.getpid()}.{process_start(os.getpid()).rpartition(':')[2]}"
    folder = base / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def remove_leftovers(base: Path) -> None:
    """Remove the folders of servers whose owner was killed."""
    for folder in base.glob("etcd.*.*"):
        _, pid, start = folder.name.split(".", 2)
        if pid.isdecimal() and process_start(int(pid)).rpartition(":")[2] != start:
            shutil.rmtree(folder, ignore_errors=True)
