"""A local etcd for tests, notebooks and jobs of one machine.

Owns one server process, which only listens on the loopback. The server supports v3, and v2 if its
version does. It ends by `stop`, with this object, or when this process exits normally. If this
process is killed, the server's data stay and are not reused. How it fails: ConfigurationError
without an etcd program; TimeoutError if the server does not answer in time.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import TextIO

from elastane.elastic.rendezvous.etcd_store import EtcdClient
from elastane.stores.etcd.server import LocalServer, find_binary, prepare

_log = logging.getLogger("elastane.etcd")
_POLL_S = 0.05
_STOP_S = 5.0
# Timeout for the program to print its flags.
_HELP_S = 30.0


def find_free_port() -> socket.socket:
    """Return a listening socket on a free port of the loopback; close it just before use."""
    return socket.create_server(("localhost", 0))


def stop_etcd(subprocess: subprocess.Popen[bytes] | None, data_dir: str | None = None) -> None:
    """End a server's process, and remove its data if `data_dir` is given."""
    if subprocess is not None:
        _stop(subprocess, data_dir or "")


class EtcdServer:
    """A local etcd server. A given `data_dir` is kept when the server stops."""

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._server: LocalServer | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], str], EtcdServer] | None = None

    def get_port(self) -> int:
        """Return the port it listens on; -1 if it does not run."""
        return self._server.port if self._server is not None else -1

    def get_host(self) -> str:
        """Return the host it listens on."""
        return "127.0.0.1"

    def get_endpoint(self) -> str:
        """Return host:port, in the form of --rdzv-endpoint."""
        return f"{self.get_host()}:{self.get_port()}"

    def get_client(self) -> EtcdClient:
        """Return a client, for instance for EtcdStore."""
        return EtcdClient(self.get_endpoint(), {})

    def start(
        self, timeout: int = 60, num_retries: int = 3, stderr: int | TextIO | None = None
    ) -> None:
        """Start the server and return once it answers; TimeoutError after `num_retries` attempts.

        `timeout`: seconds for each attempt. `stderr`: where its output goes; None: to this
        process's.
        """
        self.stop()
        for attempt in range(1, num_retries + 1):
            try:
                self._start(timeout, stderr)
                return
            except TimeoutError as error:
                self.stop()
                _log.warning("%s (try %d of %d)", error, attempt, num_retries)
                if attempt == num_retries:
                    raise

    def stop(self) -> None:
        """End the server, and remove its data unless `data_dir` was given."""
        if self._end is not None:
            self._end()
        self._server = self._end = None

    def _start(self, timeout_s: float, stderr: int | TextIO | None) -> None:
        binary = find_binary(os.environ)
        base = self._data_dir or tempfile.mkdtemp(prefix="elastane-etcd-")
        server = prepare(binary, Path(base))
        # ETCD_* variables are removed: etcd would read them, and they are for another server.
        env = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        command = [*server.command(), *_v2_flags(binary, env)]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=stderr)
        self._server = server
        self._end = weakref.finalize(self, _stop, process, "" if self._data_dir else base)
        deadline_s = time.monotonic() + timeout_s
        while not server.is_healthy():
            if process.poll() is not None or time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"etcd did not answer at {server.endpoint} within {timeout_s} s"
                    f" (exit code {process.poll()})"
                )
            time.sleep(_POLL_S)


def _v2_flags(binary: str, env: dict[str, str]) -> list[str]:
    """Return the flags by which etcd also serves v2; none for versions without it (3.6)."""
    done = subprocess.run(
        [binary, "--help"], env=env, capture_output=True, timeout=_HELP_S, check=False
    )
    return ["--enable-v2"] if b"enable-v2" in done.stdout + done.stderr else []


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
