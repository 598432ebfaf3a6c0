"""A local etcd server: its command line, its folder, and whether it answers.

Owns what does not depend on who runs the process: the agent's sidecar and the API's EtcdServer
start it each in its own way. A folder is named after the process that made it, so the next start on
this machine removes what a killed one left. How it fails: ConfigurationError where there is no
binary; StoreError where the server does not come up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastane.errors import ConfigurationError
from elastane.runtime.files import process_start

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
# A first start writes its log ahead and elects itself: half a second here, more on a slow disk.
START_TIMEOUT_S = 60.0
# Ports are free when they are chosen, and may be taken until they are used.
START_ATTEMPTS = 3
_HEALTH_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class LocalServer:
    """A server of one member: where it keeps its data, and where it listens."""

    binary: str
    folder: Path
    port: int
    peer_port: int

    @property
    def endpoint(self) -> str:
        """What `--rdzv-endpoint` is given."""
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return its command line; v2 is served too, where the binary still has it."""
        client = f"http://{self.endpoint}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        argv = [self.binary, "--name", "elastane", "--data-dir", str(self.folder / "data")]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        return [*argv, "--initial-cluster", f"elastane={peer}"]

    def is_healthy(self) -> bool:
        """Whether the server answers, and has elected itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return bool(json.loads(connection.getresponse().read(4096)).get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return False
        finally:
            connection.close()


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


def prepare(binary: str, base: Path) -> LocalServer:
    """Return a server on free ports with a folder below `base`, whose leftovers are removed."""
    remove_leftovers(base)
    name = f"etcd.{os.getpid()}.{process_start(os.getpid()).rpartition(':')[2]}"
    folder = base / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        port, peer_port = (sock.getsockname()[1] for sock in sockets)
    return LocalServer(binary, folder, port, peer_port)


def remove_leftovers(base: Path) -> None:
    """Remove the folders of servers whose owner was killed."""
    for folder in base.glob("etcd.*.*"):
        _, pid, start = folder.name.split(".", 2)
        if pid.isdecimal() and process_start(int(pid)).rpartition(":")[2] != start:
            shutil.rmtree(folder, ignore_errors=True)
