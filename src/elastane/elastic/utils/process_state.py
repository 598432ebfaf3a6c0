"""The state of a process, as the kernel reports it. (torch has this module only since 2.13.)"""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """Return the letter of a process's state (R, S, D, Z, ...), None without such a process."""
    try:
        # The state follows the command, which may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a state is uninterruptible sleep, which no signal ends."""
    return state is not None and state.startswith("D")
