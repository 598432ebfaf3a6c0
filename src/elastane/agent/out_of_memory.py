"""Finds out whether the kernel killed a worker for lack of memory, from the kernel's counters.

Owns the reading of the cgroup's `memory.events` (v2) or `memory.oom_control` (v1) and of
/proc/vmstat, and the text about a SIGKILL. Each start of a group reads a file or two; the judgement
is pure. Where nothing can be read, the text says so instead of guessing.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# A cgroup without a limit shows a number near 2^63.
_LIMIT_BYTES_MAX = 1 << 60


@dataclass(frozen=True)
class OomCounters:
    """Out-of-memory kills so far, in the cgroup (None: unknown) and on the host."""

    cgroup_kills: int | None = None
    host_kills: int | None = None
    limit_bytes: int = 0


def read_memory() -> OomCounters:
    """Return the current counters; None for those that cannot be read."""
    folder, events, limit = _cgroup()
    return OomCounters(
        cgroup_kills=_counter(folder / events, "oom_kill") if folder else None,
        host_kills=_counter(Path("/proc/vmstat"), "oom_kill"),
        limit_bytes=_limit(folder / limit) if folder else 0,
    )


def kill_evidence(before: OomCounters, after: OomCounters, peak_bytes: int, exit_code: int) -> str:
    """Return in words what killed a worker; empty unless it was killed by SIGKILL."""
    if exit_code != -signal.SIGKILL:
        return ""
    peak = f"; its memory had peaked at {size(peak_bytes)}" if peak_bytes else ""
    if _grew(before.cgroup_kills, after.cgroup_kills):
        limit = f" (limit {size(after.limit_bytes)})" if after.limit_bytes else ""
        return f"out of memory: the kernel killed a process of this cgroup{limit}{peak}"
    if _grew(before.host_kills, after.host_kills):
        return f"out of memory, probably: the kernel killed a process of this host{peak}"
    if after.cgroup_kills is None and after.host_kills is None:
        return f"from outside, or out of memory: the kernel's counters cannot be read here{peak}"
    return f"from outside: neither the agent nor the kernel's out-of-memory killer{peak}"


def size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _cgroup() -> tuple[Path | None, str, str]:
    """Return this process's memory cgroup, and the names of its counter and limit files."""
    try:
        lines = _OURS.read_text().splitlines()
    except OSError:
        return None, "", ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.oom_control", "memory.limit_in_bytes")
            return _folder(_CGROUPS / "memory", path, names[0]), *names
    for line in lines:
        if line.startswith("0::"):
            names = ("memory.events", "memory.max")
            return _folder(_CGROUPS, line[3:], names[0]), *names
    return None, "", ""


def _folder(root: Path, path: str, counter: str) -> Path | None:
    """Return the cgroup's folder; in a container its path may be that of the host."""
    for folder in (root / path.lstrip("/"), root):
        if (folder / counter).is_file():
            return folder
    return None


def _counter(path: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _limit(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < _LIMIT_BYTES_MAX else 0
