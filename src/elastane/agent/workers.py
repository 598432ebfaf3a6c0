"""The local worker group of one attempt, as processes.

Owns the start and the end of the workers, and leaves no process of theirs. It decides nothing: it
reports events and carries out effects. A worker that cannot be started is a failed worker, with the
error as its message. A worker that no signal ends is given up after
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT; `lost` then says why this node is unfit for more
workers.

`GroupDrain` brings the workers to one common call, or ends them by SIGTERM. `Outputs` holds their
output streams, one set for each start under a fence.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from elastane.agent.control_sockets import ControlSockets, place_message
from elastane.agent.failure_reports import OomCounters, kill_evidence, read_memory
from elastane.agent.first_steps import Beginning, FirstSteps
from elastane.agent.hang_monitor import UNKILLABLE_SLUG, HangMonitor
from elastane.agent.outside_stacks import stacks_of
from elastane.agent.process_group_store import OfferedPort, StoreHost
from elastane.agent.spares import Spares
from elastane.agent.standstill import MonitorPosts
from elastane.agent.worker import EXIT_NOT_STARTED, GroupSetup, LocalWorker, SpawnTask, end_expired
from elastane.errors import ElastaneError
from elastane.process import control_socket
from elastane.process.control_socket import CheckpointWritten
from elastane.process.process import WorkerProcess, kill_strays
from elastane.process.status_page import StatusPage
from elastane.process.streams.console import process_console
from elastane.process.streams.group import GroupStreams
from elastane.process.timers import WorkerTimer
from elastane.process.worker_environment import WorkerFacts, worker_environment
from elastane.protocol.culprits import StandstillEvidence
from elastane.protocol.diagnosis import is_lost_peer, says_mismatch
from elastane.protocol.effects import AimGroup, MarkGroup
from elastane.protocol.events import (
    AgentEvent,
    CulpritFound,
    GroupAble,
    GroupCalls,
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupPaused,
    GroupStandstill,
    GroupStarted,
    GroupTraining,
    GroupWroteCheckpoint,
    ReplicaDiffered,
    Signalled,
    WorkerFailed,
    WorkerLost,
    WorkerStacks,
    WorkerSucceeded,
)
from elastane.protocol.limits import FAILURE_TEXT_CHARS_MAX
from elastane.protocol.model import UNUSED, Assignment, CheckpointUse, Failure, Fence, Joining
from elastane.protocol.pauses import Pause
from elastane.protocol.ring import CALLERS_MAX, WorkerCalls
from elastane.protocol.verdicts import Verdict

_log = logging.getLogger("elastane.workers")
_streams_log = logging.getLogger("elastane.streams")
# A SIGKILLed process in uninterruptible sleep may end late; after this time it is reported.
_KILL_WAIT_S = 5.0
# By then a worker has imported its modules; a job that ends sooner has no use for a new zygote.
_LEARN_AFTER_S = 20.0
# How often a drain reads the pages of its workers; only while a drain lasts.
_POLL_S = 0.002
# A class may create folders on a slow network file system, which takes longer than a local look-up.
_CHOOSE_S = 10.0


@dataclass
class LocalWorkerGroup:
    """One start of the local workers; `post` receives the events."""

    setup: GroupSetup
    assignment: Assignment
    port: OfferedPort
    post: Callable[[AgentEvent], None]
    lost: str = ""
    world: Assignment = field(init=False)  # the world in which the workers have their places now
    _workers: list[LocalWorker] = field(default_factory=list)
    _memory: OomCounters = field(default_factory=OomCounters)
    _outputs: Outputs = field(init=False)
    _sockets: ControlSockets = field(init=False)
    _store_host: StoreHost = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _start_task: asyncio.Task[None] | None = None
    drain: GroupDrain = field(init=False)
    hang_monitor: HangMonitor = field(init=False)
    _first_steps: FirstSteps = field(init=False)
    _spares: Spares = field(init=False)
    _kill: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False
    _reported_recoverable: bool = False
    _stopped_s: float = 0.0
    _until_ns: int = 0

    def __post_init__(self) -> None:
        self.world = self.assignment
        self._outputs = Outputs(self.setup)
        self._sockets = ControlSockets(
            self._post_recoverable,
            self._post_lost,
            self._answered,
            self._post_differed,
            self.report_checkpoint,
        )
        self._store_host = StoreHost(self.setup.spawner, self._store_failed, self._spawn_task)
        self.drain = GroupDrain(self._members, self._sockets, self.post, self._spawn_task)
        self._spares = Spares(self.setup, self._sockets, self._spawn_task)
        posts = MonitorPosts(
            self._post_failed, self._post_culprit, self._post_evidence, self._post_pause
        )
        self.hang_monitor = HangMonitor(
            self._members, self._sockets, posts, self._spawn_task, self.setup
        )

        self._first_steps = FirstSteps(
            self._members, self._sockets, self._post_training, self._spawn_task
        )

    def begin(self) -> None:
        """Start the workers in the background; `GroupStarted` and their ends are posted."""
        if self.setup.timers is not None:
            self.setup.timers.pass_to(self._expire)
        # The port is taken here, so that the agent offers another one from now on.
        port = self._next_port(self.assignment) if self.assignment.node_rank == 0 else None
        self._start_task = self._spawn_task(self._start(port))

    def allow_until(self, boot_ns: int) -> None:
        """Let workers pass step boundaries until `boot_ns` of CLOCK_BOOTTIME; 0: no bound."""
        self._until_ns = boot_ns
        for worker in self._workers:
            if worker.is_alive and not self.lost:
                worker.page.allow_until(boot_ns)

    def stop(self, grace_s: float) -> None:
        """Stop the workers in the background; a later call may shorten the grace."""
        if grace_s <= 0:
            self._kill.set()
        else:
            handle = asyncio.get_running_loop().call_later(grace_s, self._kill.set)
            _log.debug("grace of %.1f s ends at %s", grace_s, handle.when())
        if not self._stopping:
            self._stopping = True
            self._stopped_s = time.monotonic()
            self.drain.cancel()
            self._spawn_task(self._stop())

    def report_checkpoint(self, message: CheckpointWritten) -> None:
        """Report a checkpoint of the workers that is whole on storage."""
        self.post(GroupWroteCheckpoint(self.assignment.fence, message.where, message.resumed))

    def interrupt(self, reason: str, *, asks_calls: bool = False) -> None:
        """Ask the workers that have a place to end their step; post their last calls if asked."""
        if asks_calls:
            self.post(GroupCalls(self.assignment.fence, self.world.fence, self._all_last_calls()))
        self.hang_monitor.world_ended()
        self._first_steps.end()
        for worker in self._members():
            self._sockets.send(worker.local_rank, control_socket.InterruptWorker(reason))

    def regroup(self, assignment: Assignment, able: tuple[int, ...]) -> None:
        """Give the local ranks `able` their places in another world, with another store."""
        self.drain.cancel()
        self.hang_monitor.world_ended()
        self.world = assignment
        port = self._next_port(assignment)
        self._spawn_task(self._store_host.move(port, serves=assignment.agent_store))
        for worker in self._workers:
            # A worker that has ended, or whose replacement is starting, is reported as failed by
            # the rules.
            if worker.local_rank in able and worker.local_rank in self._sockets.recoverable:
                if worker.take_place(assignment):
                    place = worker.local_rank, worker.rank, assignment.fence
                    self._spawn_watch(worker.files.note_rank(*place, time.time_ns()))
                self._sockets.send(worker.local_rank, place_message(assignment, worker.local_rank))
        self._post_recoverable()
        self._post_started(self._members())
        self._first_steps.await_them(assignment.fence)

    def start_more(self, local_ranks: tuple[int, ...], standby: Assignment, delay_s: float) -> None:
        """Start replacements for these local ranks; they have no place yet."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._begin_more, local_ranks, standby)

    async def _start(self, port: OfferedPort | None) -> None:
        self._memory = read_memory()
        if port is not None:
            await self._store_host.begin(port, serves=self.assignment.agent_store)
        files = await self._outputs.begin(self.assignment)
        try:
            for local_rank in range(self.setup.run.local_world_size):
                await self._start_one(local_rank, self.assignment, files)
                if self._stopping:
                    break
        finally:
            files.close_worker_ends()
        self.hang_monitor.begin(self._workers)
        asyncio.get_running_loop().call_later(_LEARN_AFTER_S, self._learn)
        self._post_started(self._workers)
        if not self._stopping:
            self._first_steps.await_them(self.world.fence)

    def _learn(self) -> None:
        """Let the spawner preload the modules that a worker of this group has imported by now."""
        alive = [w for w in self._workers if w.is_alive]
        if alive and not self._stopping:
            self.setup.spawner.learn(alive[0].page.imports)

    def _next_port(self, assignment: Assignment) -> OfferedPort | None:
        """Hold a new port; return the offered one if its world meets on this node."""
        port = self.port.hand_over()
        self.port.open()
        if assignment.node_rank == 0:
            return port
        port.close()
        return None

    def _store_failed(self, reason: str) -> None:
        self._post_not_started(0, self.world.rank_base, reason)

    async def _start_one(self, local_rank: int, place: Assignment, files: GroupStreams) -> None:
        rank = place.rank_base + local_rank
        try:
            streams = await files.open_soon(local_rank, rank, self.setup.run.role)
            page = StatusPage.create(records=self.setup.records)
        except OSError as error:
            self._post_not_started(local_rank, rank, f"not started: {error}")
            return
        env, standby = files.chosen_env(local_rank), place.waiting
        worker = LocalWorker(local_rank, rank, streams, files, page, env, is_standby=standby)
        self._workers.append(worker)
        is_taken = self._spares.assign(worker, place)
        worker.page.allow_until(self._until_ns)
        if not is_taken:
            await self._spawn(worker, place)
        self._sockets.send(local_rank, place_message(place, local_rank))
        if worker.process is not None:
            self._spawn_watch(self._watch(worker, worker.process))

    async def _spawn(self, worker: LocalWorker, place: Assignment) -> None:
        try:
            with self._sockets.open(worker.local_rank) as line:
                command = worker.command(self.setup, place, line.fileno())
                worker.run_as(worker.page, await self.setup.spawner.spawn(command))
        except (ElastaneError, OSError) as error:
            self._post_not_started(worker.local_rank, worker.rank, f"not started: {error}")

    async def _watch(self, worker: LocalWorker, process: WorkerProcess) -> None:
        code = await process.wait()
        worker.keep_steps()
        calls: tuple[WorkerCalls, ...] = ()
        if any(known is worker for known in self._workers):
            calls = self._last_calls(worker, code)  # Survivors call others from here on.
            self._sockets.close_exited(worker.local_rank)
        await self._report_end(worker, process, code, calls)
        self._sockets.end_reported(worker.local_rank)

    def _last_calls(self, worker: LocalWorker, code: int) -> tuple[WorkerCalls, ...]:
        """Return the last collectives of a worker that failed; of all if gloo may have ended it."""
        if code == 0:
            return ()
        shown = [each for each in self._members() if each is worker or code == -signal.SIGABRT]
        return tuple(each.last_calls() for each in shown[:CALLERS_MAX])

    def _all_last_calls(self) -> tuple[WorkerCalls, ...]:
        """Return the last collectives of the members."""
        return tuple(each.last_calls() for each in self._members()[:CALLERS_MAX])

    async def _report_end(
        self, worker: LocalWorker, process: WorkerProcess, code: int, calls: tuple[WorkerCalls, ...]
    ) -> None:
        ended_s = time.monotonic()
        if self.setup.timers is not None:
            self.setup.timers.forget(process.pid)
        if worker.given_up:
            return  # Its failure was reported when it was given up.
        by_signal_at_its_end = code < 0 and worker.local_rank in self._sockets.programs_ended
        if code == 0 or by_signal_at_its_end:
            fence, log_file = self.assignment.fence, worker.streams.stderr_path
            self.post(
                WorkerSucceeded(
                    fence, worker.local_rank, code, worker.calls, process.pid, log_file, ended_s
                )
            )
            return
        stopped = self._stopping
        words = await worker.last_words(self.setup)
        evidence = ""
        if not (stopped or worker.ended_because or worker.hung):
            evidence = kill_evidence(self._memory, read_memory(), process.peak_bytes, code)
        by_signal = code in (-signal.SIGTERM, -signal.SIGKILL)
        stopped_in_its_end = stopped and by_signal and 0 < words.failed_s <= self._stopped_s
        # The error file has the time of the fault; the process ended some time later.
        failed_s = min(ended_s, words.failed_s or ended_s)
        failure = worker.failure(process.pid, code, words, evidence, stopped=stopped_in_its_end)
        recorded = await worker.recorded(self.setup) if code != -signal.SIGKILL else ""
        if recorded:
            known = "; ".join(filter(None, (failure.evidence, recorded)))
            failure = msgspec.structs.replace(failure, evidence=known)
        if is_lost_peer(failure) or says_mismatch(failure):
            failure = msgspec.structs.replace(failure, calls=calls)
        self._post_failed(failure, failed_s)

    def _begin_more(self, local_ranks: tuple[int, ...], standby: Assignment) -> None:
        if not self._stopping:
            work = self._start_more(local_ranks, standby, self._start_task)
            self._start_task = self._spawn_task(work)

    async def _start_more(
        self,
        local_ranks: tuple[int, ...],
        standby: Assignment,
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        files = await self._outputs.begin(standby)
        try:
            for local_rank in local_ranks:
                if self._stopping:
                    break
                former = [w for w in self._workers if w.local_rank == local_rank]
                for worker in former:
                    self._workers.remove(worker)
                    worker.page.close()
                await self._start_one(local_rank, standby, files)
        finally:
            files.close_worker_ends()
            # A job of a month may lose thousands of workers.
            for unused in self._outputs.remove_unused(worker.files for worker in self._workers):
                self._spawn_watch(unused.finish())

    def _members(self) -> list[LocalWorker]:
        """Return the workers that have a place in the world."""
        here = self.world.workers or range(self.setup.run.local_world_size)
        return [w for w in self._workers if w.local_rank in here and not w.is_standby]

    def _post_recoverable(self) -> None:
        able = tuple(sorted(self._sockets.recoverable_or_unreported))
        if not self._stopping and (able or self._reported_recoverable):
            self._reported_recoverable = True
            fence, sockets = self.assignment.fence, self._sockets
            all_able = len(able) == self.setup.run.local_world_size
            if all_able and sockets.joining is not Joining.NEVER:
                self._spares.begin(self.world)
            offer, joining = self.port.offer, sockets.joining
            self.post(GroupAble(fence, able, offer, sockets.sharding, joining))

    def _post_started(self, workers: list[LocalWorker]) -> None:
        by_local_rank = sorted(workers, key=lambda worker: worker.local_rank)
        pids = tuple(w.process.pid for w in by_local_rank if w.process is not None)
        self.post(GroupStarted(self.assignment.fence, pids))

    def _post_training(self, world: Fence, came: Beginning) -> None:
        times_s = came.trained_s, came.built_s, came.healed_s
        self.post(GroupTraining(self.assignment.fence, world, *times_s))

    def _post_not_started(self, local_rank: int, rank: int, reason: str) -> None:
        code = EXIT_NOT_STARTED
        self._post_failed(
            Failure(local_rank=local_rank, rank=rank, pid=0, exit_code=code, message=reason),
            time.monotonic(),
        )

    def _post_failed(self, failure: Failure, ended_s: float) -> None:
        self.post(WorkerFailed(self.assignment.fence, failure, ended_s))

    def _post_lost(self, fence: Fence, reason: str) -> None:
        self.post(WorkerLost(self.assignment.fence, fence, reason))

    def _post_differed(self, local_rank: int, difference: control_socket.Differed) -> None:
        fence, rank = self.assignment.fence, difference.rank
        self.post(ReplicaDiffered(fence, rank, local_rank, difference.steps, difference.reason))

    def _post_culprit(self, verdict: Verdict, still_s: float) -> None:
        self.post(CulpritFound(self.assignment.fence, verdict, still_s))

    def _post_evidence(
        self, evidence: tuple[StandstillEvidence, ...], still_s: float, early: bool
    ) -> None:
        at = self.assignment.fence, self.world.fence
        self.post(GroupStandstill(*at, evidence, still_s, early))

    def _post_pause(self, pause: Pause, seconds: float, ended_s: float) -> None:
        self.post(GroupPaused(self.assignment.fence, pause, seconds, ended_s))

    def show_stacks(self, ranks: Sequence[int]) -> None:
        """Post the stacks of the local workers of these ranks, if py-spy is installed."""
        for worker in self._members():
            if worker.rank in ranks and worker.is_alive:
                self._spawn_watch(self._post_stacks(worker, worker.process))

    async def _post_stacks(self, worker: LocalWorker, process: WorkerProcess | None) -> None:
        assert process is not None
        found = await stacks_of(process.pid, self.setup.environment)
        if found is not None:
            self.post(
                WorkerStacks(
                    fence=self.assignment.fence,
                    rank=worker.rank,
                    local_rank=worker.local_rank,
                    pid=process.pid,
                    source=found.source,
                    text=found.text[:FAILURE_TEXT_CHARS_MAX],
                )
            )

    def end_worker(self, rank: int, reason: str) -> None:
        """End the worker of this rank, for which the others would wait for ever."""
        self.hang_monitor.end_rank(rank, reason)

    def _answered(self, local_rank: int, doing: control_socket.Doing) -> None:
        self.hang_monitor.answered(local_rank, doing)

    def _expire(self, request: WorkerTimer) -> bool:
        return end_expired(self._workers, request)

    async def _stop(self) -> None:
        self._store_host.end()
        await self._end_start()
        self.hang_monitor.end()
        self._first_steps.end()
        await self._spares.end()
        alive = [w.process for w in self._workers if w.process is not None and w.is_alive]
        for worker in self._workers:
            if worker.process is not None and worker.is_alive:
                self._ask_to_end(worker, worker.process)
        ended = asyncio.create_task(_wait_all(alive))
        kill = asyncio.create_task(_wait_set(self._kill))
        await asyncio.wait({ended, kill}, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill_group(signal.SIGKILL)
        await self._reap(ended)
        await self._finish()

    def _ask_to_end(self, worker: LocalWorker, process: WorkerProcess) -> None:
        """Ask a worker to end; kill one with nothing to lose, as it may swallow SIGTERM."""
        self._sockets.send(
            worker.local_rank, control_socket.End()
        )  # Read by a worker that waits for a place.
        if worker.page.has_saved:
            process.kill_group(signal.SIGKILL)
        elif not worker.got_sigterm:  # A worker that got SIGTERM to checkpoint gets no second one.
            process.send_signal(signal.SIGTERM)

    async def _end_start(self) -> None:
        """Wait for a running start; one that waits for a zygote's imports is cancelled."""
        assert self._start_task is not None, "begin() comes first"
        if not self.setup.spawner.warm.is_set():
            self._start_task.cancel()
        await asyncio.wait({self._start_task})
        self._store_host.end()

    async def _reap(self, ended: asyncio.Task[None]) -> None:
        """Wait for killed workers, and kill what they left behind."""
        self._store_host.kill()
        await self._wait_killed(ended)
        await self._store_host.close()
        if self._watches:
            # Each watch reports within a bound how its worker ended. After GroupGone, a report
            # would be ignored.
            await asyncio.wait(self._watches)
        strays = await kill_strays()
        if strays:
            _log.info("killed %d processes that workers had left behind", strays)

    async def _wait_killed(self, ended: asyncio.Task[None]) -> None:
        """Wait for the end of killed workers; `lost` says why the wait was given up."""
        if await _within(ended, _KILL_WAIT_S):
            return
        limit_s = self.setup.stuck_s
        bound = f"for {limit_s:g} s more" if limit_s else "for as long as it takes"
        _log.error(
            "workers %s were killed but do not end (uninterruptible sleep in the kernel?);"
            " waiting %s [%s]",
            self._alive_pids(),
            bound,
            UNKILLABLE_SLUG,
        )
        if await _within(ended, limit_s or None):
            return
        self.lost = f"workers {self._alive_pids()} cannot be killed"
        ended.cancel()
        for watch in self._watches:
            watch.cancel()
        self.post(Signalled(f"this node is unfit: {self.lost}"))

    def _alive_pids(self) -> list[int]:
        return [w.process.pid for w in self._workers if w.process is not None and w.is_alive]

    async def _finish(self) -> None:
        await self._outputs.finish()
        self._sockets.close()
        use = functools.reduce(CheckpointUse.merge, (each.use for each in self._workers), UNUSED)
        calls = self._all_last_calls()
        for worker in self._workers:
            worker.page.close()
        # Release and hold another: nodes may still know the port of this attempt.
        self.port.close()
        self.post(GroupGone(self.assignment.fence, self.port.open(), use, calls))

    def _spawn_watch(self, work: Coroutine[None, None, None]) -> None:
        """Run a task in the background that ends, within a bound, after the workers have."""
        task = self._spawn_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Our bug; an agent must not run with an unsupervised group.
            _log.critical("the worker group's task failed", exc_info=task.exception())
            process_console(2).wait_empty(1.0)  # The console's thread ends with this process.
            os.kill(os.getpid(), signal.SIGABRT)


async def _wait_all(processes: list[WorkerProcess]) -> None:
    for process in processes:
        await process.wait()


async def _wait_set(event: asyncio.Event) -> None:
    await event.wait()


async def _within(task: asyncio.Task[None], limit_s: float | None) -> bool:
    """Wait for `task` up to `limit_s` without cancelling it; return whether it is done."""
    await asyncio.wait({task}, timeout=limit_s)
    return task.done()


class GroupDrain:
    """A drain of one local worker group; it owns the gates of the status pages meanwhile.

    `members` returns the workers of the current world; `spawn` starts a supervised task. A worker
    that neither asks should_checkpoint() nor catches SIGTERM is not waited for.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[LocalWorker]],
        sockets: ControlSockets,
        post: Callable[[AgentEvent], None],
        spawn: SpawnTask,
    ) -> None:
        self._members = members
        self._sockets = sockets
        self._post = post
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None

    def mark(self, order: MarkGroup) -> None:
        """Gate the workers that ask should_checkpoint(), and report the furthest call."""
        members = self._members()
        for worker in members:
            worker.page.gate()
        calls = max((w.page.calls for w in members if w.is_alive), default=0)
        self._post(GroupMarked(order.fence, order.drain, calls or None))

    def aim(self, order: AimGroup) -> None:
        """Have all workers checkpoint: at the call of the order, or on SIGTERM if they catch it.

        Workers that recover in place checkpoint only if the order `stops` them all.
        """
        self.cancel()
        self._task = self._spawn(self._drain(order, self._members()))

    def cancel(self) -> None:
        """Report nothing more: the workers are stopped, or in another world."""
        if self._task is not None:
            self._task.cancel()

    def release(self) -> None:
        """Let the workers continue from where they wait: the drain is called off."""
        self.cancel()
        for worker in self._members():
            worker.page.release()

    def progress(self) -> int | None:
        """Return the smallest call count of the workers that ask should_checkpoint()."""
        counts = [w.page.calls for w in self._members() if w.is_alive]
        return min(counts) if counts and all(counts) else None

    def met(self) -> int:
        """Return the smallest round in which a worker last met all others of its world."""
        return min((w.page.round for w in self._members() if w.is_alive), default=0)

    async def _drain(self, order: AimGroup, members: Sequence[LocalWorker]) -> None:
        calls, stops = order.calls, order.stops
        for worker in members:
            if calls is not None:
                worker.page.aim(calls, stops=stops)
                continue
            worker.page.release()  # One that waits at its gate could not checkpoint.
            if worker.process is not None and worker.process.catches(signal.SIGTERM):
                worker.ask_to_checkpoint(worker.process)
        # A page of shared memory has no event to wait for.
        while any(self._is_busy(w, calls, stops=stops) for w in members):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._post(GroupDrained(order.fence, order.drain, stops))

    def _is_busy(self, worker: LocalWorker, calls: int | None, *, stops: bool) -> bool:
        if not worker.is_alive or worker.local_rank in self._sockets.finished:
            return False
        if calls is None:
            return worker.got_sigterm
        return not (worker.page.has_saved if stops else worker.page.is_parked)


class Outputs:
    """The streams of one group; workers that start under one fence share them.

    A LogsSpecs class that decides where output goes receives the environments of the workers, as in
    torch. It is called off the event loop and within a bound. If it fails, hangs or omits a worker,
    the plan of the options is used and one warning says why.
    """

    def __init__(self, setup: GroupSetup) -> None:
        self._setup = setup
        self._streams: dict[Fence, GroupStreams] = {}

    async def begin(self, place: Assignment) -> GroupStreams:
        """Return the streams for a start, created at its first call."""
        if place.fence not in self._streams:
            run, setup = self._setup.run, self._setup
            created = GroupStreams(setup.logs, run.job, run.node_id, place.fence, setup.offload)
            self._streams[place.fence] = created
            await choose_files(setup, place, created)
        return self._streams[place.fence]

    def remove_unused(self, used: Iterable[GroupStreams]) -> list[GroupStreams]:
        """Remove and return the streams that no worker uses; the caller finishes them."""
        in_use = {id(streams) for streams in used}
        ended = {f: streams for f, streams in self._streams.items() if id(streams) not in in_use}
        for fence in ended:
            del self._streams[fence]
        return [*ended.values()]

    async def finish(self) -> None:
        """Print what the workers wrote last, after they have ended."""
        await asyncio.gather(*(streams.finish() for streams in self._streams.values()))


async def choose_files(setup: GroupSetup, assignment: Assignment, streams: GroupStreams) -> None:
    """Ask the class that --logs-specs names, if any."""
    if setup.choose_files is None:
        return
    envs = {
        local_rank: worker_environment(
            setup.environment,
            assignment,
            setup.run,
            WorkerFacts(local_rank=local_rank, process_mark=setup.process_mark),
        )
        for local_rank in range(setup.run.local_world_size)
    }
    try:
        streams.choose(await setup.offload.run(partial(setup.choose_files, envs), _CHOOSE_S))
    except ElastaneError as error:
        _streams_log.warning(
            "%s; --log-dir and --redirects decide instead [%s]", error.what, error.slug
        )
    except TimeoutError:
        _streams_log.warning(
            "--logs-specs: no answer within %g s; --log-dir and --redirects decide instead"
            " [logs-specs]",
            _CHOOSE_S,
        )
