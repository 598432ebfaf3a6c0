"""The agent's side of its node's snapshot server, the process that owns the memory of snapshots.

Owns the socket by which workers find the server, and the server's life. The server is started when
the first worker connects, so a job without checkpoints has none. It is started again when it was
killed: its snapshots are lost then, and workers learn that from their connections.

The server carries no process mark and dies with no other process. An agent that ends asks it to
end, and waits a bounded time while it writes what is not durable yet. A killed agent leaves it to
end alone. A server stopped by a signal is killed and replaced.

How it fails: if no socket can be created, workers start snapshot servers of their own, which is
logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from elastane.agent.hang_monitor import states_of
from elastane.process.files import process_start, runtime_folder
from elastane.process.orphan_reaper import unlink
from elastane.process.process import WorkerProcess, adopt, spawning
from elastane.process.worker_environment import without_secrets
from elastane.protocol.diagnosis import exit_text
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import NodeCopies, StateCopy
from elastane.protocol.unreadable import UNREADABLE
from elastane.snapshots.limits import (
    CHECK_S,
    END_S,
    HELLO_BYTES_MAX,
    RESTART_PAUSE_MAX_S,
    RESTART_PAUSE_S,
    STOPPED_S,
)
from elastane.snapshots.startup import start_node_server

if TYPE_CHECKING:
    from elastane.options.config import AgentConfig
    from elastane.options.secret import Keyring
    from elastane.snapshots.messages import (
        CopiesHeld,
        FromAgent,
        ReplicationSettings,
        SnapshotEvent,
    )
    from elastane.snapshots.rules.copy_times import CopyTime

_log = logging.getLogger("elastane.agent")
SLUG = "snapshot-server-lost"
_BACKLOG = 128
# A snapshot server ends within its own bound; a kernel that holds it longer is not waited for.
_MARGIN_S = 5.0
# An end that takes longer than this is logged, as a person may be waiting for it.
_WARN_S = 2.0
_PURPOSE = b"elastane snapshot servers"


def _nothing(_place: str) -> None:
    """Do nothing."""


class SnapshotServerHandle:
    """The snapshot server of one agent; `path` is its socket, "" without one."""

    def __init__(
        self,
        environment: Mapping[str, str],
        log_event: Callable[[SnapshotEvent], None],
        lost: Callable[[str], None],
    ) -> None:
        """`log_event` gets the server's events, and `lost` the reason of its end."""
        self.path = ""
        self._environment = environment
        self._listener: socket.socket | None = None
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._peers: Callable[[], ReplicationSettings] | None = None
        self._log_event = log_event
        self._lost = lost
        self._saved: Callable[[str], None] = _nothing
        self._held: CopiesHeld | None = None
        self._out_by_s: float | None = None

    def open(self) -> None:
        """Listen; after `start`, the first connection starts a server."""
        try:
            folder = runtime_folder(self._environment) / "snapshots"
            folder.mkdir(mode=0o700, exist_ok=True)
            _remove_stale(folder)
            path = folder / _name_of(os.getpid())
            self._listener = _listening(path)
        except OSError as error:
            _log.warning(
                "workers keep their own snapshots and lose them when they die: the socket of the"
                " snapshot server could not be created: %s [runtime-folder]",
                error,
            )
            return
        self.path = str(path)

    def start(
        self,
        saved: Callable[[str], None] = _nothing,
        peers: Callable[[], ReplicationSettings] | None = None,
    ) -> None:
        """Begin to start servers when they are needed.

        `saved` gets the place of each checkpoint that a server reports as durable. `peers` returns
        how servers exchange copies with those of other nodes; None: they do not.
        """
        self._saved, self._peers = saved, peers
        if self._listener is not None:
            self._serving = asyncio.create_task(self._serve(self._listener))

    def copies(self) -> NodeCopies | None:
        """Return the newest copies of the workers' state; None until the server reports some."""
        held, now_s = self._held, time.monotonic()
        if held is None:
            return None
        return NodeCopies(
            memory=_copy_at(held.memory, now_s),
            replica=_copy_at(held.replica, now_s),
            storage=_copy_at(held.storage, now_s),
            replicated=held.replicated,
        )

    def send_peers(self) -> None:
        """Send the server the current secrets and address for other nodes' servers."""
        if self._peers is not None:
            self._send(self._peers())

    def end_by(self, out_by_s: float | None) -> None:
        """Let `close` take no longer than until then, on the monotonic clock; None: no deadline."""
        self._out_by_s = out_by_s

    async def close(self) -> None:
        """Ask the server to write what is not durable, and wait a bounded time for its end."""
        left_s = None
        if self._out_by_s is not None:
            left_s = max(0.0, self._out_by_s - time.monotonic())
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            unlink(self.path)
        if self._control is not None:
            from elastane.snapshots.messages import AgentLeave

            self._send(AgentLeave(left_s))
        if self._process is not None:
            await self._await_end(self._process, END_S + _MARGIN_S if left_s is None else left_s)
        self._close_control()

    async def _await_end(self, process: WorkerProcess, limit_s: float) -> None:
        warning = asyncio.get_running_loop().call_later(_WARN_S, _warn_slow_end, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._ended(process)
        except TimeoutError:
            _log.error(
                "the snapshot server (pid %d) does not end within %.0f s", process.pid, limit_s
            )
        finally:
            warning.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S
        while True:
            await _readable(listener)
            started_s = loop.time()
            try:
                self._process = self._start_server(listener)
                ended = exit_text(await self._ended(self._process))
            except OSError as error:
                ended = f"could not be started: {error}"
            line = (
                f"the snapshot server ended ({ended}): its snapshots are lost; it is started again"
            )
            _log.error("%s [%s]", line, SLUG)
            self._forget_memory()
            self._lost(line)
            if loop.time() - started_s > RESTART_PAUSE_MAX_S:
                pause_s = RESTART_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)

    def _forget_memory(self) -> None:
        """Forget the copies that the server held, which has ended."""
        if self._held is not None:
            self._held = structs.replace(self._held, memory=None, replica=None)

    async def _ended(self, process: WorkerProcess) -> int:
        """Wait for the end of a server; one stopped by a signal is killed after a while."""
        killing = asyncio.create_task(self._kill_stopped(process))
        try:
            return await process.wait()
        finally:
            killing.cancel()

    async def _kill_stopped(self, process: WorkerProcess) -> None:
        """Kill a server that a signal stopped: until then no worker of this node can save.

        It counts looks, not time: this process may have been stopped together with the server.
        """
        looks = 0
        while looks * CHECK_S < STOPPED_S:
            await asyncio.sleep(CHECK_S)
            looks = looks + 1 if states_of([process.pid]).get(process.pid) == "T" else 0
        line = "the snapshot server (pid %d) was stopped by a signal for %g s: it is killed [%s]"
        _log.error(line, process.pid, STOPPED_S, SLUG)
        process.send_signal(signal.SIGKILL)

    def _start_server(self, listener: socket.socket) -> WorkerProcess:
        self._close_control()
        control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = control
        asyncio.get_running_loop().add_reader(self._control, self._read, self._control)
        # Sent before the server accepts its first worker.
        self.send_peers()
        with its, spawning():
            return adopt(start_node_server(its, listener, without_secrets(self._environment)))

    def _send(self, message: FromAgent) -> None:
        if self._control is not None:
            from elastane.snapshots.messages import encode

            with contextlib.suppress(OSError):  # The server has ended.
                self._control.send(encode(message), socket.MSG_DONTWAIT)

    def _read(self, control: socket.socket) -> None:
        from elastane.snapshots.messages import SNAPSHOT_NEWS, CopiesHeld, Saved

        try:
            event = SNAPSHOT_NEWS.decode(control.recv(HELLO_BYTES_MAX, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except (OSError, *UNREADABLE) as error:  # The server has ended, or is of another version.
            _log.debug("the snapshot server reports nothing more: %r", error)
            asyncio.get_running_loop().remove_reader(control)
        else:
            if isinstance(event, CopiesHeld):
                # A server that was started again does not know of earlier checkpoints.
                before = self._held.storage if self._held is not None else None
                self._held = structs.replace(event, storage=event.storage or before)
                return
            self._log_event(event)
            if isinstance(event, Saved):
                self._saved(event.place)

    def _close_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None


def replica_peers(config: AgentConfig, keyring: Keyring) -> ReplicationSettings:
    """Return the secrets, address and TLS files by which servers of the job meet.

    The secret is derived from the job's: with it a server can only prove itself to the others.
    """
    from elastane.snapshots.messages import ReplicationSettings

    tls = config.rendezvous.tls
    return ReplicationSettings(
        job=config.spec.job,
        secrets=tuple(hmac.digest(each, _PURPOSE, "sha256") for each in keyring.secrets()),
        host=config.reach,
        tls=(tls.cert, tls.key, tls.ca) if tls is not None else ("", "", ""),
    )


def snapshot_event(event: SnapshotEvent, node_id: str) -> LogEvent:
    """Return a server's report as an event of the log."""
    from elastane.snapshots.messages import PersistFailed, RestoredEvent, Saved

    data: dict[str, str | int | float | bool] = {"step": event.key.step, "location": event.place}
    match event:
        case Saved():
            kind = EventKind.CHECKPOINT_SAVED
            data |= {"bytes": event.size_bytes, "seconds": round(event.seconds, 3)}
            data |= {"why": event.reason, "saves": event.saves}
            data["age_s"] = round(max(0.0, time.monotonic() - event.began_s), 3)
            reason = f"step {event.key.step} is durable"
        case PersistFailed():
            kind = EventKind.CHECKPOINT_FAILED
            data |= {"slug": event.slug}
            reason = f"step {event.key.step}: {event.reason}"
        case RestoredEvent():
            kind, reason = EventKind.RESTORED, f"step {event.key.step} from {event.place}"
            reason += f": {event.why}" if event.why else ""
    return LogEvent(kind=kind, reason=reason, node_id=node_id, data=data)


def _copy_at(copy: CopyTime | None, now_s: float) -> StateCopy | None:
    if copy is None:
        return None
    age_s = max(0.0, now_s - copy.began_s)
    return StateCopy(step=copy.step, age_s=age_s, took_s=copy.took_s, every_s=copy.every_s)


def _warn_slow_end(limit_s: float) -> None:
    _log.warning(
        "the last snapshot is being written to storage, which may take up to %.0f s", limit_s
    )


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        # A socket's path has at most 107 bytes; the path through a descriptor is short.
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
    loop.add_reader(listener, _set_ready, ready)
    try:
        await ready
    finally:
        loop.remove_reader(listener)


def _set_ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _name_of(pid: int) -> str:
    """Return the socket's name for the agent that has this pid now."""
    start = hashlib.sha256(process_start(pid).encode()).hexdigest()[:12]
    return f"{pid}.{start}.sock"


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of agents that were killed together with their orphan reapers."""
    for path in folder.glob("*.sock"):
        pid = path.name.partition(".")[0]
        if pid.isdecimal() and _name_of(int(pid)) != path.name:
            path.unlink(missing_ok=True)
