"""Whether the kernel killed a worker for want of memory, from the counters that it keeps.

Owns the reading of the cgroup's `memory.events` (v2) or `memory.oom_control` (v1) and of
/proc/vmstat, and the words about a SIGKILL. The reading is a file or two at each start of a group;
the judging is pure. Where nothing can be read, it says so rather than guess.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# A cgroup without a limit says so by a number near 2^63.
_LIMIT_BYTES_MAX = 1 << 60


@dataclass(frozen=True)
class OomCounters:
    """Kills for want of memory so far: in the cgroup (None: unknown) and on the host."""

    cgroup_kills: int | None = None
    host_kills: int | None = None
    limit_bytes: int = 0


def read_memory() -> OomCounters:
    """Return the counters as they stand; those that cannot be read are None."""
    folder, events, limit = _cgroup()
    return OomCounters(
        cgroup_kills=_counter(folder / events, "oom_kill") if folder else None,
        host_kills=_counter(Path("/proc/vmstat"), "oom_kill"),
        limit_bytes=_limit(folder / limit) if folder else 0,
    )


def kill_evidence(before: OomCounters, after: OomCounters, peak_bytes: int, exit_code: int) -> str:
    """Return in words who killed a worker; empty where it was not killed by SIGKILL."""
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
    """Return a number of bytes for a person."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _cgroup() -> tuple[Path | None, str, str]:
    """Return this process's memory cgroup, and the names of its counter and its limit."""
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
    """Return the cgroup's folder; in a container its path may be one of the host's."""
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
