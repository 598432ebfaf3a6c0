"""The local worker group of one attempt, as processes.

Owns their start, their end, and that nothing of them is left afterwards. It decides nothing: it
posts what happened as events, and does what the core's effects say. A worker that cannot be
started is a failed worker, with the error as its message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial

from elastane.agent.environment import RunFacts, WorkerFacts, worker_args, worker_environment
from elastane.agent.lastwords import LastWords, read_last_words
from elastane.agent.offers import OfferedPort
from elastane.core.diagnosis import exit_text
from elastane.core.events import (
    AgentEvent,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupStarted,
    WorkerFailed,
    WorkerSucceeded,
)
from elastane.core.limits import FAILURE_TEXT_CHARS_MAX
from elastane.core.model import Assignment, Failure, Offer
from elastane.errors import ElastaneError
from elastane.runtime.offload import Offload
from elastane.runtime.page import Page
from elastane.runtime.process import Spawner, WorkerCommand, WorkerKind, WorkerProcess
from elastane.runtime.strays import kill_strays
from elastane.runtime.streams import GroupStreams, LogPlan, WorkerStreams

_log = logging.getLogger("elastane.workers")
# The page's descriptor in every worker: above what programs open by themselves.
_PAGE_FD = 250
# How often a drain looks at the pages of its workers; only while a drain lasts.
_DRAIN_POLL_S = 0.002
# A SIGKILLed process in uninterruptible sleep may take its time; then it is reported, not hidden.
_KILL_WAIT_S = 5.0
# Between two store processes, so that one that cannot live costs little.
_STORE_PAUSE_S = 0.2
# Reading a failed worker's last words from its log folder, which may be a network's.
_WORDS_WAIT_S = 1.0
# What the exit code of a worker that could not be started says: command cannot be executed.
_EXIT_NOT_STARTED = 126


@dataclass(frozen=True)
class GroupSetup:
    """What all attempts of one agent have in common."""

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    leash: str
    run: RunFacts
    logs: LogPlan
    spawner: Spawner
    # One for all attempts: its threads serve the next one too.
    offload: Offload = field(default_factory=Offload)


@dataclass
class _Worker:
    local_rank: int
    rank: int
    streams: WorkerStreams
    page: Page
    process: WorkerProcess | None = None
    termed: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.exit_code is None


@dataclass
class WorkerGroup:
    """One start of the local workers; `post` takes the events."""

    setup: GroupSetup
    assignment: Assignment
    port: OfferedPort
    post: Callable[[AgentEvent], None]
    _workers: list[_Worker] = field(default_factory=list)
    _store: WorkerProcess | None = None
    _streams: GroupStreams | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _starting: asyncio.Task[None] | None = None
    _minding: asyncio.Task[None] | None = None
    _kill: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def begin(self) -> None:
        """Start the workers in the background; `GroupStarted` and their ends are posted."""
        self._starting = self._spawn_task(self._start())

    def stop(self, grace_s: float) -> None:
        """Stop the workers in the background; a later call may shorten the grace."""
        if grace_s <= 0:
            self._kill.set()
        else:
            handle = asyncio.get_running_loop().call_later(grace_s, self._kill.set)
            _log.debug("grace of %.1f s ends at %s", grace_s, handle.when())
        if not self._stopping:
            self._stopping = True
            self._spawn_task(self._stop())

    def mark(self) -> None:
        """Gate the workers that ask should_checkpoint(), and post how far the furthest is."""
        for worker in self._workers:
            worker.page.gate()
        calls = max((w.page.calls for w in self._workers if w.is_alive), default=0)
        self.post(GroupMarked(self.assignment.fence, calls or None))

    def aim(self, calls: int | None) -> None:
        """Have all workers checkpoint: at call number `calls`, or on SIGTERM if they catch it."""
        self._spawn_task(self._drain(calls))

    def progress(self) -> int | None:
        """Return the least call count of the workers that ask should_checkpoint()."""
        counts = [w.page.calls for w in self._workers if w.is_alive]
        return min(counts) if counts and all(counts) else None

    async def _start(self) -> None:
        fence, run = self.assignment.fence, self.setup.run
        self._streams = GroupStreams(
            self.setup.logs, run.job, run.node_id, fence, self.setup.offload
        )
        try:
            if self.assignment.agent_store and self.assignment.node_rank == 0:
                self._store = await self._serve_store()
                self._minding = self._spawn_task(self._mind_store())
            for local_rank in range(run.local_world_size):
                await self._start_one(local_rank)
                if self._stopping:
                    break
        finally:
            self._streams.close_worker_ends()
        pids = tuple(w.process.pid for w in self._workers if w.process is not None)
        self.post(GroupStarted(fence, pids))

    async def _serve_store(self) -> WorkerProcess | None:
        try:
            return await self.setup.spawner.serve_store(self.port.socket)
        except (ElastaneError, OSError) as error:
            failure = Failure(
                local_rank=0,
                rank=self.assignment.rank_base,
                pid=0,
                exit_code=_EXIT_NOT_STARTED,
                message=f"the process-group store was not started: {error}",
            )
            self.post(WorkerFailed(self.assignment.fence, failure))
            return None

    async def _mind_store(self) -> None:
        """Serve again where the store's process ended: late workers would wait for ever."""
        while self._store is not None:
            code = await self._store.wait()
            if not self._stopping:
                _log.error("the process-group store ended (%s); starting another", exit_text(code))
                await asyncio.sleep(_STORE_PAUSE_S)
            if self._stopping:
                return
            self._store = await self._serve_store()
            self._end_late_store()

    def _end_late_store(self) -> None:
        if self._stopping and self._store is not None:
            self._store.kill_group(signal.SIGKILL)

    async def _start_one(self, local_rank: int) -> None:
        assert self._streams is not None
        rank = self.assignment.rank_base + local_rank
        streams = await self._streams.open_soon(local_rank, rank, self.setup.run.role)
        worker = _Worker(local_rank, rank, streams, Page.create())
        self._workers.append(worker)
        try:
            worker.process = await self.setup.spawner.spawn(self._command(worker))
        except (ElastaneError, OSError) as error:
            failure = self._failure(
                worker, 0, _EXIT_NOT_STARTED, LastWords(f"not started: {error}")
            )
            self.post(WorkerFailed(self.assignment.fence, failure))
            return
        self._watches.add(self._spawn_task(self._watch(worker, worker.process)))

    def _command(self, worker: _Worker) -> WorkerCommand:
        setup = self.setup
        facts = WorkerFacts(
            local_rank=worker.local_rank,
            error_file=worker.streams.error_file,
            page_fd=_PAGE_FD,
            leash=setup.leash,
        )
        return WorkerCommand(
            kind=setup.kind,
            target=setup.target,
            args=worker_args(setup.args, worker.local_rank),
            env=worker_environment(setup.environment, self.assignment, setup.run, facts),
            cwd=setup.cwd,
            stdin=0,
            stdout=worker.streams.stdout,
            stderr=worker.streams.stderr,
            fds={_PAGE_FD: worker.page.fd},
        )

    async def _watch(self, worker: _Worker, process: WorkerProcess) -> None:
        code = await process.wait()
        ended_s = time.monotonic()
        if code == 0:
            self.post(WorkerSucceeded(self.assignment.fence, worker.local_rank))
            return
        try:
            read = partial(read_last_words, worker.streams)
            words = await self.setup.offload.run(read, _WORDS_WAIT_S)
        except TimeoutError:
            words = LastWords()  # The log folder hangs; the failure must be told all the same.
        failure = self._failure(worker, process.pid, code, words, time.monotonic() - ended_s)
        self.post(WorkerFailed(self.assignment.fence, failure))

    def _failure(
        self, worker: _Worker, pid: int, code: int, words: LastWords, age_s: float = 0.0
    ) -> Failure:
        return Failure(
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=pid,
            exit_code=code,
            age_s=age_s,
            message=words.message[-FAILURE_TEXT_CHARS_MAX:],
            error_file=words.error_file,
            log_file=worker.streams.stderr_path,
        )

    async def _drain(self, calls: int | None) -> None:
        for worker in self._workers:
            if calls is not None:
                worker.page.aim(calls)
            elif worker.process is not None and worker.process.catches(signal.SIGTERM):
                worker.termed = True
                worker.process.send_signal(signal.SIGTERM)
        # A page of memory has no event that could be waited for.
        while not self._stopping and any(  # noqa: ASYNC110
            self._is_busy(w, calls) for w in self._workers
        ):
            await asyncio.sleep(_DRAIN_POLL_S)
        if not self._stopping:
            self.post(GroupDrained(self.assignment.fence))

    @staticmethod
    def _is_busy(worker: _Worker, calls: int | None) -> bool:
        if not worker.is_alive:
            return False
        return worker.termed if calls is None else not worker.page.is_parked

    async def _stop(self) -> None:
        await self._end_start()
        alive = [w.process for w in self._workers if w.process is not None and w.is_alive]
        for worker in self._workers:
            # One that was asked to checkpoint by SIGTERM is not asked twice.
            if worker.process is not None and worker.is_alive and not worker.termed:
                worker.process.send_signal(signal.SIGTERM)
        ended = asyncio.create_task(_wait_all(alive))
        kill = asyncio.create_task(_wait_set(self._kill))
        await asyncio.wait({ended, kill}, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill_group(signal.SIGKILL)
        await self._reap(ended)
        await self._finish()

    async def _end_start(self) -> None:
        """Wait for the start in hand; one that waits for a zygote's imports is given up."""
        assert self._starting is not None, "begin() comes first"
        if not self.setup.spawner.warm.is_set():
            self._starting.cancel()
        await asyncio.wait({self._starting})

    async def _reap(self, ended: asyncio.Task[None]) -> None:
        """Wait for what was killed; what a worker left behind is killed as well."""
        if self._store is not None:
            self._store.kill_group(signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILL_WAIT_S):
                await asyncio.shield(ended)
        except TimeoutError:
            pids = [w.process.pid for w in self._workers if w.process is not None and w.is_alive]
            _log.error(
                "workers %s were killed but do not end (uninterruptible sleep in the kernel?);"
                " waiting on [worker-unkillable]",
                pids,
            )
            await ended
        if self._minding is not None:
            await asyncio.wait({self._minding})
        if self._watches:
            # Each says how its worker ended, within a bound; of a group that is gone nobody hears.
            await asyncio.wait(self._watches)
        strays = await kill_strays()
        if strays:
            _log.info("killed %d processes that workers had left behind", strays)

    async def _finish(self) -> None:
        if self._streams is not None:
            await self._streams.finish()
        for worker in self._workers:
            worker.page.close()
        self.post(GroupGone(self.assignment.fence, self._next_offer()))

    def _next_offer(self) -> Offer:
        """Hold a new port: this attempt's may still be known to somebody."""
        self.port.close()
        return self.port.open()

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Our bug; the agent must not live on with a group that nobody watches.
            _log.critical("the worker group's task failed", exc_info=task.exception())
            os.kill(os.getpid(), signal.SIGABRT)


async def _wait_all(processes: list[WorkerProcess]) -> None:
    for process in processes:
        await process.wait()


async def _wait_set(event: asyncio.Event) -> None:
    await event.wait()
