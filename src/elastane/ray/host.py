"""The Ray actor that runs one agent of a job as a process of its own.

Ray imports this module on each node, so elastane has to be installed there. The kernel kills the
agent with the actor's process, and the agent's orphan reaper ends the workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastane.process import environment

_AGENT = "elastane.cli._under_ray"  # the program of an agent, which dies with its parent

# Ray gives each actor as many threads as it has CPUs. Here these are shared by several workers, for
# which elastane chooses.
_OF_THE_ACTOR = ("OMP_NUM_THREADS",)


class AgentHost:
    """Runs one agent; `run` blocks, and `stop` is called beside it."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()

    def run(self, words: Sequence[str], environ: Mapping[str, str], cwd: str) -> int:
        """Run an agent with these words of `elastane run`; return its exit code.

        `environ` is added to the environment of the actor. `cwd`: where the script is if Ray has
        brought no working folder; ignored if this node does not have it.
        """
        if self._asked.is_set():
            return 128 + signal.SIGTERM
        env = {
            name: value
            for name, value in environment.snapshot().items()
            if name not in _OF_THE_ACTOR
        }
        self._agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT, str(os.getpid()), *words],
            env={**env, **environ},
            cwd=cwd if cwd and Path(cwd).is_dir() else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._asked.is_set():  # `stop` came meanwhile, and may have found no process.
            self.stop()
        return self._agent.wait()

    def stop(self) -> None:
        """Ask the agent to leave its job, now or as it starts."""
        self._asked.set()
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)
