"""The demo's nodes: real agents of `elastane run` on this machine, in one folder, on one port.

Owns the processes and ends them all, however the demo ends: it adopts their orphans, and the agents
die with it if it is killed. For that it must stay single-threaded.
"""

from __future__ import annotations

import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from elastane.process.kernel import become_subreaper, die_with_parent

WORKERS_PER_NODE = 2
# Processes that got SIGKILL end within milliseconds; a disk that hangs may hold one longer.
END_TIMEOUT_S = 5.0
POLL_S = 0.01


@dataclass
class Agent:
    """One node of the demo."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_end(self, lines: int = 30) -> str:
        """Return the last lines of the output of the agent and its workers."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class DemoCluster:
    """The agents of one job; a context that leaves no process behind."""

    def __init__(self, folder: Path, script: Sequence[str], environ: dict[str, str]) -> None:
        self.folder = folder
        self.job = f"demo-{os.getpid()}"
        self.log_dir = folder / "logs"
        self.agents: list[Agent] = []
        self._names = (f"node-{letter}" for letter in string.ascii_lowercase)
        self._script = list(script)
        self._environ = environ
        self._port = 0

    def __enter__(self) -> Self:
        become_subreaper()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        end_all_children()

    def next_name(self) -> str:
        """Return a name that no node has had."""
        return next(self._names)

    def start(self, name: str) -> Agent:
        """Start the agent of a node."""
        agent = self._launch(name, self._command(name))
        self.agents.append(agent)
        return agent

    def start_undisturbed(self, script: Sequence[str]) -> Agent:
        """Start a separate job that the demo leaves alone."""
        words = ["--standalone", "--nproc-per-node", str(WORKERS_PER_NODE)]
        words += ["--log-dir", str(self.log_dir)]
        command = [sys.executable, "-m", "elastane", "run", *words, *script]
        return self._launch("undisturbed", command)

    def _launch(self, name: str, command: Sequence[str]) -> Agent:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one thread
            )
        return Agent(name, process, log)

    def _command(self, name: str) -> list[str]:
        flags = {
            "--nnodes": "1:2",
            "--nproc-per-node": str(WORKERS_PER_NODE),
            "--min-workers": "1",
            "--max-restarts": "5",
            "--rdzv-endpoint": f"127.0.0.1:{self._port}",
            "--rdzv-id": self.job,
            "--node-id": name,
            "--local-addr": "127.0.0.1",
            "--log-dir": str(self.log_dir),
        }
        words = [word for flag in flags.items() for word in flag]
        return [sys.executable, "-m", "elastane", "run", *words, *self._script]

    def failed(self) -> Agent | None:
        """Return an agent that ended with an error, although the demo did not kill it."""
        return next((agent for agent in self.agents if agent.process.poll() not in (None, 0)), None)

    def all_done(self) -> bool:
        """Say whether every agent has ended with success."""
        return all(agent.process.poll() == 0 for agent in self.agents)

    def kill_agent(self, agent: Agent) -> None:
        """Send SIGKILL to the agent only: ending its workers is the product's task."""
        self.agents.remove(agent)
        agent.process.kill()
        agent.process.wait()

    def dismiss(self, agent: Agent) -> None:
        """Send SIGTERM to the agent, as a preemption does; any exit code is fine after that."""
        self.agents.remove(agent)
        agent.process.terminate()

    def signal_process(self, pid: int, number: signal.Signals) -> None:
        """Send one worker a signal."""
        _send(pid, number)


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until no process runs any more; return those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def is_running(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_all_children() -> None:
    """SIGKILL every process below this one, until none is left."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            _send(pid, signal.SIGKILL)
        _reap()
        time.sleep(POLL_S)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
