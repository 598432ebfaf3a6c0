"""Runs the site's health check of this node, before it joins and after each fault of its workers.

The check after a fault runs beside the recovery, which never waits for it. If the check fails, the
node leaves between two steps, as for a notice. Its exit code says that another node may do better.
A check that exceeds its time limit counts as failed, because a program that asks a broken device
may hang. Two checks begin at least `PAUSE_S` apart; one check covers all faults in between. Before
the node has joined, a failed check raises NodeUnfitError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from elastane.errors import ConfigurationError, NodeUnfitError
from elastane.notices.rules import REASON_CHARS_MAX, printable
from elastane.options.config import Supervision
from elastane.process.site_program import REST_S, lines_of, running
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.events import Notice
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import Outcome

SLUG = "node-unhealthy"
# Tells the check when it runs: JOIN or FAULT.
VARIABLE = "ELASTANE_HEALTH_CHECK"
JOIN, FAULT = "join", "fault"
# The shortest time between two checks, so that a crash loop does not keep the node busy with them.
PAUSE_S = 10.0
# The last lines of its output go to the console if it fails; the last one is the reason.
_LINES_SHOWN = 20
_NEXT_STEP = "mend the node, or leave it out; to see more, run the check there by hand"

_log = logging.getLogger("elastane.agent")


class HealthCheck:
    """The health check of one agent; without a command every node is fit."""

    def __init__(
        self,
        settings: Supervision,
        environ: Mapping[str, str],
        node_id: str,
        write: Callable[[LogEvent], None],
    ) -> None:
        self._words, self._limit_s = settings.health_check, settings.health_check_s
        self._environ = environ
        self._node_id = node_id
        self._write = write
        self._fault = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    async def before_join(self) -> None:
        """Check the node; raises NodeUnfitError if it is not fit."""
        if not self._words:
            return
        why = await self._check(JOIN)
        if why:
            raise NodeUnfitError(
                f"this node does not join: {why}",
                slug=SLUG,
                where=f"--health-check {' '.join(self._words)}",
                next_step=_NEXT_STEP,
            )

    def start(self, report: Callable[[Notice], None]) -> None:
        """Check the node after each fault from now on; `report` makes it leave."""
        if self._words:
            self._task = asyncio.create_task(self._follow(report))

    def fault_seen(self) -> None:
        """Check the node once more, because a worker had a fault."""
        self._fault.set()

    async def close(self) -> None:
        """End a check that still runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def outcome(self) -> Outcome | None:
        """Why this agent left a job that continues; None while its node is fit."""
        if not self._failure:
            return None
        return Outcome(
            ok=False,
            reason=f"this node left the job: {self._failure}",
            slug=SLUG,
            exit_code=int(NodeUnfitError.exit_code),
            next_step=_NEXT_STEP,
        )

    async def _follow(self, report: Callable[[Notice], None]) -> None:
        while True:
            await self._fault.wait()
            self._fault.clear()
            self._failure = await self._check(FAULT)
            if self._failure:
                report(Notice("health-check", self._failure, unfit=True))
                return
            await asyncio.sleep(PAUSE_S)

    async def _check(self, when: str) -> str:
        """Return why the node is not fit, or an empty string."""
        begun_s = time.monotonic()
        lines: deque[str] = deque(maxlen=_LINES_SHOWN)
        try:
            async with asyncio.timeout(self._limit_s):
                why = await self._run(when, lines)
        except TimeoutError:
            why = f"no end within {self._limit_s:g} s"
        except ConfigurationError as error:
            why = f"{error.what}; expected {error.expected}"
        took_s = round(time.monotonic() - begun_s, 3)
        reason = "passed"
        if why:
            last = printable(lines[-1])[:REASON_CHARS_MAX] if lines else ""
            reason = f"the health check failed: {why}{': ' if last else ''}{last}"
            for line in lines:
                _log.warning("health check: %s", printable(line))
        self._write(
            LogEvent(
                kind=EventKind.HEALTH_CHECK,
                reason=reason,
                node_id=self._node_id,
                data={"ok": not why, "when": when, "took_s": took_s},
            )
        )
        return reason if why else ""

    async def _run(self, when: str, lines: deque[str]) -> str:
        """Run the check; return how it failed, or an empty string. Its output goes to `lines`."""
        environ = {**self._environ, VARIABLE: when}
        async with running(self._words, environ, errors_too=True) as (process, output):
            reading = asyncio.create_task(_take(output, lines))
            try:
                code = await process.wait()
                await asyncio.wait({reading}, timeout=REST_S)
            finally:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reading
        return "" if code == 0 else exit_text(code)


async def _take(output: asyncio.StreamReader, lines: deque[str]) -> None:
    async for line in lines_of(output):
        lines.append(line)
