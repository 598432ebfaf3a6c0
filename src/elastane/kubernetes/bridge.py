"""The operator's side channel to the coordinator of an ElasticJob, in the coordinator's process.

Owns both directions. It hands each new directive (fenced pods, the range of nodes) to the
coordinator, and reports the coordinator's state to the operator. They travel in two ConfigMaps that
the operator makes: the operator writes `{job}-directive`, the coordinator `{job}-report`. Neither
waits for the other, and this module decides nothing.

It does not fail. While the API server is away the job continues under the last directive, and the
report is written later. An unreadable directive counts as absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

import msgspec

from elastane.errors import ElastaneError
from elastane.kubernetes.client import ApiUnreachableError
from elastane.kubernetes.client.api import follow_one
from elastane.kubernetes.client.resource import CONFIGMAPS
from elastane.kubernetes.model.observed import (
    REPORT_KEY,
    Directive,
    JobReport,
    MemberReport,
    dead_in,
    directive_name,
    report_name,
)
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.messages import AgentPresence, Report
from elastane.protocol.model import Fence
from elastane.protocol.unreadable import UNREADABLE

if TYPE_CHECKING:
    from elastane.kubernetes.store.store import KubernetesStore

_log = logging.getLogger("elastane.bridge")
# A new coordinator admits no node before it knows which pods are fenced, or after this long.
FIRST_LOOK_S = 3.0
# The pause between two attempts to reach an API server that is away.
RETRY_S = 2.0
# A change of the job's state is reported within this time, and changes at most this often; ...
REPORT_S = 2.0
# ... a state in which only the step changed is reported this often, and so is an unchanged one, so
# that the operator knows that it is current. A thousand jobs make a hundred writes a second.
REFRESH_S = 10.0
# Steps per second are computed over PACE_MIN_S at least and PACE_WINDOW_S at most.
PACE_WINDOW_S = 60.0
PACE_MIN_S = 2.0
# Deleted pods that are still reported as departed.
DEPARTED_MAX = 64
# Uids of pods in a directive; the operator keeps some hundreds.
UIDS_MAX = 10_000


class ConfigMap(msgspec.Struct):
    """The data of a ConfigMap."""

    data: dict[str, str] | None = None


class OperatorMailbox:
    """The two ConfigMaps of the ElasticJob `job`, over a store's connection."""

    def __init__(self, store: KubernetesStore, job: str) -> None:
        self._store = store
        self._directive = directive_name(job)
        self._report = report_name(job)

    async def directives(self) -> AsyncGenerator[Directive | None, None]:
        """Yield the current directive and each later one; None while there is none."""
        store = self._store
        follow = follow_one(store.api, CONFIGMAPS, store.namespace, self._directive, ConfigMap)
        async with contextlib.aclosing(follow) as changes:
            async for found in changes:
                yield None if found is None else read_directive(found.data or {})

    async def last_report(self) -> JobReport | None:
        """Return the last report of this or an earlier coordinator."""
        store = self._store
        found = await store.api.find(CONFIGMAPS, store.namespace, self._report, ConfigMap)
        try:
            return msgspec.json.decode(
                ((found and found.data) or {}).get(REPORT_KEY, ""), type=JobReport
            )
        except UNREADABLE:
            return None

    async def report(self, report: JobReport) -> None:
        """Replace the last report."""
        store = self._store
        patch = {"data": {REPORT_KEY: msgspec.json.encode(report).decode()}}
        await store.api.patch(CONFIGMAPS, store.namespace, self._report, patch, ConfigMap)


def read_directive(data: dict[str, str]) -> Directive:
    """Read the directive's data; a value that makes no sense counts as absent."""
    nodes: tuple[int, int] | None = None
    written = (data.get("min", ""), data.get("max", ""))
    if all(text.isdecimal() and len(text) < 7 for text in written):
        low, high = int(written[0]), int(written[1])
        nodes = (low, high) if 1 <= low <= high else None
    if nodes is None and any(written):
        _log.warning("directive: min %r and max %r are no range of nodes", *written)
    fenced = data.get("fenced", "").split()
    return Directive(nodes, tuple(fenced[:UIDS_MAX]), tuple(dead_in(data)[:UIDS_MAX]))


class OwnedCoordinator(Protocol):
    """The part of a coordinator that the operator of its job may command."""

    def fence(self, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
        """Exclude the fenced pods, and stop waiting for the dead ones."""

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Set how many nodes the job may have."""


class CoordinatorView(Protocol):
    """The state of a coordinator, for reports."""

    def report(self) -> Report:
        """Return the state that `elastane status` shows."""

    def presence(self) -> list[AgentPresence]:
        """Return the agents that are present, away or departed."""


class OperatorBridge:
    """The exchange of one coordinator with the operator; `run` lasts as long as the coordinator."""

    def __init__(self, mailbox: OperatorMailbox) -> None:
        self._mailbox = mailbox
        self._faults: dict[str, str] = {}

    async def run(
        self, coordinator: OwnedCoordinator, state: CoordinatorView, begun: asyncio.Event
    ) -> None:
        """Serve both directions until cancelled; set `begun` once the directive is known.

        `begun` is also set after FIRST_LOOK_S without an answer: the API server is away then, and
        no world can be formed either, since it is also the store.
        """
        loop = asyncio.get_running_loop()
        late = loop.call_later(FIRST_LOOK_S, begun.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_directives(coordinator, begun))
                tasks.create_task(self._report(state))
        finally:
            late.cancel()
            begun.set()

    async def _pass_directives(self, coordinator: OwnedCoordinator, begun: asyncio.Event) -> None:
        """Hand each new directive to the coordinator."""
        last: Directive | None = None
        while True:
            try:
                async for directive in self._mailbox.directives():
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
                    begun.set()  # The directive is unreadable: waiting longer would not help.
            await asyncio.sleep(RETRY_S)

    async def _report(self, state: CoordinatorView) -> None:
        """Report each change, and an unchanged state each REFRESH_S."""
        summary = Summary(await self._last_report())
        last: JobReport | None = None
        while True:
            report = summary.update(state.report(), state.presence(), time.time())
            if last is None or is_due(last, report):
                try:
                    await self._mailbox.report(report)
                    last = report
                    self._note("report", "")
                except ElastaneError as error:
                    self._note("report", error.what)
            await asyncio.sleep(REPORT_S)

    async def _last_report(self) -> JobReport | None:
        while True:
            try:
                return await self._mailbox.last_report()
            except ElastaneError as error:
                self._note("report", error.what)
            await asyncio.sleep(RETRY_S)

    def _note(self, what: str, fault: str) -> None:
        """Log once that the operator cannot be reached, and once that it can again."""
        if fault != self._faults.get(what, ""):
            _log.warning("the operator's %s: %s", what, fault or "works again")
            self._faults[what] = fault


class Summary:
    """Sums a job's state over time up to one report; `before` is an earlier coordinator's last."""

    def __init__(self, before: JobReport | None) -> None:
        self._incident = before.incident if before else ""
        self._incident_at_s = before.incident_at_s if before else 0.0
        self._step = before.step if before else 0
        self._paces: deque[tuple[float, int]] = deque()
        self._fence: Fence | None = None
        self._departed: dict[str, int] = {}
        self._joined: dict[str, int] = {}

    def update(self, report: Report, agents: list[AgentPresence], now_s: float) -> JobReport:
        """Return the report of this moment; `now_s` is in seconds since the epoch."""
        if report.last_incident and report.last_incident != self._incident:
            self._incident = report.last_incident
            self._incident_at_s = now_s
        # In a new world no worker has reported a step yet, so the last known step is kept.
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
            members=self._members(agents),
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

    def _members(self, agents: list[AgentPresence]) -> tuple[MemberReport, ...]:
        """Return all present pods, and the newest of the departed ones."""
        states = {agent.incarnation.partition(".")[0]: agent for agent in agents}
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


def is_due(last: JobReport, report: JobReport) -> bool:
    """Whether a report is due: the state changed, or the last report is old."""
    if report.at_s - last.at_s >= REFRESH_S or report.at_s < last.at_s:
        return True
    moving = {"at_s": 0.0, "step": 0, "steps_per_s": 0.0}
    return msgspec.structs.replace(last, **moving) != msgspec.structs.replace(report, **moving)
