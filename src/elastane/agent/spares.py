"""Warm spares of one node: processes of the script that wait in `elastane.init()` for a place.

Owns them from their start until one takes the place of a starting worker. From then on it is that
worker, with its variables, output and control socket. A spare that ends is replaced after a growing
pause.

Spares start only once all workers of the group recover in place: a script that never calls init()
would train outside the job. A failing spare is not a fault of the job: a later start merely loses
its head start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

import msgspec

from elastane.agent.control_sockets import ControlSockets
from elastane.agent.worker import GroupSetup, LocalWorker, SpawnTask
from elastane.errors import ElastaneError
from elastane.process import control_socket
from elastane.process.process import WorkerProcess
from elastane.process.status_page import StatusPage
from elastane.process.streams.group import GroupStreams
from elastane.process.streams.plan import LogPlan
from elastane.protocol.limits import BACKOFF_FIRST_S, BACKOFF_MAX_S
from elastane.protocol.model import Assignment

_log = logging.getLogger("elastane.workers")
# The next spare starts when the world with the previous one is running.
_NEXT_S = 2.0
# After this many ends in a row before init(), no more spares are started: the script cannot be
# prepared this way.
_ENDS_MAX = 5
# The output of a spare is dropped, since it is not in the job yet. The end of its stderr is kept.
_SILENT = LogPlan(base_dir="", console_ranks=frozenset((-1,)))
# A spare may take any place of the node; torch reads a device of -1 as none.
_NO_RANK = {"LOCAL_RANK": "-1"}


class Spares:
    """Keeps `setup.spares` spares alive from `begin` on."""

    def __init__(self, setup: GroupSetup, sockets: ControlSockets, spawn: SpawnTask) -> None:
        self._setup = setup
        self._sockets = sockets
        self._spawn = spawn
        self._waiting: dict[int, LocalWorker] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._files: set[GroupStreams] = set()
        self._number = 0

    def begin(self, assignment: Assignment) -> None:
        """Start the spares in the background; a later call does nothing."""
        if self._supervisors or not self._setup.spares:
            return
        for _ in range(self._setup.spares):
            self._supervisors.append(self._spawn(self._supervise_one(assignment)))

    def assign(self, worker: LocalWorker, place: Assignment) -> bool:
        """Make a spare the process of `worker`; False if none is ready, with nothing changed."""
        for key, spare in self._waiting.items():
            if key in self._sockets.ready and spare.is_alive:
                break
        else:
            return False
        assert spare.process is not None, "a spare that is alive"
        own = self._setup.environment
        env = worker.command(self._setup, place, -1).env
        begin = control_socket.Begin(
            env={n: value for n, value in env.items() if own.get(n) != value}
        )
        if not self._sockets.hand_over(key, worker.local_rank, begin, worker.streams):
            return False
        del self._waiting[key]
        worker.page.close()
        worker.run_as(spare.page, spare.process)
        self._bind(worker)
        return True

    async def end(self) -> None:
        """Kill all spares, and wait for their ends."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        waiting = [*self._waiting.values()]
        self._waiting.clear()
        for spare in waiting:
            if spare.process is not None:
                spare.process.kill_group(signal.SIGKILL)
                await _pause_or_end(spare.process)
            spare.page.close()
        await asyncio.gather(*(files.finish() for files in self._files))

    async def _supervise_one(self, assignment: Assignment) -> None:
        ends = 0
        while ends < _ENDS_MAX:
            self._number -= 1
            key = self._number
            spare = await self._start_spare(key, assignment)
            code = await self._wait_for(key, spare) if spare is not None else None
            if code is None and spare is not None:
                ends = 0  # The spare took a place.
                self._spawn(self._finish_taken(spare))
                await asyncio.sleep(_NEXT_S)
                continue
            ends += 1
            await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**ends))
        _log.warning(
            "spare workers ended before elastane.init() %d times in a row: no more are started",
            ends,
        )

    async def _start_spare(self, key: int, assignment: Assignment) -> LocalWorker | None:
        run = self._setup.run
        files = GroupStreams(_SILENT, run.job, run.node_id, assignment.fence, self._setup.offload)
        self._files.add(files)
        spare = None
        try:
            streams = await files.open_soon(0, 0, run.role)
            page = StatusPage.create(records=self._setup.records)
            spare = LocalWorker(0, 0, streams, files, page, _NO_RANK, is_standby=True)
            with self._sockets.open(key) as line:
                self._sockets.send(key, control_socket.Spare())
                waiting = msgspec.structs.replace(assignment, waiting=True)
                command = spare.command(self._setup, waiting, line.fileno())
                spare.run_as(spare.page, await self._setup.spawner.spawn(command))
        except (ElastaneError, OSError) as error:
            _log.warning("no spare worker could be started: %s", error)
            await self._forget(key, spare, files)
            return None
        finally:
            files.close_worker_ends()
        self._waiting[key] = spare
        return spare

    async def _wait_for(self, key: int, spare: LocalWorker) -> int | None:
        """Return the exit code of a spare once it ends; None once it took a place."""
        process = spare.process
        assert process is not None, "it was started"
        while process.exit_code is None and key in self._waiting:
            await _pause_or_end(process)
        if key not in self._waiting:
            return None
        words = await spare.last_words(self._setup)
        _log.warning(
            "a spare worker ended with exit code %s: %s", process.exit_code, words.message[-500:]
        )
        await self._forget(key, spare, spare.files)
        return process.exit_code

    async def _forget(self, key: int, spare: LocalWorker | None, files: GroupStreams) -> None:
        self._waiting.pop(key, None)
        self._sockets.close_one(key)
        if spare is not None:
            spare.page.close()
        await files.finish()
        self._files.discard(files)

    async def _finish_taken(self, spare: LocalWorker) -> None:
        """Close the output streams of a spare that took a place, once it has ended."""
        assert spare.process is not None, "it was started"
        await spare.process.wait()
        await spare.files.finish()
        self._files.discard(spare.files)

    def _bind(self, worker: LocalWorker) -> None:
        """Bind all threads of a process to the CPUs of its new place."""
        if not self._setup.cpus or worker.process is None:
            return
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), self._setup.cpus[worker.local_rank])


async def _pause_or_end(process: WorkerProcess) -> None:
    """Wait for the end of a process, or for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NEXT_S):
            await process.wait()
