"""Leadership: where the coordinator is, and whether it runs here.

There are two ways. `EndpointLeadership`: the agent that owns the endpoint's address serves it, and
binding the port is the election. `StoreLeadership`: the holder of the store's lease serves. An
agent that leaves gives up its leadership. `run` raises errors that no retry can resolve.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from typing import Protocol
from urllib.parse import urlsplit

from elastane.coordinator.election import Election
from elastane.coordinator.host import CoordinatorHost
from elastane.coordinator.rules import StepDowns, Takeover
from elastane.errors import ConfigurationError, ElastaneError, MembershipError, StoreError
from elastane.process.endpoint import Endpoint, is_mine, listen, local_addresses
from elastane.process.resolver import resolve
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.limits import CLOSE_S, STEP_DOWN_PAUSE_S
from elastane.protocol.model import JobRecord
from elastane.stores import JobKeys, Store

_log = logging.getLogger("elastane.leadership")
# Between losing leadership and seeking it again: the store has to answer another node first.
_PAUSE_S = 0.2
# Between two attempts to reach a store that is not up yet, and when the wait is logged.
_STORE_RETRY_S = 0.5
_SAY_AFTER_S = 3.0


class Leadership(Protocol):
    """Finds the coordinator, and runs it if this agent has to."""

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """Return host and port of the coordinator; raises ElastaneError if that is not known (yet).

        `linked`: the agent has a session with a coordinator that lost its authority.
        """

    def found(self) -> None:
        """Accept that a session exists: leadership is not sought until the next `locate`."""

    def refused(self, host: str, port: int) -> None:
        """Accept that the address of the last session's coordinator refuses connections.

        Its process has ended: a host that is away does not answer at all.
        """

    async def run(self) -> None:
        """Seek leadership for as long as the job runs; raise errors that no retry can resolve."""

    async def close(self, *, ended: bool) -> None:
        """Give up leadership; if the job has `ended`, after all agents were informed."""


async def first_contact(keys: JobKeys, token: str, timeout_s: float) -> str:
    """Return the job's secret: `token`, else the one in the store. Waits for a store to come up.

    Raises RendezvousClosedError if the job has ended already, so an agent that is started after the
    end leaves no trace. Raises StoreError if the store was silent for `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    began_s, said = loop.time(), False
    while True:
        try:
            await keys.check_open()
            return token or await keys.token()
        except StoreError as error:
            waited_s = loop.time() - began_s
            if waited_s > timeout_s:
                raise
            if not said and waited_s > _SAY_AFTER_S:
                said = True
                _log.warning("waiting for the store: %s", error.what)
        await asyncio.sleep(_STORE_RETRY_S)


async def token_of(keys: JobKeys) -> str:
    """Return the job's secret from the store; close the store if that fails."""
    try:
        return await keys.token()
    except BaseException:
        await keys.store.close()
        raise


class EndpointLeadership:
    """The coordinator at an address; port 0 means standalone: here, on any port."""

    def __init__(self, endpoint: Endpoint, hosts: bool | None, hosting: CoordinatorHost) -> None:
        self._endpoint = endpoint
        self._hosts = hosts
        self._hosting = hosting
        self._serving: asyncio.Task[object] | None = None
        self._port = endpoint.port
        self._serve_error: ConfigurationError | None = None
        self._gave_up = asyncio.Event()

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """Serve the endpoint if it is this machine's and its port is free; return where it is."""
        if self._serving is not None and not self._serving.done():
            return self._endpoint.host, self._port
        addresses = await resolve(self._endpoint.host)
        mine = self._hosts if self._hosts is not None else is_mine(addresses)
        if mine:
            listener = listen(self._endpoint.host, self._port)
            if listener is not None:
                self._port = listener.getsockname()[1]
                self._serving = asyncio.create_task(self._serve(listener))
        return self._endpoint.host, self._port

    async def _serve(self, listener: socket.socket) -> None:
        with contextlib.closing(listener):
            try:
                await self._hosting.serve(listener)
            except ConfigurationError as error:  # A retry would fail in the same way.
                self._serve_error = error
                self._gave_up.set()

    def found(self) -> None:
        """See Leadership."""

    def refused(self, host: str, port: int) -> None:
        """See Leadership: only the agent at that address can serve there again."""

    async def run(self) -> None:
        """Wait, since `locate` starts the coordinator.

        Raises ConfigurationError if this agent cannot serve.
        """
        await self._gave_up.wait()
        assert self._serve_error is not None, "set before the event"
        raise self._serve_error

    async def close(self, *, ended: bool) -> None:
        """See Leadership."""
        await _end(self._serving, ended=ended)


class StoreLeadership:
    """The coordinator on the node that holds the store's lease."""

    def __init__(
        self, keys: JobKeys, node_id: str, local_addr: str, hosting: CoordinatorHost
    ) -> None:
        self._election = Election(keys, node_id, hosting.spec, on_authority=self._authority)
        self._local_addr = local_addr
        self._hosting = hosting
        self._running: asyncio.Task[None] | None = None
        self._sought = asyncio.Event()
        self._linked = False
        self._step_downs = StepDowns(hosting.spec.timing)

    def found(self) -> None:
        """Stop polling the store: this agent has found its coordinator."""
        self._sought.clear()
        self._election.forget_refusal()
        if self._hosting.coordinator is None:
            self._step_downs.forget()

    def refused(self, host: str, port: int) -> None:
        """See Leadership: that coordinator's process has ended, so its lease need not run out."""
        self._election.note_refusal(Endpoint(host, port))

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """See Leadership."""
        self._linked = linked
        self._sought.set()
        endpoint = await self._election.locate()
        if endpoint is None:
            raise MembershipError(
                "no coordinator has been elected yet",
                slug="no-coordinator",
                where=f"job {self._election.keys.job}",
            )
        return endpoint.host, endpoint.port

    async def run(self) -> None:
        """Campaign, serve while the lease lasts, and campaign again."""
        self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)

    async def _run(self) -> None:
        while True:
            await self._sought.wait()
            ended = False
            try:
                ended = await self._campaign()
            except StoreError as error:  # LeaseLostError among them
                _log.warning("the leadership was lost: %s", error.what)
            finally:
                await self._election.resign()
            if ended:
                await self._tidy()
                return
            await asyncio.sleep(STEP_DOWN_PAUSE_S if self._step_downs.stands_later else _PAUSE_S)

    async def _tidy(self) -> None:
        """Remove the job's keys from the store, except its outcome."""
        try:
            await self._election.keys.tidy()
        except StoreError as error:
            _log.warning("what the job kept in its store was not all removed: %s", error.what)

    async def _campaign(self) -> bool:
        """Campaign until this node is elected or the agent has found another coordinator."""
        campaign = asyncio.create_task(self._election.campaign())
        try:
            while not campaign.done():
                await asyncio.wait({campaign}, timeout=_PAUSE_S)
                if not self._sought.is_set() and not campaign.done():
                    return False
            return await self._hold(campaign.result())
        finally:
            campaign.cancel()
            await asyncio.gather(campaign, return_exceptions=True)

    async def _hold(self, record: JobRecord | None) -> bool:
        """Serve under the lease; returns whether the job has ended."""
        self._hosting.check(record)
        before = await self._election.keys.leader()
        # A linked coordinator is alive and only lost the store: its workers train, so this
        # candidate waits.
        ended = before.node_id if before and not self._linked else ""
        refuses = before is not None and self._election.is_refused(before.endpoint)
        world = record.world.fence if record and record.world else None
        takeover = Takeover(
            record,
            ended,
            store_backed=True,
            previous_refuses=refuses,
            waited_s=self._step_downs.waited_s(world, time.monotonic()),
        )
        listener = listen(self._local_addr, 0)
        if listener is None:
            raise ConfigurationError("no free port", slug="port-in-use")
        with contextlib.closing(listener):
            port = listener.getsockname()[1]
            serving = asyncio.ensure_future(
                self._hosting.serve(listener, takeover, self._election.save)
            )
            keeping = asyncio.ensure_future(self._election.keep())
            stepping_down = asyncio.ensure_future(self._step_down())
            try:
                host = await reachable_host(self._local_addr, self._election.keys.store)
                await self._election.publish(Endpoint(host, port))
                tasks = {serving, keeping, stepping_down}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done() and not stepping_down.done():
                    await keeping  # raises LeaseLostError
                return serving.done() and serving.result() is not None
            finally:
                for task in (serving, keeping, stepping_down):
                    task.cancel()
                await asyncio.gather(serving, keeping, stepping_down, return_exceptions=True)

    async def _step_down(self) -> None:
        """Return once this coordinator has had too few nodes for so long that others should try.

        If no other node takes over, this one leads again: see `StepDowns`.
        """
        while True:
            world, short_s = self._hosting.shortage()
            if self._step_downs.is_due(world, short_s):
                break
            await asyncio.sleep(_PAUSE_S)
        self._step_downs.note(world, short_s, time.monotonic())
        _log.warning(
            "too few nodes reach this coordinator: it steps down, since others may reach each other"
        )

    def _authority(self, change: AuthorityChanged) -> None:
        """Pass a change of authority to the running coordinator."""
        if self._hosting.coordinator is not None:
            self._hosting.coordinator.authority(change.held, change.reason)

    async def close(self, *, ended: bool) -> None:
        """See Leadership."""
        serves = self._hosting.coordinator is not None
        await _end(self._running, ended=ended and serves)
        await self._election.resign()
        await self._election.keys.store.close()


async def _end(task: asyncio.Task[object] | asyncio.Task[None] | None, *, ended: bool) -> None:
    """Let the coordinator inform its agents if the job has ended; then end it."""
    if task is None:
        return
    if ended:
        await asyncio.wait({task}, timeout=CLOSE_S * 2)
    task.cancel()
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(result, Exception) and not isinstance(result, ElastaneError):
        _log.error("the coordinator failed: %r", result)


async def reachable_host(local_addr: str, store: Store) -> str:
    """Return an address of this machine that others are likely to reach.

    The first of these: the user's --local-addr; this machine's address towards the store's servers,
    which the other nodes reach too; the source address of the default route; any other address that
    is no loopback; the loopback.
    """
    if local_addr:
        return local_addr
    servers: list[str] = []
    for url in getattr(store, "urls", ()):
        with contextlib.suppress(ElastaneError):  # the name may not resolve here and now
            if host := urlsplit(url).hostname:  # a local socket has none
                servers += await resolve(host)
    # Documentation addresses (RFC 5737, RFC 3849) have no host: they select the default route.
    for address in (*servers, "192.0.2.1", "2001:db8::1"):
        source = _source_towards(address)
        if source and not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
            return source
    others = sorted(a for a in local_addresses() if not a.startswith(("127.", "::1", "fe80")))
    return others[0] if others else "127.0.0.1"


def _source_towards(address: str) -> str:
    """Return this machine's source address towards `address`; a UDP connect sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        return str(sock.getsockname()[0])
    return ""
