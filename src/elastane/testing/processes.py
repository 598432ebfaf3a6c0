"""The processes of a local cluster: started with a mark, found by it, ended with their parent.

Each process carries a variable with its cluster's mark, and its children inherit it. So it is found
even if it changed session or parent.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from elastane.process.files import process_start
from elastane.process.kernel import die_with_parent

MARK = "ELASTANE_TESTING_MARK"
_POLL_S = 0.02


def start(words: Sequence[str], env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start a process in its own session; the kernel kills it when this thread ends."""
    return subprocess.Popen(
        list(words),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        # One system call without a lock: safe although other threads run.
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
    )


def below(pid: int) -> list[int]:
    """Return all descendants of a process, each child before its own."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *below(child)]
    return found


def send(pid: int, number: int) -> None:
    """Send a signal, if the process still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each process that still exists."""
    for pid in pids:
        send(pid, signal.SIGKILL)


def cut_power(agent: int) -> None:
    """End an agent, its workers and their children at once; its parent still has to wait for it."""
    send(agent, signal.SIGSTOP)  # so that it cannot react to the rest
    kill([*below(agent), agent])


def pause(agent: int) -> None:
    """Stop every process of a node, like a host that hangs."""
    for pid in (agent, *below(agent)):
        send(pid, signal.SIGSTOP)


def resume(agent: int) -> None:
    """Let a node continue after `pause`."""
    for pid in (*below(agent), agent):
        send(pid, signal.SIGCONT)


def marked(mark: str) -> list[int]:
    """Return the living processes that carry the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            carries = wanted in (folder / "environ").read_bytes().split(b"\0")
            if carries and process_start(int(folder.name)):
                found.append(int(folder.name))
    return found


def end_all(agents: Iterable[subprocess.Popen[bytes]], mark: str, timeout_s: float) -> None:
    """Kill the agents and every process with the mark, until none is left."""
    for agent in agents:
        if agent.poll() is None:
            agent.kill()
        agent.wait()
    end_s = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < end_s:
        kill(left)
        time.sleep(_POLL_S)


def free_port() -> int:
    """Return a port that is free now, below the kernel's range of ephemeral ports."""
    while True:
        port = random.randint(20_000, 31_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
