"""One worker of a group: how it is started, how its timers end it, and what its end means.

Owns the command of a worker and the making of a `Failure` from its end. Reading files happens off
the event loop and within a bound. It starts nothing, and sends signals only for an expired timer:
to a worker, or to a process of its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from elastane.agent.failure_reports import LastWords, read_last_words
from elastane.agent.flight_recorder import dump_path, read_open_collectives
from elastane.agent.timer_watch import TimerWatch
from elastane.process.offload import Offload
from elastane.process.process import Spawner, WorkerCommand, WorkerKind, WorkerProcess
from elastane.process.status_page import StatusPage
from elastane.process.streams.group import GroupStreams, WorkerStreams
from elastane.process.streams.plan import ChooseFiles, LogPlan
from elastane.process.timers import WorkerTimer
from elastane.process.worker_environment import (
    RunFacts,
    WorkerFacts,
    why_without_place,
    worker_args,
    worker_environment,
)
from elastane.protocol.limits import FAILURE_TEXT_CHARS_MAX, Timing
from elastane.protocol.model import NO_RANK, UNUSED, Assignment, CheckpointUse, Failure
from elastane.protocol.ring import CALLS_SENT_MAX, WorkerCalls

# The descriptors of the status page and the control socket in every worker, above those that
# programs open themselves.
PAGE_FD = 250
CONTROL_FD = 251
# The exit code of a worker that could not be started: command cannot be executed.
EXIT_NOT_STARTED = 126
# After the signal by which a worker has ended, in all views.
_ENDED_AS_HUNG = "by its agent, since it hung"
TIMER_SLUG = "timer-expired"
# Bound for reading a failed worker's files from its log folder, which may be on the network.
_WORDS_WAIT_S = 1.0
# Starts a task of a worker group. A task that fails ends the agent, since its failure would go
# unnoticed.
SpawnTask = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]


@dataclass(frozen=True)
class GroupSetup:
    """The local workers of one agent, independent of the round.

    `cpus` holds, by local rank, the CPUs that a worker is bound to; empty without binding.
    `stuck_s` is how long a worker may be in uninterruptible sleep before it is given up; 0 means no
    limit. `spares` is the number of warm spares beside workers that recover in place.
    `choose_files` decides instead of `logs` where each worker's output goes. No worker counts as
    hung before `hang_floor_s`, except in an abort of its process group, after `abort_limit_s`. One
    whose program an error has ended is killed after `error_exit_limit_s`.
    `records`: workers record their collectives.
    """

    kind: WorkerKind
    target: str
    args: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    process_mark: str
    run: RunFacts
    logs: LogPlan
    spawner: Spawner
    cpus: tuple[frozenset[int], ...] = ()
    stuck_s: float = 0.0
    spares: int = 0
    hang_floor_s: float = Timing().hang_floor_s
    abort_limit_s: float = Timing().abort_limit_s
    error_exit_limit_s: float = Timing().error_exit_limit_s
    records: bool = True
    timers: TimerWatch | None = None
    choose_files: ChooseFiles | None = None
    # Shared by all attempts, so that its threads are reused.
    offload: Offload = field(default_factory=Offload)


@dataclass(eq=False)
class LocalWorker:
    """One local rank in one attempt.

    `got_sigterm`: it was asked to checkpoint by SIGTERM. `given_up`: it was reported as failed
    though its process may be alive. `ended_because`: why the agent itself ended it, in words.
    `hung`: why it counted as hung and was ended. `steps`: how many steps it had shown when it
    ended. `measured`: how many were measured in it. `met`: the round of the world in which it last
    met the others. `calls`: the same as `steps` by the count that heartbeats carry. `began_s`: when
    it was made, in seconds since 1970.
    """

    local_rank: int
    rank: int
    streams: WorkerStreams
    files: GroupStreams
    page: StatusPage
    env: Mapping[str, str] = field(default_factory=dict)
    process: WorkerProcess | None = None
    is_standby: bool = False  # it waits for a place in a world
    got_sigterm: bool = False
    given_up: bool = False
    ended_because: str = ""
    hung: str = ""
    steps: int = 0
    measured: int = 0
    met: int = 0
    calls: int = 0
    began_s: float = field(default_factory=time.time)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.exit_code is None

    def run_as(self, page: StatusPage, process: WorkerProcess) -> None:
        """Run as this process, which reports on `page`."""
        self.page = page
        self.process = process

    def take_place(self, assignment: Assignment) -> bool:
        """Take its place in a world; return whether its rank is another one than before.

        Its rank there is used when its failure is reported.
        """
        before, self.is_standby = self.rank, False
        self.rank = assignment.rank_base + assignment.index_of(self.local_rank)
        self.page.assign(assignment.fence.round)
        return self.rank != before

    def ask_to_checkpoint(self, process: WorkerProcess) -> None:
        """Send SIGTERM, which it catches to checkpoint; it gets no second one."""
        self.got_sigterm = True
        process.send_signal(signal.SIGTERM)

    def find_hung(self, reason: str) -> None:
        """Record that it counts as hung, and why; it is ended from here on."""
        self.hung = reason
        self.ended_because = self.ended_because or _ENDED_AS_HUNG

    def blame(self, reason: str) -> None:
        """Record why the agent itself ends it."""
        self.ended_because = reason

    def give_up(self) -> None:
        """Record that its failure is reported though its process may be alive."""
        self.given_up = True

    def keep_steps(self) -> None:
        """Record its steps and its last world when it has ended; its page may be closed later."""
        self.calls = self.page.calls
        self.steps = max(self.page.calls, self.page.steps)
        self.measured, self.met = self.page.steps_timed, self.page.round

    @property
    def use(self) -> CheckpointUse:
        """What it has done with checkpoints, as far as that shows.

        If nothing shows, all of it may be so where the worker has reported steps.
        """
        seen = self.page.checkpoint_use
        unseen = CheckpointUse() if self.steps else UNUSED
        return unseen if seen is None else seen

    def facts(self, setup: GroupSetup) -> WorkerFacts:
        """Return the values of this worker for its environment."""
        return WorkerFacts(
            local_rank=self.local_rank,
            error_file=self.streams.error_file,
            page_fd=PAGE_FD,
            control_fd=CONTROL_FD,
            process_mark=setup.process_mark,
        )

    def command(self, setup: GroupSetup, assignment: Assignment, control_fd: int) -> WorkerCommand:
        """Return the command with all that the worker inherits, `control_fd` included."""
        env = worker_environment(setup.environment, assignment, setup.run, self.facts(setup))
        return WorkerCommand(
            kind=setup.kind,
            target=setup.target,
            args=worker_args(setup.args, self.local_rank),
            env={**env, **self.env},
            cwd=setup.cwd,
            stdin=0,
            stdout=self.streams.stdout,
            stderr=self.streams.stderr,
            fds={PAGE_FD: self.page.fd, CONTROL_FD: control_fd},
            cpus=setup.cpus[self.local_rank] if setup.cpus else frozenset(),
        )

    def last_calls(self) -> WorkerCalls:
        """Return the last collectives that it called, as its page shows them."""
        return WorkerCalls(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.process.pid if self.process is not None else 0,
            calls=self.page.ring().calls[-CALLS_SENT_MAX:],
        )

    async def last_words(self, setup: GroupSetup) -> LastWords:
        """Return what the worker left about its end; empty if the log folder does not answer."""
        try:
            words = await setup.offload.run(self._read, _WORDS_WAIT_S)
        except TimeoutError:
            words = LastWords()  # The failure must be reported without it.
        if self.hung:  # Output of its SIGABRT handler is useless: the agent sent that signal.
            message = f"{words.message}\n{self.hung}".lstrip()
            return replace(words, message=message, output=False)
        why = why_without_place(words.message) if self.is_standby else ""
        return replace(words, message=f"{words.message}\n{why}") if why else words

    async def recorded(self, setup: GroupSetup) -> str:
        """Return in words what torch's flight recorder left of it; "" if it left nothing."""
        path = dump_path({**setup.environment, **self.env}, self.rank)
        try:
            read = partial(read_open_collectives, path, self.began_s)
            return await setup.offload.run(read, _WORDS_WAIT_S)
        except TimeoutError:
            return ""

    def failure(
        self, pid: int, code: int, words: LastWords, evidence: str = "", *, stopped: bool = False
    ) -> Failure:
        """Return the failure for the coordinator.

        `stopped`: the agent stopped it while it was ending with an error of its own.
        """
        return Failure(
            local_rank=self.local_rank,
            rank=NO_RANK if self.is_standby else self.rank,
            pid=pid,
            exit_code=code,
            message=words.message[-FAILURE_TEXT_CHARS_MAX:],
            error_file=words.error_file,
            log_file=self.streams.stderr_path,
            evidence=evidence or self.ended_because,
            output=words.output,
            steps=self.steps,
            measured=self.measured,
            met=self.met,
            stopped=stopped,
        )

    def _read(self) -> LastWords:
        self.files.drain(self.streams)
        return read_last_words(self.streams)


def end_expired(workers: Iterable[LocalWorker], request: WorkerTimer) -> bool:
    """Send the timer's signal; False if the process is alive and belongs to no worker here."""
    try:
        pidfd = os.pidfd_open(request.pid)
    except OSError:
        return True  # The process has ended, and its timer with it.
    try:
        # While the descriptor is open, the pid remains this process's until it is reaped.
        worker = _owner(workers, request.pid)
        if worker is None:
            return False
        if request.signal > 0:
            worker.blame(_reason(request))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, request.signal)
    finally:
        os.close(pidfd)
    return True


def _owner(workers: Iterable[LocalWorker], pid: int) -> LocalWorker | None:
    try:
        session = os.getsid(pid)
    except ProcessLookupError:
        return None
    alive = {w.process.pid: w for w in workers if w.process is not None and w.is_alive}
    return alive.get(pid) or alive.get(session)


def _reason(request: WorkerTimer) -> str:
    deadline = datetime.fromtimestamp(request.expiration_time, UTC).isoformat(
        timespec="milliseconds"
    )
    names = {int(known): known.name for known in signal.Signals}
    name = names.get(request.signal, f"signal {request.signal}")
    return (
        f"timer {request.scope_id!r} of process {request.pid} was not released by its deadline,"
        f" {deadline}: {name} was sent [{TIMER_SLUG}]"
    )
