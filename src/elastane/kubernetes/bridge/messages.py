"""What an ElasticJob's operator and the job's coordinator say to each other: names and forms.

Pure, and for both sides: `kubernetes.reconcile` writes the directive and reads the report, the
agent that holds the seat reads the one and writes the other (`correspondence`).
"""

from __future__ import annotations

import msgspec

# The key of the report's ConfigMap under which it stands, as JSON.
REPORT_KEY = "report"


def directive_name(job: str) -> str:
    """Return the name of the ConfigMap by which the operator speaks to the job's coordinator."""
    return f"{job}-directive"


def report_name(job: str) -> str:
    """Return the name of the ConfigMap by which the job's coordinator speaks to the operator."""
    return f"{job}-report"


def dead_in(data: dict[str, str]) -> list[str]:
    """Return the uids of dead pods in the data of a directive's ConfigMap."""
    return data.get("dead", "").split()


class Directive(msgspec.Struct, frozen=True):
    """What the operator wants: how many nodes, and which pods count no more.

    `nodes` is None where it says nothing that can be read. `fenced` are uids of pods that may live,
    `dead` of such as a kubelet saw end.
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
    """What the job's coordinator says. Times are seconds since the epoch, by its host's clock."""

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
