"""Where the coordinator is, and whether it is here: one seat a job, two ways to it.

`EndpointSeat`: whichever agent owns the endpoint's address serves it; binding the port is the
election. `StoreSeat`: whoever holds the store's lease. An agent that leaves gives its seat up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from typing import Protocol
from urllib.parse import urlsplit

from elastane.coordinator.election import Election
from elastane.coordinator.host import Hosting, Takeover
from elastane.errors import ConfigurationError, ElastaneError, MembershipError, StoreError
from elastane.process.endpoint import Endpoint, is_mine, listen, local_addresses, resolve
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.limits import CLOSE_S, GIVE_WAY_S
from elastane.protocol.model import JobRecord
from elastane.stores.jobs import JobKeys
from elastane.stores.protocol import Store

_log = logging.getLogger("elastane.seat")
# After a seat was lost, before it is sought again: the store has to answer somebody else first.
_PAUSE_S = 0.2
# After it was given up for others, who look each STORE_POLL_S, a large crowd of them each second.
_WAY_S = 2.0
# Between two attempts to reach a store that is not up yet, and when a person hears of it.
_STORE_RETRY_S = 0.5
_SAY_AFTER_S = 3.0


class Leadership(Protocol):
    """Finds the coordinator, and runs it where that is this agent's part."""

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """Return where the coordinator is; raises ElastaneError where that is not known (yet).

        `linked`: while the session with one that lost its authority lives.
        """

    def found(self) -> None:
        """Hear that there is a session: the seat is not to be sought until `locate` is called."""

    async def run(self) -> None:
        """Seek the seat for as long as the job runs; raises what waiting cannot mend."""

    async def close(self, *, ended: bool) -> None:
        """Give the seat up; where the job has `ended`, once all agents have been told."""


async def first_contact(keys: JobKeys, token: str, patience_s: float) -> str:
    """Return the job's secret: `token`, else the one in the store. Waits for a store to come up.

    Raises RendezvousClosedError where the job has ended already, so that an agent that is started
    again after the end leaves no trace; StoreError where the store was silent for `patience_s`.
    """
    loop = asyncio.get_running_loop()
    began_s, said = loop.time(), False
    while True:
        try:
            await keys.check_open()
            return token or await keys.token()
        except StoreError as error:
            waited_s = loop.time() - began_s
            if waited_s > patience_s:
                raise
            if not said and waited_s > _SAY_AFTER_S:
                said = True
                _log.warning("waiting for the store: %s", error.what)
        await asyncio.sleep(_STORE_RETRY_S)


async def token_of(keys: JobKeys) -> str:
    """Return the job's secret, which is in the store; close the store where that cannot be had."""
    try:
        return await keys.token()
    except BaseException:
        await keys.store.close()
        raise


class EndpointSeat:
    """The coordinator at an address; port 0 is standalone: here, on any port."""

    def __init__(self, endpoint: Endpoint, hosts: bool | None, hosting: Hosting) -> None:
        self._endpoint = endpoint
        self._hosts = hosts
        self._hosting = hosting
        self._serving: asyncio.Task[object] | None = None
        self._port = endpoint.port
        self._unable: ConfigurationError | None = None
        self._gave_up = asyncio.Event()

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """Serve the endpoint if it is this machine's and nobody does; return where it is."""
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
                await self._hosting.serve(listener, Takeover())
            except ConfigurationError as error:  # The next try would fail in the same way.
                self._unable = error
                self._gave_up.set()

    def found(self) -> None:
        """See Seat."""

    async def run(self) -> None:
        """Wait: `locate` takes the seat. ConfigurationError where this agent cannot serve."""
        await self._gave_up.wait()
        assert self._unable is not None, "set before the event"
        raise self._unable

    async def close(self, *, ended: bool) -> None:
        """See Seat."""
        await _end(self._serving, ended=ended)


class StoreSeat:
    """The coordinator where the lease is, by a store."""

    def __init__(self, keys: JobKeys, node_id: str, local_addr: str, hosting: Hosting) -> None:
        self._election = Election(keys, node_id, hosting.spec, on_authority=self._authority)
        self._local_addr = local_addr
        self._hosting = hosting
        self._running: asyncio.Task[None] | None = None
        self._sought = asyncio.Event()
        self._linked = False
        self._gave_way = False

    def found(self) -> None:
        """See Seat: an agent that has its coordinator looks at the store no more."""
        self._sought.clear()
        if self._hosting.coordinator is None:
            self._gave_way = False

    async def locate(self, *, linked: bool = False) -> tuple[str, int]:
        """See Seat."""
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
                _log.warning("the seat was lost: %s", error.what)
            finally:
                await self._election.resign()
            if ended:
                await self._tidy()
                return
            await asyncio.sleep(_WAY_S if self._gave_way else _PAUSE_S)

    async def _tidy(self) -> None:
        """Leave nothing in the store but how the job ended."""
        try:
            await self._election.keys.tidy()
        except StoreError as error:
            _log.warning("what the job kept in its store was not all removed: %s", error.what)

    async def _campaign(self) -> bool:
        """Seek the seat until it is had or another's coordinator was found."""
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
        before = await self._election.keys.seat()
        # Where its host lives and merely lost the store, its workers train: they are waited for.
        ended = before.node_id if before and not self._linked else ""
        takeover = Takeover(record, ended, store_backed=True)
        listener = listen(self._local_addr, 0)
        if listener is None:
            raise ConfigurationError("no free port", slug="port-in-use")
        with contextlib.closing(listener):
            port = listener.getsockname()[1]
            serving = asyncio.ensure_future(
                self._hosting.serve(listener, takeover, self._election.save)
            )
            keeping = asyncio.ensure_future(self._election.keep())
            giving_way = asyncio.ensure_future(self._give_way())
            try:
                host = await reachable_host(self._local_addr, self._election.keys.store)
                await self._election.publish(Endpoint(host, port))
                tasks = {serving, keeping, giving_way}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done() and not giving_way.done():
                    await keeping  # which raises LeaseLostError
                return serving.done() and serving.result() is not None
            finally:
                for task in (serving, keeping, giving_way):
                    task.cancel()
                await asyncio.gather(serving, keeping, giving_way, return_exceptions=True)

    async def _give_way(self) -> None:
        """Return once the job is too small on this side for so long that others should try.

        They may reach each other and the store, but not this host. Once, until another's
        coordinator was found: where nobody takes the seat, it is this agent's again.
        """
        while self._gave_way or self._hosting.short_of_nodes_s() < GIVE_WAY_S:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        self._gave_way = True
        _log.warning(
            "too few nodes reach this coordinator: it gives up its seat, since others may reach"
            " each other"
        )

    def _authority(self, change: AuthorityChanged) -> None:
        """Hand the election's word on to the coordinator in charge."""
        if self._hosting.coordinator is not None:
            self._hosting.coordinator.authority(change.held, change.reason)

    async def close(self, *, ended: bool) -> None:
        """See Seat."""
        serves = self._hosting.coordinator is not None
        await _end(self._running, ended=ended and serves)
        await self._election.resign()
        await self._election.keys.store.close()


async def _end(task: asyncio.Task[object] | asyncio.Task[None] | None, *, ended: bool) -> None:
    """Let the coordinator finish telling its agents where the job has ended; then end it."""
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

    The user's --local-addr; else the one that this machine has towards the store's servers, which
    the others reach too; else the source address of the default route; else any that is no
    loopback; else the loopback.
    """
    if local_addr:
        return local_addr
    servers: list[str] = []
    for url in getattr(store, "urls", ()):
        with contextlib.suppress(ElastaneError):  # a name that does not resolve here and now
            if host := urlsplit(url).hostname:  # none for a socket of this machine
                servers += await resolve(host)
    # Documentation addresses (RFC 5737, RFC 3849) are nobody's: the default route leads there.
    for address in (*servers, "192.0.2.1", "2001:db8::1"):
        source = _source_towards(address)
        if source and not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
            return source
    others = sorted(a for a in local_addresses() if not a.startswith(("127.", "::1", "fe80")))
    return others[0] if others else "127.0.0.1"


def _source_towards(address: str) -> str:
    """Return the address from which this machine would send there; a UDP connect sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        return str(sock.getsockname()[0])
    return ""
