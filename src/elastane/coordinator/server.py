"""The shell around the coordinator's rules: connections and time in, effects out.

One task handles one event at a time and performs its effects in order; while a record is being
saved everything else waits. It decides nothing. It ends with the job, by cancellation, by loss of
the lease, or by a fault of the rules or the store; then all sessions and the listener end too.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from elastane.coordinator.clock import READ_S, SteadyClock
from elastane.errors import LeaseLostError
from elastane.process.rpc import Access, Listener
from elastane.process.rpc.listener import ServerLink
from elastane.protocol.effects import Finished, Hangup, Persist, RendezvousEffect, Send, WriteEvent
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
    Tick,
)
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.model import JobRecord, Outcome

# The message rate of one session. An honest agent sends about one message a second, and a few dozen
# at once when its workers fail.
MESSAGES_PER_S_MAX = 100.0
MESSAGES_BURST_MAX = 400
# Logged refusals of connections in one such interval; the rest are counted.
REFUSAL_NOTES_MAX = 10
REFUSAL_NOTES_INTERVAL_S = 10.0

_log = logging.getLogger("elastane.coordinator")


# Events between two turns of the event loop, which also runs the agent: about a millisecond.
_EVENTS_PER_TURN = 32

# Ticks are at least this far apart, whatever the rules request.
_TICK_S = 0.001

_MESSAGE_S = 1.0 / MESSAGES_PER_S_MAX


_BURST_S = MESSAGES_BURST_MAX / MESSAGES_PER_S_MAX


class Machine(Protocol):
    """The deciding state machine: `elastane.coordinator.rules.Rendezvous`."""

    def handle(self, event: RendezvousEvent, now_s: float) -> list[RendezvousEffect]:
        """Record an event at `now_s`, monotonic seconds; return the effects to perform."""

    @property
    def wake_s(self) -> float | None:
        """When a Tick is needed at the latest; None: never."""


class Peer:
    """One session: its number, its link, and how much of its rate it has used."""

    def __init__(self, number: int, link: ServerLink) -> None:
        self.number = number
        self.link = link
        self.used_until_s = 0.0  # by the generic cell rate algorithm, ITU-T I.371
        self.is_queued = False


class Turns:
    """A queue of sessions with messages to read; each is in it at most once.

    Sessions take turns, one message each, at a bounded rate. So a chatty session delays the others
    by no more than one message.
    """

    def __init__(self) -> None:
        self._waiting: deque[Peer] = deque()
        self._slowed: list[tuple[float, int, Peer]] = []

    def add(self, peer: Peer) -> None:
        """Queue `peer` behind the sessions that are waiting."""
        if not peer.is_queued:
            peer.is_queued = True
            self._waiting.append(peer)

    def take(self, now_s: float) -> Peer | None:
        """Return the next peer whose rate allows a message; None if there is none."""
        while self._slowed and self._slowed[0][0] <= now_s:
            self._waiting.append(heapq.heappop(self._slowed)[2])
        while self._waiting:
            peer = self._waiting.popleft()
            allowed_s = peer.used_until_s - _BURST_S
            if allowed_s > now_s and not peer.link.is_over:
                heapq.heappush(self._slowed, (allowed_s, peer.number, peer))
                continue
            peer.used_until_s = max(peer.used_until_s, now_s) + _MESSAGE_S
            peer.is_queued = False
            return peer
        return None

    @property
    def next_s(self) -> float | None:
        """When the next peer that exceeded its rate may send again; None if there is none."""
        return self._slowed[0][0] if self._slowed else None


class Coordinator:
    """Serve one machine at one listener, which it then owns.

    `save` returns once a record is durable. It raises LeaseLostError if the record must not be
    written; then nothing that depends on it is sent. `tell` writes to the event log and must not
    raise.
    """

    def __init__(
        self,
        machine: Machine,
        listener: socket.socket,
        *,
        access: Access,
        save: Callable[[JobRecord], Awaitable[None]],
        tell: Callable[[LogEvent], None],
    ) -> None:
        self._machine = machine
        self._save = save
        self._tell = tell
        self._listener = Listener(listener, access, self)
        self._peers: dict[int, Peer] = {}
        self._numbers: dict[ServerLink, int] = {}
        self._closing: set[ServerLink] = set()
        self._last_number = 0
        self._turns = Turns()
        # events from this process, not from the wire
        self._local_events: deque[AuthorityChanged | Resized | Fenced] = deque()
        self._ticked_s = 0.0
        self._clock = SteadyClock()
        self._woken: asyncio.Future[None] | None = None
        self._refusals: deque[float] = deque()
        self._refusals_unlogged = 0

    async def run(self) -> Outcome | None:
        """Serve until the job has ended (its outcome) or the lease was lost (None).

        Raises what the machine or the store raised, as our fault or the store's. Sessions and the
        listener are closed in every case, so agents notice.
        """
        politely = False
        try:
            self._listener.open()
            outcome = await self._serve()
            politely = True
            return outcome
        except LeaseLostError as error:
            _log.warning("coordinator: the lease is lost, another may decide: %s", error.what)
            return None
        except Exception:
            _log.exception("coordinator: stops serving, by a fault of its own or of its store")
            raise
        finally:
            await self._shut(politely)

    def authority(self, held: bool, reason: str) -> None:
        """Inform the machine whether the store backs its decisions, ahead of queued messages."""
        self._local_events.append(AuthorityChanged(held, reason))
        self._wake()

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Inform the machine how many nodes the job may have, as its owner changed that."""
        assert 1 <= min_nodes <= max_nodes, f"a job of {min_nodes} to {max_nodes} nodes"
        self._local_events.append(Resized(min_nodes=min_nodes, max_nodes=max_nodes))
        self._wake()

    def fence(self, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
        """Inform the machine which agents the owner has fenced, and which are dead."""
        self._local_events.append(Fenced(incarnations, dead))
        self._wake()

    def statistics(self) -> dict[str, int]:
        """Return how many of each kind of connection it holds."""
        return {
            "sessions": len(self._peers),
            "unproven": self._listener.count_unproven(),
            "closing": len(self._closing),
            "ever": self._last_number,
        }

    # Called by the listener.

    def proven(self, link: ServerLink) -> None:
        """Give an authenticated session a number, which is never used again."""
        self._last_number += 1
        self._peers[self._last_number] = Peer(self._last_number, link)
        self._numbers[link] = self._last_number

    def readable(self, link: ServerLink) -> None:
        """Queue the session, which has a message."""
        number = self._numbers.get(link)
        if number is not None:
            self._turns.add(self._peers[number])
            self._wake()

    def ended(self, link: ServerLink) -> None:
        """Queue the session once more: its end is an event after its last message."""
        self.readable(link)

    def refused(self, peer_host: str, reason: str) -> None:
        """Log a refused connection; of many in a short time only the first ones and a count."""
        now_s = time.monotonic()
        while self._refusals and self._refusals[0] < now_s - REFUSAL_NOTES_INTERVAL_S:
            self._refusals.popleft()
        if len(self._refusals) >= REFUSAL_NOTES_MAX:
            self._refusals_unlogged += 1
            return
        self._refusals.append(now_s)
        more = f" (and {self._refusals_unlogged} more before)" if self._refusals_unlogged else ""
        self._refusals_unlogged = 0
        where = f"a connection from {peer_host}: " if peer_host else ""
        self._tell(LogEvent(kind=EventKind.NODE_REFUSED, reason=f"{where}{reason}{more}"))

    def count_sessions(self) -> int:
        """Return how many authenticated links there are."""
        return len(self._peers) + len(self._closing)

    # Private.

    async def _serve(self) -> Outcome:
        handled = 0
        while True:
            now_s = self._clock.read_s()
            event = self._next_event(now_s)
            if event is None:
                await self._wait(now_s)
                continue
            outcome = await self._carry_out(self._machine.handle(event, now_s))
            if outcome is not None:
                return outcome
            handled += 1
            if handled % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _next_event(self, now_s: float) -> RendezvousEvent | None:
        if self._local_events:
            return self._local_events.popleft()
        wake_s = self._machine.wake_s
        if wake_s is not None and wake_s <= now_s and self._ticked_s + _TICK_S <= now_s:
            self._ticked_s = now_s
            return Tick()
        while (peer := self._turns.take(now_s)) is not None:
            if peer.number not in self._peers:
                continue  # closed meanwhile
            event = self._event_of(peer)
            if event is not None:
                return event
        return None

    def _event_of(self, peer: Peer) -> RendezvousEvent | None:
        """Return the peer's next message, or its end after the last one."""
        link = peer.link
        message = link.next_message()
        if message is not None:
            if link.has_more or link.is_over:
                self._turns.add(peer)
            return Received(
                session=peer.number,
                message=message,
                peer_host=link.peer_host,
                local_host=link.local_host,
            )
        if not link.is_over:
            return None
        self._forget(peer)
        return Broken(peer.number, link.reason, link.clean)

    async def _carry_out(self, effects: list[RendezvousEffect]) -> Outcome | None:
        outcome: Outcome | None = None
        for effect in effects:
            match effect:
                case Persist(record=record):
                    await self._save(record)
                case Send(session=session, message=message):
                    if (peer := self._peers.get(session)) is not None:
                        peer.link.send(message)
                case Hangup(session=session, reason=reason):
                    self._hang_up(session, reason)
                case WriteEvent(event=event):
                    self._tell(event)
                case Finished():
                    outcome = effect.outcome
        return outcome

    def _hang_up(self, session: int, reason: str) -> None:
        peer = self._peers.get(session)
        if peer is not None:
            self._forget(peer)
            peer.link.close(reason)
            self._note_closing(peer.link)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.number]
        del self._numbers[peer.link]

    def _note_closing(self, link: ServerLink) -> None:
        """Remember a link until its last bytes are sent."""
        if not link.is_gone:
            self._closing.add(link)
            link.when_gone = lambda: self._gone(link)

    def _gone(self, link: ServerLink) -> None:
        self._closing.discard(link)
        self._wake()

    async def _wait(self, now_s: float) -> None:
        """Wait for a message, for the next deadline, or until the clock has to be read."""
        due = [at_s for at_s in (self._machine.wake_s, self._turns.next_s) if at_s is not None]
        loop = asyncio.get_running_loop()
        self._woken = loop.create_future()
        delay_s = min([READ_S, *(at_s - now_s for at_s in due)])
        timer = loop.call_later(max(delay_s, _TICK_S), self._wake)
        try:
            await self._woken
        finally:
            self._woken = None
            timer.cancel()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _shut(self, politely: bool) -> None:
        """Close everything; bytes already enqueued still go out, in CLOSE_S at most."""
        self._listener.close()
        for peer in list(self._peers.values()):
            self._forget(peer)
            if politely:
                peer.link.close("the coordinator has finished")
                self._note_closing(peer.link)
            else:
                peer.link.abort("the coordinator has stopped")
        if not politely:
            for link in list(self._closing):
                link.abort("the coordinator has stopped")
            return
        while self._closing:  # a link that is closing ends in CLOSE_S
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
