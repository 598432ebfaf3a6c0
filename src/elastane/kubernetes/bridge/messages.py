"""The messages between an ElasticJob's operator and the job's coordinator.

Pure, and for both sides: `kubernetes.reconcile` writes the directive and reads the report, the
coordinator's process does the reverse (`bridge`).
"""

from __future__ import annotations

import msgspec

# The key of the report in its ConfigMap; the value is JSON.
REPORT_KEY = "report"


def directive_name(job: str) -> str:
    """Return the name of the ConfigMap from the operator to the job's coordinator."""
    return f"{job}-directive"


def report_name(job: str) -> str:
    """Return the name of the ConfigMap from the job's coordinator to the operator."""
    return f"{job}-report"


def dead_in(data: dict[str, str]) -> list[str]:
    """Return the uids of dead pods in the data of a directive's ConfigMap."""
    return data.get("dead", "").split()


class Directive(msgspec.Struct, frozen=True):
    """The operator's orders: the range of nodes, and the pods that do not count any more.

    `nodes` is None where the range is absent or unreadable. `fenced` are uids of pods that may
    still run, `dead` those of pods that a kubelet saw end.
    """

    nodes: tuple[int, int] | None = None
    fenced: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


class MemberReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pod: `joined`, `away` for a moment, `departed` or `fenced`."""

    pod: str = ""
    state: str = ""
    rank: int = -1


class JobReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The coordinator's report. Times are seconds since the epoch, by its host's clock."""

    at_s: float = 0.0
    phase: str = ""
    reason: str = ""
    round: int = 0
    attempt: int = 0
    world_size: int = 0
    nodes: int = 0
    step: int = 0
    steps_per_s: float = 0.0
    incident: str = ""
    incident_at_s: float = 0.0
    restarts: int = 0
    members: tuple[MemberReport, ...] = ()
