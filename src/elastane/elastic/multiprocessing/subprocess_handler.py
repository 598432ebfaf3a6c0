"""One child process that runs a command: its start, its files, its end.

Owns the session of the child. Unlike torch's, it lets the kernel end the child with this process,
if the kernel can. It knows nothing of other children.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

from elastane.elastic import use_itself
from elastane.elastic.multiprocessing._children import bind_child, death_with_parent

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
use_itself(__name__, "handlers", "subprocess_handler")


class SubprocessHandler:
    """A child that the constructor starts, as in torch; `proc` is its Popen.

    `stdout` and `stderr` are files that are truncated; None or "" is the console. `env` is added to
    this process's own. Raises OSError if the command or a file cannot be opened.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any | None,
    ) -> None:
        self.local_rank_id = local_rank_id
        self._files: list[Any] = []
        try:
            self.proc = subprocess.Popen(
                [entrypoint, *map(str, args)],
                env={**os.environ, **env},
                stdout=self._open(stdout),
                stderr=self._open(stderr),
                start_new_session=True,
                preexec_fn=death_with_parent(),  # noqa: PLW1509 - one system call, no lock
            )
        finally:
            for file in self._files:
                file.close()
        bind_child(self.proc.pid, local_rank_id, numa_options)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal (SIGTERM) to the child and to what remains of its session."""
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            return

    def _open(self, path: str | None) -> Any:
        if not path:
            return None
        self._files.append(open(path, "wb"))  # noqa: SIM115, PTH123 - closed by the constructor
        return self._files[-1]


def get_subprocess_handler(  # noqa: PLR0913, PLR0917 - torch's signature
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: Any | None = None,
) -> SubprocessHandler:
    """Start a command; see SubprocessHandler."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
