"""The whole control plane of one job in virtual time: nodes, network, store, coordinators.

Owns the wiring and what can be done to it from outside (crash, pause, cut, drain); what goes
wrong when is `faults`' business, what must hold is `checks`'.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from elastane.core.effects import Exit
from elastane.core.events import Signalled
from elastane.core.messages import ToAgent, ToCoordinator
from elastane.core.model import JobSpec
from elastane.core.notes import Note
from elastane.testing.simulation.checks import Checks
from elastane.testing.simulation.clock import VirtualClock
from elastane.testing.simulation.network import Network, Session
from elastane.testing.simulation.node import SimulatedNode
from elastane.testing.simulation.seat import Seat
from elastane.testing.simulation.store import SimulatedStore, Taken
from elastane.testing.simulation.story import Story
from elastane.testing.simulation.workers import Run, Script, Training


class Cluster:
    """One job on simulated nodes; the first node owns the endpoint of the default store."""

    def __init__(
        self, spec: JobSpec, script: Script, rng: random.Random, *, store_backed: bool
    ) -> None:
        self.spec, self.rng, self.store_backed = spec, rng, store_backed
        self.clock = VirtualClock()
        self.story = Story(self.clock)
        self.network = Network(self.clock, rng)
        self.store = SimulatedStore(self.clock, rng)
        self.checks = Checks(self)
        self.store.on_write = lambda before, after: self.checks.wrote(before, after, durable=True)
        self.training = Training(self.clock, rng, script, self._can_step, self.checks.stepped)
        self.nodes: dict[str, SimulatedNode] = {}
        self.seats: dict[str, Seat] = {}
        self.disturbed_s = 0.0
        self._by_session: dict[int, Seat] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    @property
    def endpoint(self) -> str:
        """The host that owns the endpoint."""
        return next(iter(self.nodes))

    def add(self, size: int, node_rank: int | None = None) -> SimulatedNode:
        """Return a new host, with nothing on it yet."""
        node = SimulatedNode(self, f"n{len(self.nodes)}", size, node_rank)
        self.nodes[node.name] = node
        return node

    def boot(self, node: SimulatedNode, warm_s: float = 0.0) -> None:
        """Start an agent, and the coordinator where this is the endpoint of the default store."""
        if not self.store_backed and node.name == self.endpoint and node.name not in self.seats:
            self.seats[node.name] = Seat(self, node.name, None)
        node.boot(warm_s)

    # What a host does.

    def on_host(self, host: str, act: Callable[[], None]) -> None:
        """Do `act` on a host: later, while it is paused."""
        if self.nodes[host].paused:
            self._waiting.setdefault(host, []).append(act)
        else:
            act()

    def find(self, node: SimulatedNode) -> None:
        """Look for the coordinator on behalf of `node`; become it, where nobody is."""
        if not self.store_backed:
            self._connect(node, self.endpoint)
            return
        life = node.life

        def found(holder: str | None) -> None:
            if not node.alive or node.life != life or node.session is not None:
                return
            if holder is None:
                node.not_found("the store does not answer")
            elif holder:
                self._connect(node, holder)
            else:
                self._stand(node)

        self.store.ask(node.name, self.store.holder, found)

    def ask_holder(self, node: SimulatedNode, answer: Callable[[str], None]) -> None:
        """Ask the store who the coordinator is."""
        self.store.ask(node.name, self.store.holder, lambda holder: answer(holder or ""))

    def _stand(self, node: SimulatedNode) -> None:
        """Try to become the coordinator: take the lease, and rewrite the record under it."""
        life = node.life
        ttl_s = self.spec.timing.lease_ttl_s

        def elected(taken: Taken | None) -> None:
            if not node.alive or node.life != life or taken is None or node.name in self.seats:
                if node.alive and node.life == life and node.session is None:
                    node.look(0.05)
                return
            self.story.tell(f"{node.name} is elected in term {taken.term}")
            self.seats[node.name] = Seat(self, node.name, taken)
            node.look(0.0)

        self.store.ask(node.name, lambda: self.store.take(node.name, ttl_s), elected)

    def _connect(self, node: SimulatedNode, host: str) -> None:
        life = node.life

        def arrive() -> None:
            if not node.alive or node.life != life or node.session is not None:
                return
            seat = self.seats.get(host)
            if not self.network.linked(node.name, host) or self.nodes[host].paused:
                node.not_found(f"{host} does not answer")
            elif seat is None or not seat.alive:
                node.not_found(f"{host} refuses the connection")
            else:
                session = self.network.open(node.name, host)
                self._by_session[session.number] = seat
                seat.welcome(session)
                node.linked(session)

        self.clock.after(self.network.delay_s() * 2, arrive)

    def send_up(self, session: Session, message: ToCoordinator) -> None:
        """Carry a message of an agent."""
        seat = self._by_session[session.number]
        self.network.carry(session, session.up, lambda: seat.hear(session, message))

    def send_down(self, session: Session, message: ToAgent) -> None:
        """Carry a message of a coordinator."""
        node = self.nodes[session.up.source]
        self.network.carry(session, session.down, lambda: node.told(session, message))

    def close_from_agent(self, session: Session, reason: str, *, clean: bool) -> None:
        """End a session; `clean`: the agent's process is gone."""
        seat = self._by_session[session.number]
        self.network.carry(session, session.up, lambda: seat.lose(session, reason, clean))

    def close_from_seat(self, session: Session, reason: str) -> None:
        """End a session from the coordinator's side."""
        node = self.nodes[session.up.source]
        self.network.carry(session, session.down, lambda: node.unlinked(session, reason))

    def agent_exits(self, node: SimulatedNode, exit_: Exit) -> None:
        """The agent ends by its own decision."""
        self.story.tell(f"{node.name}: agent exits with {exit_.code}: {exit_.reason}")
        self.checks.exits(node, exit_)
        node.die()
        session, node.session = node.session, None
        if session is not None:
            self.close_from_agent(session, "the agent has exited", clean=True)
        seat = self.seats.get(node.name)
        if seat is not None and not seat.is_ending:
            seat.end("its agent has exited", clean=True)

    def seat_ended(self, seat: Seat) -> None:
        """Forget a coordinator."""
        if self.seats.get(seat.host) is seat:
            del self.seats[seat.host]

    def note(self, host: str, note: Note) -> None:
        """Take a note into the story."""
        at = f" [{note.fence}]" if note.fence else ""
        self.story.tell(f"{note.node_id or host}: {note.kind.value}{at}: {note.reason}")

    # What is done to a host.

    def crash(self, name: str, why: str, *, silent: bool = False) -> None:
        """Agent, workers and coordinator of a host die; `silent`: as when its power fails."""
        node = self.nodes[name]
        if not node.alive and name not in self.seats:
            return
        self.story.tell(f"FAULT {name} crashes{' silently' if silent else ''}: {why}")
        self.disturbed_s = self.clock.now_s
        self._waiting.pop(name, None)
        node.die()
        node.life += 1
        session, node.session = node.session, None
        if session is not None:
            if silent:
                session.half_open = True
            else:
                self.close_from_agent(session, "EOF", clean=True)
        seat = self.seats.get(name)
        if seat is not None:
            seat.end("its host has crashed", clean=False, tells=not silent)

    def pause(self, name: str, for_s: float) -> None:
        """Nothing runs on a host for a while."""
        node = self.nodes[name]
        if node.paused or not (node.alive or name in self.seats):
            return
        self.story.tell(f"FAULT {name} stands still for {for_s:.1f} s")
        node.paused, life = True, node.life

        def resume() -> None:
            if node.life != life or not node.paused:
                return
            self.story.tell(f"{name} goes on")
            waiting = self._waiting.pop(name, [])
            node.resume()
            for act in waiting:
                self.on_host(name, act)

        self.clock.after(for_s, resume)

    def drain(self, name: str) -> None:
        """SIGTERM to an agent."""
        node = self.nodes[name]
        if node.alive and not node.paused:
            self.story.tell(f"FAULT SIGTERM to the agent of {name}")
            node.signalled = True
            node.feed(Signalled("SIGTERM"))

    def break_session(self, name: str, *, half_open: bool) -> None:
        """The session of an agent breaks, or loses all that is sent over it."""
        session = self.nodes[name].session
        if session is None:
            return
        self.story.tell(f"FAULT session of {name} {'goes dead' if half_open else 'breaks'}")
        if half_open:
            session.half_open = True
            return
        self.close_from_seat(session, "connection reset")
        self._by_session[session.number].lose(session, "connection reset", False)

    def _can_step(self, run: Run) -> bool:
        hosts = [group.host for group in run.groups.values()]
        return not any(self.nodes[host].paused for host in hosts) and all(
            self.network.linked(one, other) for one in hosts for other in hosts if one < other
        )
