"""Workers whose framework ignores SIGTERM end at once if they have no unsaved state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job
from process_harness import DEADLINE_S, worker_environment

from elastane.process import control_socket
from elastane.protocol.log_events import EventKind

# Longer than any wait of a test: SIGKILL by the timeout fails it.
SHUTDOWN_S = "600"
# A worker in `init()`, as far as its line goes, that ignores SIGTERM.
WAITER = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from elastane.worker.control_socket import ControlSocket
line = ControlSocket.inherited()
line.first()
if sys.argv[1] == "waits":
    print("waits", end="")
line.begin(lambda: None, lambda: None)
if sys.argv[1] == "works":
    while not line._ends:  # The thread of the line has read the word.
        time.sleep(0.001)
    print("worked", end="")
line.next_place()
"""


@pytest.mark.parametrize("how", ["ignores", "handles"])
def test_a_worker_parked_after_its_checkpoint_is_killed_at_once(tmp_path: Path, how: str) -> None:
    options = ("--shutdown-timeout", SHUTDOWN_S)
    with Job(tmp_path, nnodes="1:2", mode="park", options=options) as job:
        job.start("a", env={"SWALLOWS": how})
        job.wait_step(world=1)
        job.start("b")
        assert job.wait_step(world=2).restarts == 0
        assert not job.events(EventKind.INCIDENT)


@pytest.mark.parametrize("at", ["waits", "works"])
def test_a_standby_ends_when_its_agent_asks(at: str) -> None:
    agent, worker = control_socket.pair()
    agent.send(control_socket.encode(control_socket.Wait(local_rank=0, world_size=2)))
    with subprocess.Popen(
        [sys.executable, "-c", WAITER, at],
        env=worker_environment(ELASTANE_CONTROL_FD=str(worker.fileno())),
        pass_fds=[worker.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            worker.close()
            agent.send(control_socket.encode(control_socket.End()))
            # A busy worker continues until it asks for a place; its output is not lost.
            said, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    agent.close()
    assert (process.returncode, said.decode()) == (143, {"waits": "waits", "works": "worked"}[at])
