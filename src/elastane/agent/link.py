"""The agent's connection to the coordinator: found, kept, and found again.

Reports `Linked`, `MessageReceived` and `Unlinked`. A coordinator that is silent for the silence
timeout counts as gone, even if its TCP connection is open. Errors that no retry can resolve are
fatal at the first contact only: once a job has run, an agent with workers waits for the right
coordinator.

`Dialer` opens each connection, and owns this agent's entry among the jobs of this machine, from
which `elastane status` finds the coordinator. Where no entry can be written, the job runs without
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from elastane.coordinator.leadership import Leadership
from elastane.errors import (
    ConfigurationError,
    ElastaneError,
    JobClosedError,
    RendezvousRefusedError,
)
from elastane.process import environment, rpc
from elastane.process.endpoint import Endpoint, parse_endpoint
from elastane.process.files import JobEntry, JobRegistry, process_start, runtime_folder
from elastane.process.rpc import Session
from elastane.process.streams.plan import NO_FILES
from elastane.protocol.events import AgentEvent, Linked, MessageReceived, Unlinked
from elastane.protocol.limits import look_s
from elastane.protocol.messages import Alive, ToAgent, ToCoordinator
from elastane.protocol.model import JobSpec

_log = logging.getLogger("elastane.link")
_registry_log = logging.getLogger("elastane.options")
_CONNECT_TIMEOUT_S = 5.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 0.5
# For this long the agent looks for a coordinator at the store's highest rate, since a new one is
# elected soon.
_SOON_S = 3.0
# After this long without a coordinator, a warning says what is being waited for.
_SAY_AFTER_S = 3.0
_FLUSH_S = 1.0
# Time for the heartbeat that fell due while this host stood still, and for its answer. The
# coordinator's host may have stood still with this one (both were stopped, or share a busy
# machine): if the silence was noticed this much too late, the answer has the longer time.
_SECOND_LOOK_S = 0.1
_NOTICED_LATE_S = 0.25
_LATE_LOOK_S = 1.0
# A peer that accepts connections and closes them this often is not a coordinator about to end. It
# speaks TLS to an agent that does not, or has other certificates. About ten seconds.
_CLOSED_EARLY_MAX = 20
# Errors that no retry can resolve. A foreign program on the port counts: it will not go away.
_FATAL_SLUGS = ("not-a-coordinator",)
_FATAL_ERRORS = (RendezvousRefusedError, JobClosedError, ConfigurationError)


Dial = Callable[[str, int], Awaitable[Session]]


class CoordinatorLink:
    """Keeps one session for the job `spec`; `send` drops messages without a session."""

    def __init__(
        self, leadership: Leadership, dial: Dial, post: Callable[[AgentEvent], None], spec: JobSpec
    ) -> None:
        self._leadership = leadership
        self._dial = dial
        self._post = post
        self._silence_s = spec.timing.silence_s
        self._soon_s = look_s(spec.max_nodes, _RETRY_MAX_S)
        self._session: Session | None = None
        self._was_linked = self._is_retired = False
        self._at = self._served_at = ("", 0)

    def retire(self) -> None:
        """Search for no other coordinator: the job has ended, and this agent knows its outcome."""
        self._is_retired = True

    def send(self, message: ToCoordinator) -> None:
        """Send, if there is a session."""
        if self._session is not None:
            self._session.send(message)

    async def run(self) -> None:
        """Keep a session until cancelled; raises ElastaneError where waiting cannot help."""
        loop = asyncio.get_running_loop()
        pause_s, since_s, has_warned = _RETRY_FIRST_S, loop.time(), False
        closed_early = 0
        while True:
            if self._is_retired:
                await asyncio.Event().wait()  # The agent ends once its workers have.
            try:
                session = await self._reach()
            except ElastaneError as error:
                closed_early += error.slug in ("endpoint-closed", "tls")
                if not self._was_linked and (_is_fatal(error) or closed_early > _CLOSED_EARLY_MAX):
                    raise
                self._note_refusal(error)
                self._post(Unlinked(f"{error.what} [{error.slug}]"))
                if not has_warned and loop.time() - since_s > _SAY_AFTER_S:
                    has_warned = True
                    _log.warning("still looking for the coordinator: %s", error.what)
                await asyncio.sleep(pause_s)
                is_soon = loop.time() - since_s < _SOON_S
                pause_s = min(self._soon_s if is_soon else _RETRY_MAX_S, pause_s * 2)
                continue
            self._was_linked = True
            self._leadership.found()
            await self._serve(session)
            pause_s, since_s, has_warned = _RETRY_FIRST_S, loop.time(), False

    async def _reach(self) -> Session:
        """Return a session with the coordinator, and follow it if it moves meanwhile.

        A host without power does not refuse a connection: an attempt to connect would last for its
        whole timeout. By then the new coordinator would have given up waiting for this agent.
        """
        while True:
            self._at = await self._leadership.locate()
            dialing = asyncio.ensure_future(self._dial(*self._at))
            try:
                while not dialing.done() and not await self._is_elsewhere(dialing):
                    pass
                if dialing.done():
                    return dialing.result()
            finally:
                dialing.cancel()
                await asyncio.gather(dialing, return_exceptions=True)

    def _note_refusal(self, error: ElastaneError) -> None:
        """Tell the leadership if `error` shows that the last session's coordinator has ended."""
        if self._at == self._served_at and isinstance(error.__cause__, ConnectionRefusedError):
            self._leadership.refused(*self._at)

    async def _is_elsewhere(self, dialing: asyncio.Future[Session]) -> bool:
        """Wait a moment, then return whether the coordinator is at another address."""
        await asyncio.wait({dialing}, timeout=self._soon_s)
        with contextlib.suppress(ElastaneError):
            return not dialing.done() and await self._leadership.locate() != self._at
        return False

    async def _has_moved(self, message: Alive) -> bool:
        """Whether a coordinator without authority was replaced elsewhere, or is wanted here."""
        if message.authority:
            self._leadership.found()
        if message.authority or self._is_retired:
            return False
        with contextlib.suppress(ElastaneError):
            return await self._leadership.locate(linked=True) != self._at
        return False

    async def _serve(self, session: Session) -> None:
        self._session, self._served_at = session, self._at
        self._post(Linked())
        reason = ""
        try:
            while True:
                message = await self._receive(session)
                if message is None:
                    reason = session.reason
                    break
                self._post(MessageReceived(message))
                if isinstance(message, Alive) and await self._has_moved(message):
                    reason = "another coordinator has been elected"
                    break
        except TimeoutError:
            reason = f"the coordinator was silent for {self._silence_s:g} s"
            session.reset(reason)
        except ElastaneError as error:
            reason = f"{error.what} [{error.slug}]"
        finally:
            self._session = None
            session.close(reason)
        self._post(Unlinked(reason))

    async def _receive(self, session: Session) -> ToAgent | None:
        """Return the next message; TimeoutError after the silence timeout.

        If this host itself stood still, the answer may have arrived already, so it looks once more.
        Not wait_for: that of Python 3.11 loses a cancellation that arrives together with a message.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._silence_s
        try:
            async with asyncio.timeout_at(due_s):
                return await session.receive()
        except TimeoutError:
            is_late = loop.time() - due_s > _NOTICED_LATE_S
            async with asyncio.timeout(_LATE_LOOK_S if is_late else _SECOND_LOOK_S):
                return await session.receive()

    async def flush(self) -> None:
        """Send what is queued before the agent ends; takes `_FLUSH_S` at most."""
        if self._session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._session.drain()


async def first_to_end(
    work: asyncio.Task[Any], linking: asyncio.Task[None], leading: asyncio.Task[None]
) -> None:
    """Wait until an agent's work has ended, or its connection or its leadership has failed."""
    await asyncio.wait({work, linking, leading}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done() and leading.done() and leading.exception() is None:
        # The coordinator here has finished; its agent still receives the outcome.
        await asyncio.wait({work, linking}, return_when=asyncio.FIRST_COMPLETED)


def _is_fatal(error: ElastaneError) -> bool:
    return isinstance(error, _FATAL_ERRORS) or error.slug in _FATAL_SLUGS


class Dialer:
    """Connects for one agent; `token` returns the current source of the job's secret."""

    def __init__(
        self,
        access: rpc.Access,
        token: Callable[[], str],
        node_id: str,
        registry: JobRegistry | None,
        log_dir: str = "",
    ) -> None:
        self._access = access
        self._token = token
        self._node_id = node_id
        self._registry = registry
        self._log_dir = log_dir
        self._entry: JobEntry | None = None

    async def __call__(self, host: str, port: int) -> rpc.Session:
        """Return a session whose secret was proven; raises as `rpc.connect`."""
        session = await self._connect(host, port)
        self._register(Endpoint(host, port))
        return session

    def token_changed(self) -> None:
        """Write the entry again with the new secret, so that `elastane status` is accepted."""
        if self._entry is not None:
            self._register(parse_endpoint(self._entry.endpoint))

    async def _connect(self, host: str, port: int) -> rpc.Session:
        """Prove the newest secret; a coordinator that doesn't know it yet gets the older one."""
        *newer, last = self._access.secrets()
        for secret in newer:
            try:
                return await self._prove(host, port, secret)
            except RendezvousRefusedError as error:
                if error.slug != "wrong-token":
                    raise
        return await self._prove(host, port, last)

    async def _prove(self, host: str, port: int, secret: bytes) -> rpc.Session:
        access = self._access
        return await rpc.connect(
            host, port, job=access.job, secret=secret, tls=access.tls, timeout_s=_CONNECT_TIMEOUT_S
        )

    def close(self) -> None:
        """Remove the entry."""
        if self._entry is not None and self._registry is not None:
            self._registry.remove(self._entry)

    def _register(self, endpoint: Endpoint) -> None:
        if self._registry is None:
            return
        self._entry = JobEntry(
            job=self._access.job,
            node=self._node_id,
            endpoint=str(endpoint),
            token=self._token(),
            pid=os.getpid(),
            process=process_start(os.getpid()),
            log_dir=self._log_dir,
            started=time.time(),
        )
        try:
            self._registry.write(self._entry)
            if self._log_dir not in NO_FILES:
                self._registry.note_logs(self._entry.job, self._log_dir)
        except OSError as error:
            _registry_log.warning("elastane status will not find this job: %s", error)


def registry_here() -> JobRegistry | None:
    """Return where this user's jobs are registered; None where no folder can be written."""
    try:
        return JobRegistry(runtime_folder(environment.snapshot()))
    except OSError:
        return None
