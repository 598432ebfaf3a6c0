"""The shell around the pure rendezvous: connections and time in, effects out.

One task takes one event after the other, hands it to the machine and carries out what it asks
for, in the order of its list; while a record is being saved everything else waits. It decides
nothing. It ends by the job's end, by cancellation, by loss of the lease, or by a fault of the
machine or the store; and when it ends, all sessions and the listener end with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from elastane.coordinator.clock import READ_S, SteadyClock
from elastane.coordinator.turns import Peer, Turns
from elastane.errors import LeaseLostError
from elastane.process.rpc import Access, Listener
from elastane.process.rpc.door import ServerLink
from elastane.protocol.effects import Finished, Hangup, Persist, RendezvousEffect, Send, Tell
from elastane.protocol.events import (
    AuthorityChanged,
    Broken,
    Fenced,
    Received,
    RendezvousEvent,
    Resized,
    Tick,
)
from elastane.protocol.limits import REFUSAL_NOTES_INTERVAL_S, REFUSAL_NOTES_MAX
from elastane.protocol.log_events import EventKind, Note
from elastane.protocol.model import JobRecord, Outcome

_log = logging.getLogger("elastane.coordinator")
# Events between two turns of the event loop, which also runs the agent: about a millisecond.
_EVENTS_PER_TURN = 32
# Ticks are at least this far apart, whatever the machine asks for.
_TICK_S = 0.001


class Machine(Protocol):
    """What decides: `elastane.coordinator.rules.Rendezvous`."""

    def handle(self, event: RendezvousEvent, now_s: float) -> list[RendezvousEffect]:
        """Take in an event at `now_s`, monotonic seconds; return what is to be done."""

    @property
    def wake_s(self) -> float | None:
        """When a Tick is needed at the latest; None: never."""


class Coordinator:
    """Serve one machine at one listener, which it owns from now on.

    `save` returns once a record is durable, and raises LeaseLostError where it must not be: then
    nothing that depends on it is sent. `tell` writes to the event log and must not raise.
    """

    def __init__(
        self,
        machine: Machine,
        listener: socket.socket,
        *,
        access: Access,
        save: Callable[[JobRecord], Awaitable[None]],
        tell: Callable[[Note], None],
    ) -> None:
        self._machine = machine
        self._save = save
        self._tell = tell
        self._door = Listener(listener, access, self)
        self._peers: dict[int, Peer] = {}
        self._number_of: dict[ServerLink, int] = {}
        self._closing: set[ServerLink] = set()
        self._last_number = 0
        self._turns = Turns()
        self._from_here: deque[AuthorityChanged | Resized | Fenced] = deque()  # not by the wire
        self._ticked_s = 0.0
        self._clock = SteadyClock()
        self._woken: asyncio.Future[None] | None = None
        self._refusals: deque[float] = deque()
        self._refusals_untold = 0

    async def run(self) -> Outcome | None:
        """Serve until the job has ended (its outcome) or the lease was lost (None).

        Raises what the machine or the store raised, as our or the store's fault: no agent is
        served any more then, so that they see it. Whatever happens, everything is closed.
        """
        politely = False
        try:
            self._door.open()
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
        """Tell the machine whether the store backs its decisions; before what still waits."""
        self._from_here.append(AuthorityChanged(held, reason))
        self._wake()

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Tell the machine how many nodes the job may have, which its owner changed."""
        assert 1 <= min_nodes <= max_nodes, f"a job of {min_nodes} to {max_nodes} nodes"
        self._from_here.append(Resized(min_nodes=min_nodes, max_nodes=max_nodes))
        self._wake()

    def fence(self, incarnations: tuple[str, ...], dead: tuple[str, ...]) -> None:
        """Tell the machine whom the job's owner has given up or knows to be dead; all each time."""
        self._from_here.append(Fenced(incarnations, dead))
        self._wake()

    def statistics(self) -> dict[str, int]:
        """Return how much of each thing it holds."""
        return {
            "sessions": len(self._peers),
            "unproven": self._door.count_unproven(),
            "closing": len(self._closing),
            "ever": self._last_number,
        }

    # The door's host, and owner of proven links.

    def proven(self, link: ServerLink) -> None:
        """Number the session; numbers are never used again."""
        self._last_number += 1
        self._peers[self._last_number] = Peer(self._last_number, link)
        self._number_of[link] = self._last_number

    def readable(self, link: ServerLink) -> None:
        """Give the session a turn."""
        number = self._number_of.get(link)
        if number is not None:
            self._turns.add(self._peers[number])
            self._wake()

    def ended(self, link: ServerLink) -> None:
        """Give the session a last turn, which tells of its end after its last message."""
        self.readable(link)

    def refused(self, peer_host: str, reason: str) -> None:
        """Tell of a refused connection; of many in a short time only the first and the number."""
        now_s = time.monotonic()
        while self._refusals and self._refusals[0] < now_s - REFUSAL_NOTES_INTERVAL_S:
            self._refusals.popleft()
        if len(self._refusals) >= REFUSAL_NOTES_MAX:
            self._refusals_untold += 1
            return
        self._refusals.append(now_s)
        more = f" (and {self._refusals_untold} more before)" if self._refusals_untold else ""
        self._refusals_untold = 0
        where = f"a connection from {peer_host}: " if peer_host else ""
        self._tell(Note(kind=EventKind.NODE_REFUSED, reason=f"{where}{reason}{more}"))

    def count_sessions(self) -> int:
        """Return how many proven links there are."""
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
        if self._from_here:
            return self._from_here.popleft()
        wake_s = self._machine.wake_s
        if wake_s is not None and wake_s <= now_s and self._ticked_s + _TICK_S <= now_s:
            self._ticked_s = now_s
            return Tick()
        while (peer := self._turns.take(now_s)) is not None:
            if peer.number not in self._peers:
                continue  # hung up meanwhile
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
                case Tell(note=note):
                    self._tell(note)
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
        del self._number_of[peer.link]

    def _note_closing(self, link: ServerLink) -> None:
        """Remember a link until its last bytes are sent."""
        if not link.is_gone:
            self._closing.add(link)
            link.when_gone = lambda: self._gone(link)

    def _gone(self, link: ServerLink) -> None:
        self._closing.discard(link)
        self._wake()

    async def _wait(self, now_s: float) -> None:
        """Wait for an event, until one is due, or until the clock is to be read."""
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
        """Close everything; politely: what was sent still goes out, in CLOSE_S at most."""
        self._door.close()
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
