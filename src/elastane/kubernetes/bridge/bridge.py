"""What an agent that holds the seat does for the operator of its ElasticJob.

Owns the two directions: the directive, as it changes, is handed to the coordinator (who is fenced,
how many nodes the job may have), and what the coordinator knows is reported. It decides nothing.
How it fails: it does not; while the API server is away the job goes on as it was last told, and
what cannot be reported is reported later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

import msgspec

from elastane.errors import ElastaneError
from elastane.kubernetes.bridge.mailbox import Correspondence
from elastane.kubernetes.bridge.messages import Directive, JobReport, MemberReport
from elastane.kubernetes.client import ApiUnreachableError
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.messages import AgentPresence, Report
from elastane.protocol.model import Fence

_log = logging.getLogger("elastane.attending")
# A new coordinator admits nobody before it knows who is fenced, or could not find out for so long.
FIRST_LOOK_S = 3.0
# Between two attempts to reach an API server that is away.
RETRY_S = 2.0
# What changes the picture is reported within this, and no more often; ...
REPORT_S = 2.0
# ... steps alone are reported this often, and a report that says nothing new as often, for the
# operator to know that it still holds. A thousand jobs are a hundred writes a second.
REFRESH_S = 10.0
# The pace of steps is that of this long a past, and of no shorter one than the latter.
PACE_WINDOW_S = 60.0
PACE_MIN_S = 2.0
# Pods that are gone and still told as departed.
DEPARTED_MAX = 64


class OwnedCoordinator(Protocol):
    """A coordinator, as far as its job's owner has a say."""

    def fence(self, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
        """Hear who is fenced, and who is dead."""

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Hear how many nodes the job may have."""


class Known(Protocol):
    """What a coordinator knows."""

    def report(self) -> Report:
        """Return what `elastane status` shows."""

    def presence(self) -> list[AgentPresence]:
        """Return who is here and who is not."""


class Attending:
    """The correspondence of one seat with the operator; `run` lasts as long as the coordinator."""

    def __init__(self, letters: Correspondence) -> None:
        self._letters = letters
        self._trouble: dict[str, str] = {}

    async def run(self, coordinator: OwnedCoordinator, known: Known, begun: asyncio.Event) -> None:
        """Serve both directions until cancelled; sets `begun` once the directive is known.

        It is set as well where that cannot be found out within FIRST_LOOK_S: then the store is
        away, and no world can be formed either.
        """
        loop = asyncio.get_running_loop()
        late = loop.call_later(FIRST_LOOK_S, begun.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._obey(coordinator, begun))
                tasks.create_task(self._tell(known))
        finally:
            late.cancel()
            begun.set()

    async def _obey(self, coordinator: OwnedCoordinator, begun: asyncio.Event) -> None:
        """Hand each directive on."""
        last: Directive | None = None
        while True:
            try:
                async for directive in self._letters.directives():
                    self._note("directive", "")
                    if directive is not None and directive != last:
                        last = directive
                        coordinator.fence(directive.fenced, directive.dead)
                        if directive.nodes is not None:
                            coordinator.resize(*directive.nodes)
                    begun.set()
            except ElastaneError as error:
                self._note("directive", error.what)
                if not isinstance(error, ApiUnreachableError):
                    begun.set()  # It may not be read; to wait for it would be in vain.
            await asyncio.sleep(RETRY_S)

    async def _tell(self, known: Known) -> None:
        """Report what is new, and now and then that nothing is."""
        summary = Summary(await self._last_report())
        told: JobReport | None = None
        while True:
            report = summary.take(known.report(), known.presence(), time.time())
            if told is None or is_news(told, report):
                try:
                    await self._letters.tell(report)
                    told = report
                    self._note("report", "")
                except ElastaneError as error:
                    self._note("report", error.what)
            await asyncio.sleep(REPORT_S)

    async def _last_report(self) -> JobReport | None:
        while True:
            try:
                return await self._letters.last_report()
            except ElastaneError as error:
                self._note("report", error.what)
            await asyncio.sleep(RETRY_S)

    def _note(self, what: str, trouble: str) -> None:
        """Say once what keeps this seat from its operator, and once that it is over."""
        if trouble != self._trouble.get(what, ""):
            _log.warning("the operator's %s: %s", what, trouble or "goes on")
            self._trouble[what] = trouble


class Summary:
    """What was seen of a job, from one look to the next, as one report. `before` was the last."""

    def __init__(self, before: JobReport | None) -> None:
        self._incident = before.incident if before else ""
        self._incident_at_s = before.incident_at_s if before else 0.0
        self._step = before.step if before else 0
        self._paces: deque[tuple[float, int]] = deque()
        self._fence: Fence | None = None
        self._departed: dict[str, int] = {}
        self._joined: dict[str, int] = {}

    def take(self, report: Report, roll: list[AgentPresence], now_s: float) -> JobReport:
        """Return the report of this moment; `now_s` is in seconds since the epoch."""
        if report.last_incident and report.last_incident != self._incident:
            self._incident, self._incident_at_s = report.last_incident, now_s
        # After a change nobody has told a step yet: the last one stands.
        steps = [node.progress for node in report.nodes if node.progress is not None]
        step = self._step = min(steps, default=self._step)
        return JobReport(
            at_s=round(now_s, 3),
            phase=report.phase,
            reason=report.reason[:REASON_CHARS_MAX],
            round=report.fence.round if report.fence else 0,
            attempt=report.fence.attempt if report.fence else 0,
            world_size=report.world_size,
            nodes=sum(1 for node in report.nodes if node.node_rank is not None),
            step=step,
            steps_per_s=self._pace(report.fence, step, now_s),
            incident=self._incident[:REASON_CHARS_MAX],
            incident_at_s=round(self._incident_at_s, 3),
            restarts=report.restarts_used,
            members=self._members(roll),
        )

    def _pace(self, fence: Fence | None, step: int, now_s: float) -> float:
        backwards = self._paces and (step < self._paces[-1][1] or now_s < self._paces[-1][0])
        if fence != self._fence or backwards:
            self._fence = fence
            self._paces.clear()
        self._paces.append((now_s, step))
        while self._paces[0][0] < now_s - PACE_WINDOW_S:
            self._paces.popleft()
        first_s, first = self._paces[0]
        if now_s - first_s < PACE_MIN_S:
            return 0.0
        return round((step - first) / (now_s - first_s), 3)

    def _members(self, roll: list[AgentPresence]) -> tuple[MemberReport, ...]:
        """Return all pods that are here, and the last of those that were."""
        states = {called.incarnation.partition(".")[0]: called for called in roll}
        here = {pod: one.node_rank for pod, one in states.items() if one.state != "departed"}
        lost = {pod: one.node_rank for pod, one in states.items() if one.state == "departed"}
        lost |= {pod: rank for pod, rank in self._joined.items() if pod not in here}
        self._departed = {
            pod: rank for pod, rank in (self._departed | lost).items() if pod not in here
        }
        for pod in list(self._departed)[:-DEPARTED_MAX]:
            del self._departed[pod]
        self._joined = here
        return (
            *(MemberReport(pod=pod, state=states[pod].state, rank=here[pod]) for pod in here),
            *(MemberReport(pod=pod, state="departed", rank=-1) for pod in self._departed),
        )


def is_news(told: JobReport, report: JobReport) -> bool:
    """Whether a report is due: another picture, or the same for long enough."""
    if report.at_s - told.at_s >= REFRESH_S or report.at_s < told.at_s:
        return True
    moving = {"at_s": 0.0, "step": 0, "steps_per_s": 0.0}
    return msgspec.structs.replace(told, **moving) != msgspec.structs.replace(report, **moving)
