"""A simulated cluster with the whole control plane of one job: nodes, network, store, coordinators.

Owns the wiring, and what can be done to it from outside (crash, pause, cut, drain). `faults`
decides what goes wrong and when; `checks` says what must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from elastane.coordinator.rules import StepDowns
from elastane.protocol.effects import Exit
from elastane.protocol.events import Fenced, Resized, Signalled
from elastane.protocol.limits import STEP_DOWN_PAUSE_S
from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.model import JobSpec, world_bounds
from simulation.checks import Checks
from simulation.clock import HostClock, VirtualClock
from simulation.coordinator import SimulatedCoordinator
from simulation.crash_points import EffectGap
from simulation.election import SimulatedElection
from simulation.in_place_workers import InPlaceTraining
from simulation.network import Network, SimulatedSession
from simulation.node import SimulatedNode
from simulation.places import InPlaceGroup
from simulation.runs import LocalGroup
from simulation.script import HasHosts, Script, StoppedProcesses
from simulation.store import Published, SimulatedStore
from simulation.story import Story
from simulation.workers import Training

# The job's owner learns of a host's end, and reports it, within this: later than the host's peers
# do.
_HEARD_S = 0.15


class SimulatedCluster:
    """One job on simulated nodes; the first node owns the endpoint of the default store."""

    def __init__(
        self, spec: JobSpec, script: Script, rng: random.Random, *, store_backed: bool
    ) -> None:
        self.spec, self.rng, self.store_backed = spec, rng, store_backed
        self.script, self.in_place = script, script.in_place
        self.racks = 0
        # The range of nodes that the owner requested, delivered to each coordinator.
        self.wanted: Resized | None = None
        # The incarnations that the owner has given up, delivered to each coordinator.
        self.given_up: tuple[str, ...] = ()
        self.sees_deaths = False  # the owner learns of crashed hosts and reports them
        self.dead: tuple[str, ...] = ()
        self.still = StoppedProcesses()
        self.clock = VirtualClock()
        self.story = Story(self.clock)
        self.network = Network(self.clock, rng)
        self.store = SimulatedStore(self.clock, rng)
        self.checks = Checks(self)
        self.store.on_write = self.checks.filed
        # One of the two has the job's workers.
        self.training = Training(self.clock, rng, script, self._can_step, self.checks, self.still)
        self.in_place_training = InPlaceTraining(
            self.clock, rng, script, self._can_step, self.checks, self.still
        )
        self.training.address_apart = self._address_apart
        self.in_place_training.address_apart = self._address_apart
        self.still.is_overdue = lambda host: self.nodes[host].is_overdue
        self.nodes: dict[str, SimulatedNode] = {}
        self.coordinators: dict[str, SimulatedCoordinator] = {}
        self.disturbed_s = 0.0
        self.drifts: tuple[float, ...] = (1.0,)
        self.on_step: Callable[[str, EffectGap], bool] = lambda host, step: False
        self._by_session: dict[int, SimulatedCoordinator] = {}
        self.paused = 0
        self.coordinators_started = 0
        self.upset = False  # a fault other than the death of workers has happened
        self.torn = False  # a fault other than the death of processes and hosts
        self.drained = False  # a node left, or came late
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    @property
    def endpoint(self) -> str:
        """The host that owns the endpoint."""
        return next(iter(self.nodes))

    @property
    def groups(self) -> list[InPlaceGroup]:
        """The workers that recover in place, by node."""
        return self.in_place_training.groups

    @property
    def fewest(self) -> int:
        """The least number of nodes with which the job trains, and starts."""
        return max(self._bounds[0], (self.wanted or self.spec).min_nodes)

    @property
    def most(self) -> int:
        """The greatest number of nodes with a place."""
        return self._bounds[1]

    @property
    def _bounds(self) -> tuple[int, int]:
        wanted = self.wanted or self.spec
        return world_bounds(wanted.min_nodes, wanted.max_nodes, max(1, self.script.span))

    def together(self, names: Sequence[str]) -> list[str]:
        """Return the hosts among these on the larger side of cuts that keep them apart.

        They reach one another, both ways, and some of them the store. Empty if nothing is cut, or
        the job has no store.
        """
        if self.network.is_whole or not self.store_backed:
            return []
        side = [*names]
        while side and max(apart := [len(self.apart(one, side)) for one in side]) > 0:
            side.pop(apart.index(max(apart)))
        return side if {*side} - self.store.cut_off else []

    def apart(self, host: str, others: Iterable[str]) -> list[str]:
        """Return which of the others a host does not reach, or which do not reach it."""
        return [other for other in others if not self.network.linked(host, other)]

    def unanswered(self, group: InPlaceGroup | LocalGroup) -> tuple[str, ...]:
        """Return the addresses that do not answer the workers of a node, in their world."""
        if self.network.is_whole:
            return ()
        if isinstance(group, LocalGroup):
            hosts = {*group.run.hosts} if group.run is not None and group.computes else set[str]()
        else:
            worlds = {id(w.world): w.world for w in group.workers.values() if w.world is not None}
            hosts = {host for world in worlds.values() for host in world.hosts}
        return tuple(sorted(self.nodes[name].address for name in self.apart(group.host, hosts)))

    def answers(self, host: str, address: str) -> bool:
        """Whether the host at an address answers a connection from `host`."""
        return any(
            node.address == address and self.network.linked(host, node.name)
            for node in self.nodes.values()
        )

    def _address_apart(self, host: str, hosts: Sequence[str]) -> str:
        if self.network.is_whole:
            return ""
        apart = self.apart(host, hosts)
        return self.nodes[apart[0]].address if apart else ""

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Change the range of nodes, as the job's owner."""
        self.wanted = Resized(min_nodes=min_nodes, max_nodes=max_nodes)
        for coordinator in [*self.coordinators.values()]:
            coordinator.take(self.wanted)

    def give_up(self, name: str) -> None:
        """Give up the agent of a host, as the job's owner: it must not be admitted again."""
        incarnation = self.nodes[name].incarnation
        if incarnation and incarnation not in self.given_up:
            self.story.tell(f"FAULT the job's owner gives agent {incarnation} up")
            self.given_up += (incarnation,)
            self.tell_fenced()

    def tell_fenced(self) -> None:
        """Inform all coordinators which agents the owner has given up, and which are dead."""
        for coordinator in [*self.coordinators.values()]:
            coordinator.take(Fenced(self.given_up, self.dead))

    def add(self, size: int, node_rank: int | None = None) -> SimulatedNode:
        """Return a new host without processes."""
        # Clocks of hosts are unrelated; a comparison of two hosts' clocks fails here.
        clock = HostClock(self.clock, self.rng.random() * 1e6, self.rng.choice(self.drifts))
        number = len(self.nodes)
        rack = f"rack{number % self.racks}" if self.racks else ""
        node = SimulatedNode(self, f"n{number}", size, node_rank, rack, clock)
        self.nodes[node.name] = node
        return node

    def boot(self, node: SimulatedNode, warm_s: float = 0.0) -> None:
        """Start an agent, and the coordinator on the endpoint of the default store."""
        if (
            not self.store_backed
            and node.name == self.endpoint
            and node.name not in self.coordinators
        ):
            self.coordinators[node.name] = self._coordinator(node, None)
        elif self.store_backed and node.name in self.coordinators:
            self.coordinators[node.name].end("its process has ended", clean=False)
        node.boot(warm_s)

    @property
    def saved_step(self) -> int:
        """The step of the last checkpoint."""
        return (self.in_place_training if self.in_place else self.training).saved_step

    def kill_worker(self, name: str, local_rank: int) -> bool:
        """SIGKILL to one worker of a host; return whether there are any."""
        node = self.nodes[name]
        found = node.in_place_group is not None or node.group is not None
        if self.in_place and node.in_place_group is not None:
            self.in_place_training.crash(node.in_place_group, local_rank)
        elif node.group is not None:
            self.training.crash(node.group, local_rank)
        return found

    # What a host does.

    def on_host(self, host: str, act: Callable[[], None]) -> None:
        """Do `act` on a host: later, while it is paused."""
        if self.nodes[host].paused:
            self._waiting.setdefault(host, []).append(act)
        else:
            act()

    def dies_at(self, host: str, step: EffectGap) -> bool:
        """Whether a planned death at this crash point kills the process on `host`."""
        return step is not EffectGap.NONE and self.on_step(host, step)

    def find(self, node: SimulatedNode) -> None:
        """Look for the coordinator on behalf of `node`, and campaign meanwhile."""
        if not self.store_backed:
            self._connect(node, self.endpoint)
            return
        life = node.life

        def found(published: tuple[Published | None] | None) -> None:
            if not node.alive or node.life != life or node.session is not None:
                return
            if published is None:
                node.not_found("the store does not answer")
                return
            self.stand(node)
            if published[0] is None:
                node.not_found("no coordinator has been elected yet")
            else:
                self._connect(node, published[0].host)

        self.store.ask(node.name, self.store.published, found)

    def ask_leader(self, node: SimulatedNode, answer: Callable[[str], None]) -> None:
        """Ask the store where the coordinator is."""
        self.store.ask(
            node.name,
            self.store.published,
            lambda published: answer(published[0].host if published and published[0] else ""),
        )

    def stand(self, node: SimulatedNode) -> None:
        """Try once to become the coordinator, unless a try is under way."""
        if node.election is not None or node.name in self.coordinators:
            return
        if node.clock.now_s < node.stands_from_s:
            return
        election = node.election = SimulatedElection(
            node, self.store, self.spec.timing, self.on_host
        )

        def answer(won: bool | None) -> None:
            node.election = None
            if won:
                self.story.tell(f"{node.name} is elected in term {election.term}")
                self.coordinators[node.name] = self._coordinator(node, election)

        election.campaign(answer, node.job_is_over)

    def _coordinator(
        self, node: SimulatedNode, election: SimulatedElection | None
    ) -> SimulatedCoordinator:
        return SimulatedCoordinator(self, node.name, node.clock, election)

    def _connect(self, node: SimulatedNode, host: str) -> None:
        life = node.life

        def arrive() -> None:
            if not node.alive or node.life != life or node.session is not None:
                return
            coordinator = self.coordinators.get(host)
            is_cut = not self.network.linked(node.name, host)
            if is_cut and self.network.rejects:
                node.refused_by(host)
            elif is_cut or self.nodes[host].paused:
                node.not_found(f"{host} does not answer")
            elif coordinator is None or not coordinator.alive:
                node.refused_by(host)
            else:
                session = self.network.open(node.name, node.life, host)
                self._by_session[session.number] = coordinator
                coordinator.welcome(session)
                node.linked(session)

        self.clock.after(self.network.dial_s(node.name, host), arrive)

    def send_up(self, session: SimulatedSession, message: ToCoordinator) -> None:
        """Carry a message of an agent."""
        coordinator = self._by_session[session.number]
        self.network.carry(session, session.up, lambda: coordinator.hear(session, message))

    def send_down(self, session: SimulatedSession, message: ToAgent) -> None:
        """Carry a message of a coordinator."""
        node = self.nodes[session.up.source]
        if session.half_open and node.alive and node.life != session.life and not node.moves:
            self._reset_unknown(session)
        self.network.carry(session, session.down, lambda: node.received(session, message))

    def _reset_unknown(self, session: SimulatedSession) -> None:
        """Reset a session at a host that was started again, and does not know it."""
        agent, host = session.up.source, session.down.source
        if self.network.linked(agent, host):
            coordinator = self._by_session[session.number]
            self.clock.after(
                self.network.dial_s(agent, host),
                lambda: coordinator.lose(session, "connection reset", False),
            )

    def close_from_agent(self, session: SimulatedSession, reason: str, *, clean: bool) -> None:
        """End a session; `clean`: the agent's process is gone."""
        coordinator = self._by_session[session.number]
        self.network.carry(session, session.up, lambda: coordinator.lose(session, reason, clean))

    def close_from_coordinator(self, session: SimulatedSession, reason: str) -> None:
        """End a session from the coordinator's side."""
        node = self.nodes[session.up.source]
        self.network.carry(session, session.down, lambda: node.unlinked(session, reason))

    def agent_exits(self, node: SimulatedNode, exit_: Exit) -> None:
        """End an agent by its own decision."""
        self.story.tell(f"{node.name}: agent exits with {exit_.code}: {exit_.reason}")
        self.checks.exits(node, exit_)
        self._forgets(node.name)
        node.die()
        session, node.session = node.session, None
        if session is not None:
            self.close_from_agent(session, "the agent has exited", clean=True)
        coordinator = self.coordinators.get(node.name)
        if coordinator is not None and not coordinator.is_ending:
            coordinator.end("its agent has exited", clean=True)

    def step_downs(self, host: str) -> StepDowns:
        """Return how often the coordinators of a host stepped down."""
        return self.nodes[host].step_downs

    def steps_down(self, host: str) -> None:
        """Let other nodes stand first, since too few reach the coordinator on `host`."""
        node = self.nodes[host]
        node.stands_from_s = node.clock.now_s + STEP_DOWN_PAUSE_S

    def coordinator_ended(self, coordinator: SimulatedCoordinator) -> None:
        """Forget a coordinator."""
        if self.coordinators.get(coordinator.host) is coordinator:
            del self.coordinators[coordinator.host]

    def note(self, host: str, event: LogEvent) -> None:
        """Add an event to the story."""
        self.checks.noted(event)
        at = f" [{event.fence}]" if event.fence else ""
        self.story.tell(f"{event.node_id or host}: {event.kind.value}{at}: {event.reason}")

    # Faults of a host.

    def crash(self, name: str, why: str, *, silent: bool = False) -> None:
        """Kill agent, workers and coordinator of a host; `silent`: as in a loss of power."""
        node = self.nodes[name]
        if not node.alive and name not in self.coordinators:
            return
        self.story.tell(f"FAULT {name} crashes{' silently' if silent else ''}: {why}")
        self.disturbed_s = self.clock.now_s
        self._forgets(name)
        # Its agents notice later than the next coordinator waits for them.
        self.torn = self.torn or (silent and name in self.coordinators)
        self._waiting.pop(name, None)
        node.die()
        node.life += 1
        if self.sees_deaths and node.incarnation not in self.dead:
            self.dead += (node.incarnation,)
            self.clock.after(_HEARD_S, self.tell_fenced)
        session, node.session = node.session, None
        if session is not None:
            if silent:
                session.half_open = True
            else:
                self.close_from_agent(session, "EOF", clean=True)
        coordinator = self.coordinators.get(name)
        if coordinator is not None:
            coordinator.end("its host has crashed", clean=False, tells=not silent)

    def _forgets(self, name: str) -> None:
        """Without a store the job's memory goes with the endpoint."""
        self.torn = self.torn or (not self.store_backed and name == self.endpoint)

    def pause(self, name: str, for_s: float, *, suspended: bool = False) -> None:
        """Stop a host for a while; `suspended`: its monotonic clock stops too."""
        node = self.nodes[name]
        if node.stands_still or not (node.alive or name in self.coordinators):
            return
        how = "is suspended" if suspended else "stands still"
        self.story.tell(f"FAULT {name} {how} for {for_s:.1f} s")
        self._stop(node, ("agent", "workers", "orphan reaper"), for_s)
        if suspended:
            node.clock.suspend()

    def stop_processes(self, name: str, kinds: Sequence[str], for_s: float) -> None:
        """Stop (SIGSTOP) only some processes of a host: agent, workers, orphan reaper."""
        node = self.nodes[name]
        if node.alive and not node.stands_still:
            self.story.tell(f"FAULT {' and '.join(kinds)} of {name} stand still for {for_s:.1f} s")
            self._stop(node, kinds, for_s)

    def _stop(self, node: SimulatedNode, kinds: Sequence[str], for_s: float) -> None:
        name, life, from_s = node.name, node.life, node.clock.now_s
        node.paused = "agent" in kinds
        node.workers_paused, node.reaper_paused = "workers" in kinds, "orphan reaper" in kinds
        self.paused += "workers" in kinds

        def resume() -> None:
            self.paused -= "workers" in kinds
            node.clock.wake()
            if node.life != life or not node.stands_still:
                return
            self.story.tell(f"{name} continues")
            waiting = self._waiting.pop(name, [])
            if node.paused:
                self._stood_still(name, node.clock.now_s - from_s)
            node.resume()
            for act in waiting:
                self.on_host(name, act)

        self.clock.after(for_s, resume)

    def _stood_still(self, name: str, for_s: float) -> None:
        coordinator = self.coordinators.get(name)
        if coordinator is not None:
            coordinator.stood_still(for_s)

    def jump_clock(self, name: str, by_s: float) -> None:
        """Move the clocks of a host forward at once."""
        self.story.tell(f"FAULT the clocks of {name} go forward by {by_s:.1f} s")
        self.nodes[name].clock.jump(by_s)
        if not self.nodes[name].paused:  # otherwise it shows when the host resumes
            self._stood_still(name, by_s)

    def drain(self, name: str) -> None:
        """SIGTERM to an agent."""
        node = self.nodes[name]
        if node.alive and not node.paused:
            self.story.tell(f"FAULT SIGTERM to the agent of {name}")
            node.signalled, self.drained = True, True
            node.signals += 1
            node.feed(Signalled("SIGTERM"))

    def break_session(self, name: str, reason: str) -> None:
        """Break the session of an agent."""
        session = self.nodes[name].session
        if session is not None:
            self.story.tell(f"FAULT session of {name} breaks: {reason}")
            self.close_from_coordinator(session, reason)
            self._by_session[session.number].lose(session, reason, False)

    def deaden_session(self, name: str) -> None:
        """Lose everything that is sent over the session of an agent."""
        session = self.nodes[name].session
        if session is not None:
            self.story.tell(f"FAULT session of {name} goes dead")
            session.half_open = True

    def delay_session(self, name: str, by_s: float) -> None:
        """Delay everything sent over an agent's session, perhaps past a newer session."""
        session = self.nodes[name].session
        if session is not None:
            self.story.tell(f"FAULT session of {name} delays all by {by_s:.1f} s")
            session.lag_s = by_s

    def _can_step(self, run: HasHosts) -> bool:
        if self.network.is_whole and not self.paused:
            return True
        hosts = run.hosts
        return not any(self.nodes[host].workers_paused for host in hosts) and all(
            self.network.linked(one, other) for one in hosts for other in hosts if one < other
        )
