"""The agent's hold on its node's keeper, the process that owns the memory of snapshots.

Owns the socket by which workers find it, and its life: it is started when the first worker
connects, so that a job without checkpoints has none, and again when it was killed. What it held is
lost then, and workers are told by their connections. It carries no leash and dies with nobody: an
agent that ends tells it to, and waits, a bounded time, while it writes what is not durable yet; one
that was killed leaves it to itself. A keeper that a signal has stopped is killed, and another one
follows. How it fails: where no socket can be made, workers have keepers of their own, which is
logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.agent.uninterruptible import states_of
from elastane.process.files import process_start, runtime_folder
from elastane.process.orphan_reaper import unlink
from elastane.process.process import WorkerProcess, adopt, spawning
from elastane.process.worker_environment import without_secrets
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.limits import (
    KEEPER_END_S,
    KEEPER_HELLO_BYTES_MAX,
    KEEPER_LOOK_S,
    KEEPER_PAUSE_MAX_S,
    KEEPER_PAUSE_S,
    KEEPER_STOPPED_S,
)
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.startup import start_node_keeper

if TYPE_CHECKING:
    from elastane.snapshots.events import News
    from elastane.snapshots.peers import FromAgent, Neighbours

_log = logging.getLogger("elastane.agent")
SLUG = "keeper-lost"
_BACKLOG = 128
# A keeper ends by itself within its bound; what the kernel holds beyond that is not waited for.
_MARGIN_S = 5.0
# An end that takes longer than this is told: somebody may wait for it.
_TELL_S = 2.0


class Keeping:
    """One agent's; `path` is that of the socket, "" where there is none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.path = ""
        self._environment = environment
        self._listener: socket.socket | None = None
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._neighbours: Callable[[], Neighbours] | None = None
        self._tell: Callable[[News], None] | None = None
        self._lost: Callable[[str], None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the keeper's pid while one lives."""
        alive = self._process is not None and self._process.exit_code is None
        return self._process.pid if self._process is not None and alive else None

    def open(self) -> None:
        """Listen; a keeper is started when somebody connects, once `start` was called."""
        try:
            folder = runtime_folder(self._environment) / "keepers"
            folder.mkdir(mode=0o700, exist_ok=True)
            _remove_stale(folder)
            path = folder / _name_of(os.getpid())
            self._listener = _listening(path)
        except OSError as error:
            _log.warning(
                "workers that save snapshots keep them themselves, and lose them when they die: no"
                " socket could be made: %s [runtime-folder]",
                error,
            )
            return
        self.path = str(path)

    def start(self) -> None:
        """Begin to start keepers as they are needed."""
        if self._listener is not None:
            self._keeper = asyncio.create_task(self._keep(self._listener))

    def meet(self, neighbours: Callable[[], Neighbours]) -> None:
        """Have keepers bring copies to other nodes' from now on, and take theirs."""
        self._neighbours = neighbours

    def report(self, tell: Callable[[News], None], lost: Callable[[str], None]) -> None:
        """Give what keepers report for the event log to `tell`, and why one ended to `lost`."""
        self._tell, self._lost = tell, lost

    def say_neighbours(self) -> None:
        """Tell the keeper, if there is one, how it knows other nodes' keepers now."""
        if self._neighbours is not None:
            self._say(self._neighbours())

    async def close(self) -> None:
        """Have the keeper write what is not durable, and wait for its end, a bounded time."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            unlink(self.path)
        if self._control is not None:
            from elastane.snapshots.peers import AgentLeave

            self._say(AgentLeave())
        if self._process is not None:
            await self._end_of(self._process)
        self._hang_up()

    async def _end_of(self, process: WorkerProcess) -> None:
        telling = asyncio.get_running_loop().call_later(_TELL_S, _tell_wait)
        try:
            async with asyncio.timeout(KEEPER_END_S + _MARGIN_S):
                await self._ended(process)
        except TimeoutError:
            _log.error("the keeper of snapshots (pid %d) does not end", process.pid)
        finally:
            telling.cancel()

    async def _keep(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pause_s = KEEPER_PAUSE_S
        while True:
            await _readable(listener)
            started_s = loop.time()
            try:
                self._process = self._started(listener)
                ended = exit_text(await self._ended(self._process))
            except OSError as error:
                ended = f"could not be started: {error}"
            line = f"the keeper of snapshots ended ({ended}): what it held is lost; another follows"
            _log.error("%s [%s]", line, SLUG)
            if self._lost is not None:
                self._lost(line)
            if loop.time() - started_s > KEEPER_PAUSE_MAX_S:
                pause_s = KEEPER_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, KEEPER_PAUSE_MAX_S)

    async def _ended(self, process: WorkerProcess) -> int:
        """Wait for the end of a keeper; one that a signal has stopped is killed after a while."""
        mending = asyncio.create_task(self._kill_stopped(process))
        try:
            return await process.wait()
        finally:
            mending.cancel()

    async def _kill_stopped(self, process: WorkerProcess) -> None:
        """Kill a keeper that stands still: until then no worker of this node can save.

        Looks are counted, and not time: this process may have been stopped together with it.
        """
        looks = 0
        while looks * KEEPER_LOOK_S < KEEPER_STOPPED_S:
            await asyncio.sleep(KEEPER_LOOK_S)
            looks = looks + 1 if states_of([process.pid]).get(process.pid) == "T" else 0
        line = (
            "the keeper of snapshots (pid %d) was stopped by a signal, for %g s: it is killed [%s]"
        )
        _log.error(line, process.pid, KEEPER_STOPPED_S, SLUG)
        process.send_signal(signal.SIGKILL)

    def _started(self, listener: socket.socket) -> WorkerProcess:
        self._hang_up()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asyncio.get_running_loop().add_reader(self._control, self._hear, self._control)
        # It lies there before the keeper has its first worker.
        self.say_neighbours()
        with its, spawning():
            return adopt(start_node_keeper(its, listener, without_secrets(self._environment)))

    def _say(self, word: FromAgent) -> None:
        if self._control is not None:
            from elastane.snapshots.messages import encode

            with contextlib.suppress(OSError):  # It has ended.
                self._control.send(encode(word), socket.MSG_DONTWAIT)

    def _hear(self, control: socket.socket) -> None:
        from elastane.snapshots.events import NEWS

        try:
            news = NEWS.decode(control.recv(KEEPER_HELLO_BYTES_MAX, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except (OSError, *UNREADABLE) as error:  # It has ended, or is of another version.
            _log.debug("nothing more is heard of the keeper: %r", error)
            asyncio.get_running_loop().remove_reader(control)
        else:
            if self._tell is not None:
                self._tell(news)

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None


def _tell_wait() -> None:
    _log.warning(
        "the last snapshot is being written to storage, which may take up to %.0f s", KEEPER_END_S
    )


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        # A path of more than 107 bytes is none for a socket; one by way of a descriptor is short.
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return listener


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(listener, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(listener)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _name_of(pid: int) -> str:
    """Return the name of the socket of the agent that now has this pid."""
    start = hashlib.sha256(process_start(pid).encode()).hexdigest()[:12]
    return f"{pid}.{start}.sock"


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of agents that were killed together with their wardens."""
    for path in folder.glob("*.sock"):
        pid = path.name.partition(".")[0]
        if pid.isdecimal() and _name_of(int(pid)) != path.name:
            path.unlink(missing_ok=True)
