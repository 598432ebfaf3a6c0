"""Real Redis servers for tests: durable or not, with a password, with TLS, or as a replica."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import _die_with_parent
from ports import free_ports

START_S = 20.0
REDIS = shutil.which("redis-server")


class RedisServer:
    """One server; it may be stopped (SIGSTOP), killed and started again on its data."""

    def __init__(self, folder: Path, *extra: str, durable: bool = True) -> None:
        self.folder = folder
        self.extra = extra
        self.durable = durable
        (self.port,) = free_ports(1)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """What --rdzv-endpoint is given."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [str(REDIS), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        if "--tls-port" not in self.extra:
            argv += ["--port", str(self.port)]
        if self.durable:
            argv += ["--appendonly", "yes", "--appendfsync", "always"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, *self.extra],
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            if self.answers():
                return
            time.sleep(0.02)
        raise AssertionError(f"redis was not ready in {START_S} s")

    def answers(self) -> bool:
        """Whether it reads what it is sent: a server that wants a password or TLS does too."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1) as s,
        ):
            if "--tls-port" in self.extra:
                return True
            s.settimeout(1)
            s.sendall(b"PING\r\n")
            answer = s.recv(64)
            return bool(answer) and not answer.startswith(b"-LOADING")
        return False

    def tell(self, *words: str) -> None:
        """Send one command, and wait for its answer."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as s:
            s.settimeout(5)
            s.sendall(" ".join(words).encode() + b"\r\n")
            answer = s.recv(4096)
            assert not answer.startswith(b"-"), answer

    def send(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(90)
            self.process = None


def need_redis() -> None:
    """Skip where Redis cannot be had; but where everything is to be tested, that is a failure."""
    reason = ""
    if REDIS is None:
        reason = "redis-server is not installed: apt-get install redis-server"
    elif importlib.util.find_spec("redis") is None:
        reason = "redis-py is not installed: pip install 'elastane[redis]'"
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@contextlib.contextmanager
def redis(folder: Path, *extra: str, durable: bool = True) -> Iterator[RedisServer]:
    need_redis()
    server = RedisServer(folder, *extra, durable=durable)
    try:
        yield server.start()
    finally:
        server.kill()


@functools.cache
def shared_redis() -> RedisServer:
    """A server for all tests of this process; each takes a prefix of its own."""
    need_redis()
    folder = tempfile.TemporaryDirectory()
    server = RedisServer(Path(folder.name)).start()

    def end() -> None:
        server.kill()
        folder.cleanup()

    atexit.register(end)
    return server
