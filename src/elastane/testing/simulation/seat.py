"""The shell of a simulated coordinator: effects in order, durable first, and its lease.

Shell obligations are those of `core.effects`: nothing after a Persist is done before the store
has it, events that come meanwhile wait; and no event is handled on a lease that has run out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from elastane.core.effects import Finished, Hangup, Persist, RendezvousEffect, Send, Tell
from elastane.core.events import AuthorityChanged, Broken, Received, RendezvousEvent, Tick
from elastane.core.limits import LEASE_MARGIN
from elastane.core.messages import ToCoordinator
from elastane.core.model import Record
from elastane.core.rendezvous import Phase, Rendezvous
from elastane.testing.simulation.clock import Timer
from elastane.testing.simulation.network import Session
from elastane.testing.simulation.store import Taken

if TYPE_CHECKING:
    from elastane.testing.simulation.cluster import Cluster


class Seat:
    """One coordinator, on the host of one node."""

    def __init__(self, cluster: Cluster, host: str, taken: Taken | None) -> None:
        self.cluster, self.host, self.taken = cluster, host, taken
        self.alive = True
        self.finished = False
        self.dies_after_persist = False
        self.machine = Rendezvous(
            cluster.spec,
            cluster.clock.now_s,
            taken.record if taken else None,
            store_backed=taken is not None,
            previous_holder=taken.previous_holder if taken else "",
        )
        self._version = taken.version if taken else 0
        ttl_s = cluster.spec.timing.lease_ttl_s
        self._valid_until_s = cluster.clock.now_s + ttl_s * (1 - LEASE_MARGIN)
        self._held = True
        self._events: deque[RendezvousEvent] = deque()
        self._busy = False
        self._tick: Timer | None = None
        self.sessions: dict[int, Session] = {}
        if taken is not None:
            self._renew()
        self._schedule()

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended and its agents are being told."""
        return self.machine.phase in (Phase.CLOSING, Phase.CLOSED)

    def welcome(self, session: Session) -> None:
        """A new session is authenticated."""
        self.sessions[session.number] = session

    def hear(self, session: Session, message: ToCoordinator) -> None:
        """A message has come."""
        if self.alive and session.number in self.sessions:
            self.take(
                Received(
                    session=session.number,
                    message=message,
                    peer_host=session.up.source,
                    local_host=self.host,
                )
            )

    def lose(self, session: Session, reason: str, clean: bool) -> None:
        """A session ended from the other side."""
        if self.sessions.pop(session.number, None) is not None:
            self.take(Broken(session.number, reason, clean=clean))

    def take(self, event: RendezvousEvent) -> None:
        """Handle an event as soon as the host runs and nothing is being made durable."""
        self.cluster.on_host(self.host, lambda: self._take(event))

    def end(self, why: str, *, clean: bool, tells: bool = True) -> None:
        """The coordinator is no more; `tells`: the kernel closes its sessions."""
        if not self.alive:
            return
        self.alive = False
        self.cluster.story.tell(f"coordinator on {self.host} ends: {why}")
        sessions, self.sessions = self.sessions, {}
        if tells:
            for session in sessions.values():
                self.cluster.close_from_seat(session, why)
        if clean and self.taken is not None:
            term = self.taken.term
            self.cluster.store.ask(
                self.host, lambda: self.cluster.store.release(term), lambda _: None
            )
        self.cluster.seat_ended(self)

    def _take(self, event: RendezvousEvent) -> None:
        if not self.alive:
            return
        self._events.append(event)
        self._work()

    def _work(self) -> None:
        while self._events and not self._busy and self.alive:
            self._mind_lease()
            self._handle(self._events.popleft())
        self._schedule()

    def _mind_lease(self) -> None:
        if self.taken is None:
            return
        held = self.cluster.clock.now_s < self._valid_until_s
        if held != self._held:
            self._held = held
            reason = "the lease was renewed" if held else "the lease could not be renewed in time"
            self._events.appendleft(AuthorityChanged(held, reason))

    def _handle(self, event: RendezvousEvent) -> None:
        self._carry_out(deque(self.machine.handle(event, self.cluster.clock.now_s)))

    def _carry_out(self, effects: deque[RendezvousEffect]) -> None:
        while effects and self.alive:
            effect = effects.popleft()
            match effect:
                case Persist(record=record):
                    if self.taken is None:
                        self.cluster.checks.wrote(None, record, durable=False)
                    else:
                        self._persist(record, effects)
                        return
                case Send():
                    self._send(effect)
                case Hangup(session=number, reason=reason):
                    session = self.sessions.pop(number, None)
                    if session is not None:
                        self.cluster.close_from_seat(session, reason)
                case Tell(note=note):
                    self.cluster.note(self.host, note)
                case Finished():
                    self.finished = True
                    self.end("the job has ended", clean=True)

    def _send(self, effect: Send) -> None:
        session = self.sessions.get(effect.session)
        self.cluster.checks.sends(self, effect.message)
        if session is not None:
            self.cluster.send_down(session, effect.message)

    def _persist(self, record: Record, rest: deque[RendezvousEffect]) -> None:
        self._busy = True
        version = self._version
        store = self.cluster.store

        def answer(result: int | None) -> None:
            self.cluster.on_host(self.host, lambda: written(result))

        def written(result: int | None) -> None:
            if not self.alive:
                return
            if not result:
                self.end(
                    "its record could not be written"
                    if result is None
                    else "another coordinator has written",
                    clean=False,
                )
                return
            self._version, self._busy = result, False
            if self.dies_after_persist:
                self.cluster.crash(self.host, "dies between the record and its messages")
                return
            self._carry_out(rest)
            self._work()

        store.ask(self.host, lambda: store.write(version, record), answer)

    def _schedule(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if not self.alive or self._busy:
            return
        wake_s = self.machine.wake_s
        if wake_s is not None:
            delay_s = max(0.0, wake_s - self.cluster.clock.now_s)
            self._tick = self.cluster.clock.after(delay_s, lambda: self.take(Tick()))

    def _renew(self) -> None:
        assert self.taken is not None
        if not self.alive:
            return
        timing, sent_s, term = self.cluster.spec.timing, self.cluster.clock.now_s, self.taken.term
        store = self.cluster.store

        def answer(result: bool | None) -> None:
            self.cluster.on_host(self.host, lambda: renewed(result))

        def renewed(result: bool | None) -> None:
            if not self.alive:
                return
            if result is False:
                self.end("its lease was taken", clean=False)
                return
            if result:
                self._valid_until_s = sent_s + timing.lease_ttl_s * (1 - LEASE_MARGIN)
            self._poke()
            delay_s = timing.lease_renew_s if result else 0.1
            self.cluster.clock.after(delay_s, lambda: self.cluster.on_host(self.host, self._renew))

        store.ask(self.host, lambda: store.renew(self.host, term, timing.lease_ttl_s), answer)

    def _poke(self) -> None:
        """Tell the machine of its authority, should that have changed."""
        self._mind_lease()
        self._work()
