"""The Ray actor that runs one agent of a job as a process of its own.

Ray imports this module on each node, so elastane has to be installed there. The kernel kills the
agent with the actor's process, and the agent's orphan reaper ends the workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastane.process import environment
from elastane.process.files import write_atomic

_NOTICES = "ELASTANE_NOTICES"
_AGENT = "elastane.cli._under_ray"  # the program of an agent, which dies with its parent

# Ray gives each actor as many threads as it has CPUs. Here these are shared by several workers, for
# which elastane chooses.
_OF_THE_ACTOR = ("OMP_NUM_THREADS",)


class AgentHost:
    """Runs one agent; `run` blocks, and `stop` and `leave` are called beside it."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()
        # Its file is a notice to the agent, see docs/notices.md.
        self._folder = tempfile.TemporaryDirectory(prefix="elastane-ray-")
        self._notice = Path(self._folder.name) / "notice"

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
            env=with_notices({**env, **environ}, f"file:{self._notice}"),
            cwd=cwd if cwd and Path(cwd).is_dir() else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._asked.is_set():  # `stop` came meanwhile, and may have found no process.
            self.stop()
        return self._agent.wait()

    def leave(self, left_s: float | None) -> None:
        """Give the agent a notice that Ray removes this node in `left_s`; None: no deadline."""
        deadline = "" if left_s is None else f"{left_s:.1f} "
        write_atomic(self._notice, f"{deadline}Ray drains this node\n".encode())

    def stop(self) -> None:
        """Ask the agent to leave its job, now or as it starts."""
        self._asked.set()
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)


def with_notices(environ: Mapping[str, str], source: str) -> dict[str, str]:
    """Return the environment of an agent that reads notices from this source, too."""
    sources = [environ.get(_NOTICES, ""), source.replace(",", ",,")]
    return {**environ, _NOTICES: ",".join(filter(None, sources))}
