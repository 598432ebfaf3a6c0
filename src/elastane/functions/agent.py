"""An agent as a child process: started, awaited, stopped, and never outliving this process.

The agent is exec'd in a session of its own. The kernel kills it when the thread that waits here
ends, and its orphan reaper then ends everything it started. Owns the exchange between the two:
output, signals and the exit code. How it fails: OSError if no process can be created.

The agent inherits an output stream that is a file of this process. Other streams (a notebook's, a
test's) have no descriptor: the waiting thread reads a pipe and writes the text to them. If a stream
fails, only its output is lost: the pipe is still read, so that no writer blocks.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MODULE = "elastane.cli.called"
_log = logging.getLogger(__name__)
# After this many signals to the waiting caller, the agent is killed.
_ASKED_MAX = 2
_KILLED_WAIT_S = 10.0
_CHUNK_BYTES = 64 << 10


def signal_of(error: BaseException) -> int:
    """Return the signal for the agent: the one received here, otherwise one that ends it."""
    default = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
    return int(getattr(error, "sigval", default))


class CalledAgent:
    """The agent of one call."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._relays: dict[int, Relay] = {}

    @property
    def pid(self) -> int:
        """The pid of its process."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def __enter__(self) -> CalledAgent:
        try:
            return self._start()
        except BaseException:
            self.__exit__()  # Ctrl-C may come at any line.
            raise

    def _start(self) -> CalledAgent:
        out, err = Relay(sys.stdout), Relay(sys.stderr)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self._folder), str(os.getpid())],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=out.stdio(),
            stderr=err.stdio(),
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        for pipe, relay in ((self._process.stdout, out), (self._process.stderr, err)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._relays[pipe.fileno()] = relay
        return self

    def __exit__(self, *_: object) -> None:
        """Kill an agent that still runs, and with it its workers."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_WAIT_S)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, forwarding its output meanwhile; None after `timeout_s`."""
        assert self._process is not None
        end_s = time.monotonic() + timeout_s if timeout_s is not None else None
        poller = select.poll()
        for fd in (self._pidfd, *self._relays):
            poller.register(fd, select.POLLIN)
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            ready = poller.poll(None if left_s is None else left_s * 1000)
            for fd, _ in ready:
                if fd in self._relays and not self._relays[fd].forward(fd):
                    poller.unregister(fd)
            if any(fd == self._pidfd for fd, _ in ready):
                return self._drain_output()
            if left_s == 0.0:
                return None

    def stop(self, signum: int, timeout_s: float) -> None:
        """Pass a signal on, and wait for the end; kill the agent after `timeout_s`.

        An exception raised meanwhile (another Ctrl-C, a signal) sends its own signal. One exception
        too many kills the agent.
        """
        assert self._process is not None
        attempts, end_s = 0, time.monotonic() + timeout_s
        while self._process.poll() is None:
            attempts += 1
            if attempts > _ASKED_MAX or time.monotonic() >= end_s:
                self._process.kill()
                self.wait(_KILLED_WAIT_S)
                return
            try:
                self._process.send_signal(signum)
                self.wait(end_s - time.monotonic())
            except BaseException as error:
                signum = signal_of(error)

    def _drain_output(self) -> int:
        """Return the exit code after forwarding the rest of the pipes, which may still be open."""
        assert self._process is not None
        code = self._process.wait()
        for fd, relay in self._relays.items():
            while relay.forward(fd):
                pass
        return code


class Relay:
    """One stream of a child, forwarded to a text stream of this process."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_broken = target is None

    def stdio(self) -> int:
        """Return the child's stream: the descriptor of the target, or PIPE."""
        fd = _descriptor(self._target)
        if fd is None:
            return subprocess.PIPE
        self._target.flush()
        return fd

    def forward(self, fd: int) -> bool:
        """Write what has arrived; False if nothing is there now, or nothing more will come."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._write(self._decoder.decode(data, final=not data))
        return bool(data)

    def _write(self, text: str) -> None:
        if self._is_broken or not text:
            return
        try:
            self._target.write(text)
            self._target.flush()
        except (OSError, ValueError) as error:
            self._is_broken = True
            _log.warning("output of workers is not shown any more: %s", error)


def _descriptor(stream: Any) -> int | None:
    """Return the descriptor of a plain text file; None for any other stream."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    try:
        return raw.fileno() if isinstance(raw, io.FileIO) else None
    except ValueError:  # closed
        return None
