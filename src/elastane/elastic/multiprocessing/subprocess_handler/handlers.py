"""How a child process that runs a command is started."""

from __future__ import annotations

from typing import Any

from elastane.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["get_subprocess_handler"]


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
