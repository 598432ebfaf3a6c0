"""Follows jobs: their event logs as these grow, and their coordinators' reports.

The log is read in a thread, piece by piece, so that a slow disk or a long log stops nothing else. A
coordinator is asked only while a page is open. The page follows a job from the first request on,
and lets it go when others are asked for. Each publication counts up; a stream waits for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from elastane.coordinator.client import query
from elastane.dashboard.index import EventFilter, EventIndex, EventPage
from elastane.dashboard.scalars import ScalarReader
from elastane.dashboard.snapshot import (
    BUCKETS,
    Sections,
    SourceFacts,
    sections_of,
    shown_until_s,
)
from elastane.errors import ElastaneError
from elastane.observe.account import Accountant
from elastane.observe.box import without_carets
from elastane.observe.deposed import Decided
from elastane.observe.events import EventReader, PlacedEvent
from elastane.observe.incidents import IncidentView
from elastane.observe.rates import Series, series_of
from elastane.observe.view import JobView, after_event, after_steps, tone_of
from elastane.process.endpoint import parse_endpoint
from elastane.process.files import JobEntry, JobRegistry, safe_name
from elastane.process.tls import TlsConfig
from elastane.protocol.messages import Report
from elastane.protocol.wire import derive_secret

# At most two publications a second: a person does not read faster.
PUBLISH_S = 0.5
REPORT_S = 1.0
# Agents report steps once a second, so a rate over less time than this is noise.
STEPS_S = 5.0
# The agents of a job are looked for in the runtime folder.
AGENTS_S = 2.0
REPORT_TIMEOUT_S = 3.0
# A question that runs when no page is open any more is answered in milliseconds, or not at all.
CLOSE_S = 1.0
# While a long log is read, a publication takes time from the reading.
PUBLISH_READING_S = 2.0
# Events between two looks at the other tasks: some tens of milliseconds.
PIECE_EVENTS = 1000
# Events of one look at all files: of a thousand files it takes as long as 10,000 events.
READ_EVENTS = 16 * PIECE_EVENTS
# Jobs whose views are kept in memory.
FOLLOWED_MAX = 8
# States in which nothing of a job runs any more.
OVER = frozenset({"done", "failed", "stopped"})
JOBS_LISTED_MAX = 200


class JobName(msgspec.Struct, frozen=True, kw_only=True):
    """One job that can be shown."""

    key: str
    name: str
    is_running: bool
    touched_s: float


class JobPublication(msgspec.Struct, frozen=True, kw_only=True):
    """All sections of a job as JSON, each with the number of its last change."""

    number: int
    now_s: float
    sections: dict[str, tuple[int, msgspec.Raw]]

    def since(self, number: int) -> dict[str, msgspec.Raw]:
        """Return the sections that changed after publication `number`."""
        return {name: raw for name, (at, raw) in self.sections.items() if at > number}


class JobFollower:
    """The view of one job, its account and its coordinator's report, kept up to date until `close`.

    `watchers`: how many look at it. Memory does not grow with the log.
    """

    def __init__(
        self,
        key: str,
        folder: Path,
        find_agents: Callable[[str], list[JobEntry]],
        tls: TlsConfig | None,
    ) -> None:
        self.key = key
        self.folder = folder
        self.view = JobView()
        self.watchers = 0
        self._tls = tls
        self._events = 0
        self._share_read = 0.0
        self._accountant = Accountant()
        self._reader = EventReader(folder)
        self._decided: Decided[PlacedEvent] = Decided(lambda placed: placed.event)
        self._scalars = ScalarReader(folder)
        self._find_agents = find_agents
        self._agents: list[JobEntry] = []
        self._report: Report | None = None
        self._has_read, self._has_looked, self._has_asked = (asyncio.Event() for _ in range(3))
        self._question: asyncio.Task[Report | None] | None = None
        self._tasks = [
            asyncio.create_task(self._follow_agents()),
            asyncio.create_task(self._follow_log()),
            asyncio.create_task(self._follow_coordinator()),
        ]

    async def close(self) -> None:
        """Stop following; a question to the coordinator that runs gets CLOSE_S for its answer."""
        if self._question is not None:
            await asyncio.wait([self._question], timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ready(self) -> None:
        """Wait until the log was read, and the coordinator asked if an agent runs here."""
        await self._has_asked.wait()

    @property
    def has_agents(self) -> bool:
        """Whether an agent of the job runs on this machine."""
        return bool(self._agents)

    @property
    def nodes_here(self) -> set[str]:
        """The nodes of the job whose agents run on this machine."""
        return {entry.node for entry in self._agents}

    @property
    def report(self) -> Report | None:
        """The coordinator's last report; None without an answer."""
        return self._report

    @property
    def share_read(self) -> float:
        """Which share of the log was read, from 0 to 1."""
        return 1.0 if self._has_read.is_set() else min(self._share_read, 0.99)

    @property
    def is_ready(self) -> bool:
        """Whether the log was read, and the coordinator asked if an agent runs here."""
        return self._has_asked.is_set()

    def check(self) -> None:
        """Raise what ended the following, if something did."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def sections(self) -> Sections:
        """Return what is shown of the job now."""
        source = SourceFacts(
            now_s=time.time(),
            key=self.key,
            folder=str(self.folder.absolute()),
            events=self._events,
            has_agents=bool(self._agents),
            share_read=self.share_read,
            report=self._report,
            scalars=self._scalars.curves,
        )
        until_s = shown_until_s(self.view, source)
        return sections_of(self.view, source, self._accountant.account(self.view, until_s))

    def _note(self, placed: PlacedEvent, before: JobView) -> None:
        """Note an event that was added; `before`: the view before it."""

    async def _publish(self) -> None:
        """Say that a piece of the log was read."""

    def _is_to_ask(self) -> bool:
        """Return whether the coordinator's report is wanted now."""
        return self.watchers > 0

    async def _follow_log(self) -> None:
        while True:
            placed = await asyncio.to_thread(self._reader.read, READ_EVENTS)
            self._share_read = await asyncio.to_thread(self._reader.share)
            for begin in range(0, len(placed), PIECE_EVENTS):
                if begin:  # The last piece is published below, where it is known to be the last.
                    await self._publish()
                    await asyncio.sleep(0)
                for one in placed[begin : begin + PIECE_EVENTS]:
                    self._add_all(self._decided.take(one))
            await asyncio.to_thread(self._scalars.read)
            if len(placed) < READ_EVENTS:
                self._add_all(self._decided.due(time.time()))
                self._has_read.set()
            await self._publish()
            await asyncio.sleep(0 if len(placed) == READ_EVENTS else PUBLISH_S)

    def _add_all(self, found: Iterable[PlacedEvent]) -> None:
        for one in found:
            self._add(one)

    def _add(self, placed: PlacedEvent) -> None:
        """Add one event to the view and the account."""
        before = self.view
        self.view = after_event(before, placed.event)
        self._events = self._events + 1 if self.view.run == before.run else 1
        self._accountant.add(placed.event, self.view)
        self._note(placed, before)

    async def _follow_agents(self) -> None:
        while True:
            name = self.view.job or self.key
            self._agents = await asyncio.to_thread(self._find_agents, name)
            self._has_looked.set()
            await asyncio.sleep(AGENTS_S)

    async def _follow_coordinator(self) -> None:
        """Ask for reports while a page is open; without an answer the last one is dropped."""
        await self._has_read.wait()
        await self._has_looked.wait()
        while True:
            if self._is_to_ask() and self._agents and self.view.end is None:
                self._question = asyncio.create_task(self._ask())
                self._report = await self._question
                if self._report is not None:
                    self._add_steps(self._report)
            else:
                self._report = None
            self._has_asked.set()
            await asyncio.sleep(REPORT_S)

    async def _ask(self) -> Report | None:
        entry = self._agents[-1]  # the youngest agent has the newest address
        secret = derive_secret(entry.job, entry.token or None)
        with contextlib.suppress(ElastaneError, OSError):
            at = parse_endpoint(entry.endpoint)
            return await query(at.host, at.port, entry.job, secret, self._tls, REPORT_TIMEOUT_S)
        return None

    def _add_steps(self, report: Report) -> None:
        counts = [node.progress for node in report.nodes if node.node_rank is not None]
        made = [count for count in counts if count is not None]
        last_s = self.view.steps[-1].time_s if self.view.steps else 0.0
        if made and len(made) == len(counts) and time.time() - last_s >= STEPS_S:
            self.view = after_steps(self.view, time.time(), min(made))


class FollowedJob(JobFollower):
    """One job that is followed for the page: its events are found again, its sections published."""

    def __init__(
        self,
        key: str,
        folder: Path,
        find_agents: Callable[[str], list[JobEntry]],
        tls: TlsConfig | None,
    ) -> None:
        super().__init__(key, folder, find_agents, tls)
        self.used_s = time.monotonic()
        self.publication = JobPublication(number=0, now_s=time.time(), sections={})
        self._index = EventIndex()
        self._changed = asyncio.Condition()
        self._encode = msgspec.json.Encoder().encode

    async def next_publication(self, number: int, timeout_s: float) -> JobPublication | None:
        """Return the first publication after `number`; None if none comes in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.publication.number > number)
                return self.publication
        return None

    async def events(self, wanted: EventFilter) -> EventPage:
        """Return a page of events."""
        return await asyncio.to_thread(self._index.page, wanted)

    def incident(self, number: int) -> IncidentView | None:
        """Return one incident whole."""
        found = self.view.incidents.by_number(number)
        if found is None or not found.message:
            return found
        said = "\n".join(without_carets(found.message.split("\n")))
        return msgspec.structs.replace(found, message=said)

    def series(self, from_s: float, to_s: float) -> Series:
        """Return the curves of a span of time."""
        return series_of(self.view, from_s, to_s, BUCKETS, time.time())

    def _note(self, placed: PlacedEvent, before: JobView) -> None:
        if self.view.run != before.run:
            self._index = EventIndex()
        tone = tone_of(placed.event, before.node(placed.event.node))
        self._index.add(placed, tone, self.view.incidents.belongs_to)

    async def _publish(self) -> None:
        now_s = time.time()
        pause_s = PUBLISH_S if self._has_read.is_set() else PUBLISH_READING_S
        if self.publication.number and now_s - self.publication.now_s < pause_s:
            return
        sections = self.sections()
        number, old = self.publication.number + 1, self.publication.sections
        new: dict[str, tuple[int, msgspec.Raw]] = {}
        for name in sections.__struct_fields__:
            raw = self._encode(getattr(sections, name))
            before = old.get(name)
            same = before is not None and bytes(before[1]) == raw
            new[name] = before if same and before is not None else (number, msgspec.Raw(raw))
        async with self._changed:
            self.publication = JobPublication(number=number, now_s=now_s, sections=new)
            self._changed.notify_all()


class Jobs:
    """The jobs of a folder of logs and those that run on this machine."""

    def __init__(
        self,
        base_dir: Path,
        registry: JobRegistry,
        chosen: Path | None = None,
        tls: TlsConfig | None = None,
    ) -> None:
        self.chosen = chosen
        self._tls = tls
        # Numbers of publications begin again with each server.
        self.server_id = secrets.token_hex(4)
        self._base_dir = base_dir
        self._registry = registry
        self._followed: dict[str, FollowedJob] = {}

    def listed(self) -> list[JobName]:
        """Return the jobs, those that run first, then the newest; reads folders."""
        running = {safe_name(entry.job) for entry in self._registry.running()}
        found = [
            JobName(
                key=key,
                name=key,
                is_running=key in running,
                touched_s=_touched_s(folder),
            )
            for key, folder in self._folders().items()
        ]
        found.sort(key=lambda job: (not job.is_running, -job.touched_s))
        return found[:JOBS_LISTED_MAX]

    async def follow(self, key: str) -> FollowedJob | None:
        """Return the job of this name, followed from now on; None if there is none."""
        job = self._followed.get(key)
        if job is None:
            folder = (await asyncio.to_thread(self._folders)).get(key)
            if folder is None:
                return None
            job = self._followed.get(key) or self._begin(key, folder)  # another may have come first
            await self._let_go(job)
        job.used_s = time.monotonic()
        return job

    async def close(self) -> None:
        """Stop following all jobs."""
        for job in self._followed.values():
            await job.close()

    def _begin(self, key: str, folder: Path) -> FollowedJob:
        job = FollowedJob(key, folder, self._registry.running, self._tls)
        self._followed[key] = job
        return job

    async def _let_go(self, kept: FollowedJob) -> None:
        """Let the job go that was not asked for the longest, if there are too many."""
        idle = [job for job in self._followed.values() if not job.watchers and job is not kept]
        if len(self._followed) > FOLLOWED_MAX and idle:
            oldest = min(idle, key=lambda job: job.used_s)
            del self._followed[oldest.key]
            await oldest.close()

    def _folders(self) -> dict[str, Path]:
        """Return the folder of each job by its key."""
        found: dict[str, Path] = {}
        for entry in self._registry.running():
            if entry.log_dir and (folder := Path(entry.log_dir) / safe_name(entry.job)).is_dir():
                found[folder.name] = folder
        if self._base_dir.is_dir():
            for folder in self._base_dir.iterdir():
                if any(folder.glob("events.*.jsonl")):
                    found.setdefault(folder.name, folder)
        if self.chosen is not None:
            found[self.chosen.name] = self.chosen
        return found


def _touched_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
