"""The shell of a simulated agent: its session, its worker groups, its search for a coordinator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import msgspec

from elastane.agent.rules import AgentCore, Readings
from elastane.coordinator.rules import StepDowns
from elastane.errors import ExitCode
from elastane.protocol.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    Exit,
    GroupEffect,
    InterruptGroup,
    MarkGroup,
    RegroupWorkers,
    ReleaseGroup,
    ShowGroupStacks,
    StartGroup,
    StartWorkers,
    StopGroup,
    Transmit,
    TryAddresses,
    WriteEvent,
)
from elastane.protocol.events import (
    AddressesTried,
    AgentEvent,
    GroupAble,
    GroupGone,
    Linked,
    MessageReceived,
    Tick,
    Unlinked,
    Warm,
    WorkerFailed,
)
from elastane.protocol.limits import PROBE_TIMEOUT_S
from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import Alive, Probe, ProbeResult, ToAgent, ToCoordinator, Welcome
from elastane.protocol.model import (
    Assignment,
    Failure,
    JobSpec,
    NodeSpec,
    Outcome,
    PortOffer,
    Versions,
)
from simulation.checks import Checks
from simulation.clock import HostClock, Timer
from simulation.crash_points import EffectGap, agent_step
from simulation.election import SimulatedElection
from simulation.in_place_workers import InPlaceTraining
from simulation.network import SimulatedSession
from simulation.places import InPlaceGroup
from simulation.runs import LocalGroup
from simulation.story import Story
from simulation.workers import Training

# The time that a connection takes that is answered.
_DIAL_S = 0.002
VERSIONS = Versions(elastane="0.1", python="3.11", torch="2.13")


class NodeSurroundings(Protocol):
    """What a node reads of its cluster and asks it to do: see `cluster.SimulatedCluster`."""

    spec: JobSpec
    store_backed: bool
    in_place: bool
    rng: random.Random
    story: Story
    checks: Checks
    training: Training
    in_place_training: InPlaceTraining

    def dies_at(self, host: str, step: EffectGap) -> bool:
        """Whether a planned death at this crash point kills the process on `host`."""

    def note(self, host: str, event: LogEvent) -> None:
        """Add an event to the story."""

    def find(self, node: SimulatedNode) -> None:
        """Look for the coordinator on behalf of `node`, and campaign meanwhile."""

    def unanswered(self, group: InPlaceGroup | LocalGroup) -> tuple[str, ...]:
        """Return the addresses that do not answer the workers of a node, in their world."""

    def answers(self, host: str, address: str) -> bool:
        """Whether the host at an address answers a connection from `host`."""

    def ask_leader(self, node: SimulatedNode, answer: Callable[[str], None]) -> None:
        """Ask the store where the coordinator is."""

    def stand(self, node: SimulatedNode) -> None:
        """Try once to become the coordinator, unless a try is under way."""

    def send_up(self, session: SimulatedSession, message: ToCoordinator) -> None:
        """Carry a message of an agent."""

    def close_from_agent(self, session: SimulatedSession, reason: str, *, clean: bool) -> None:
        """End a session; `clean`: the agent's process is gone."""

    def agent_exits(self, node: SimulatedNode, exit_: Exit) -> None:
        """End an agent by its own decision."""


class SimulatedNode:
    """One host, at times with an agent; each life of an agent is a new incarnation."""

    def __init__(
        self,
        cluster: NodeSurroundings,
        name: str,
        size: int,
        node_rank: int | None,
        topology: str,
        clock: HostClock,
    ) -> None:
        self.cluster, self.name, self.size, self.node_rank = cluster, name, size, node_rank
        self.topology, self.clock = topology, clock
        self.alive = False
        # Which of its processes are stopped: its agent (with a coordinator in it), workers, orphan
        # reaper.
        self.paused = self.workers_paused = self.reaper_paused = False
        self.until_boot_s: float | None = None  # the deadline of its workers
        self.life = 0
        self.moves = False  # each new agent runs at another address, as that of a pod
        self.incarnation = ""  # of the present or last agent here
        self.exit: Exit | None = None
        self.session: SimulatedSession | None = None
        self.group: LocalGroup | None = None
        self.in_place_group: InPlaceGroup | None = None  # of workers that recover in place
        self.core: AgentCore | None = None
        self.election: SimulatedElection | None = None
        self.signalled = False
        self.signals = 0
        self.welcomed = False
        # The host of the last session's coordinator; the same host, once it refused a connection.
        self.served_by = self.refused_at = ""
        self._is_refusal_used = False
        self.step_downs = StepDowns(cluster.spec.timing)
        self.stands_from_s = 0.0  # after its coordinator stepped down, in its host's time
        self.backlog: list[tuple[int, AgentEvent]] = []
        self._ports = 20_000
        self._heard_s = 0.0
        self._tick: Timer | None = None
        self._deadline: Timer | None = None

    def boot(self, warm_s: float = 0.0) -> None:
        """Start a new agent on this host."""
        assert not self.alive, self.name
        self.clock.wake()  # A stopped host runs again once an agent is started.
        self.alive, self.exit, self.signalled = True, None, False
        self.paused = self.workers_paused = self.reaper_paused = False
        self.welcomed, self.signals = False, 0
        self.served_by = self.refused_at = ""
        self.step_downs, self.stands_from_s = StepDowns(self.cluster.spec.timing), 0.0
        self.life += 1
        self.incarnation = f"{self.name}.{self.life}"
        spec = NodeSpec(
            node_id=self.name,
            incarnation=self.incarnation,
            local_world_size=self.size,
            node_rank=self.node_rank,
            topology=self.topology,
            addresses=(self.address,),
            versions=VERSIONS,
        )
        self.core = AgentCore(
            self.cluster.spec,
            spec,
            self.new_offer(),
            self.clock.now_s,
            self_fencing=self.cluster.store_backed,
        )
        self.cluster.story.tell(f"{self.name}: agent {spec.incarnation} starts")
        self._later(warm_s, Warm())
        self.look(0.0)

    @property
    def stands_still(self) -> bool:
        """Whether any of its processes is stopped."""
        return self.paused or self.workers_paused or self.reaper_paused

    @property
    def address(self) -> str:
        """The address of this host, as its agent reports it."""
        return f"10.0.1.{int(self.name[1:]) + 1}"

    @property
    def is_linked(self) -> bool:
        """Whether its agent has a session with a coordinator."""
        return self.session is not None

    @property
    def is_overdue(self) -> bool:
        """Whether its workers may begin no step: the deadline on their status pages has passed."""
        return self.until_boot_s is not None and self.clock.boot_s > self.until_boot_s

    @property
    def trains(self) -> bool:
        """Whether workers were started in this life of its agent."""
        return self.group is not None or self.in_place_group is not None

    def new_offer(self) -> PortOffer:
        """Return an offer of a port that was never offered before."""
        self._ports += 1
        return PortOffer(self._ports, True)

    def feed(self, event: AgentEvent) -> None:
        """Deliver an event to the rules, or keep it while the host is paused."""
        if not self.alive:
            return
        if self.paused:
            self.backlog.append((self.life, event))
            return
        assert self.core is not None
        if isinstance(event, GroupAble) and self.in_place_group is not None:
            # The offer as of now; another may have followed since the event was posted.
            event = msgspec.structs.replace(event, offer=self.in_place_group.offer)
        life, done = self.life, None
        effects = self.core.handle(event, self.clock.now_s, self._readings())
        self.until_boot_s = self.core.train_until_s
        self._mind_deadline()
        for due in effects:
            if self.cluster.dies_at(self.name, agent_step(done, due)):
                return
            self._carry_out(due)
            done = due
        if self.life == life and not self.cluster.dies_at(self.name, agent_step(done, None)):
            self._schedule()

    def _readings(self) -> Readings:
        """Return what the workers here show, and how long this host was suspended."""
        group = self.in_place_group
        if group is None:
            unanswered = self.cluster.unanswered(self.group) if self.group is not None else ()
            return Readings(unanswered=unanswered, slept_s=self.clock.slept_s)
        return Readings(
            progress=group.progress,
            met=group.met,
            waiting=group.minding.waiting,
            all_wait=group.minding.all_wait,
            unanswered=self.cluster.unanswered(group),
            slept_s=self.clock.slept_s,
        )

    def resume(self) -> None:
        """Resume after a pause, with all events of that time."""
        was_paused = self.paused
        self.paused = self.workers_paused = self.reaper_paused = False
        if was_paused:
            self._heard_s = self.clock.now_s
        backlog, self.backlog = self.backlog, []
        for life, event in backlog:
            if life == self.life:
                self.feed(event)
        self._mind_deadline()

    def _mind_deadline(self) -> None:
        """Act as the orphan reaper: kill the workers at the deadline that the agent set last."""
        if self.until_boot_s is None or self._deadline is not None:
            return
        life = self.life

        def look() -> None:
            self._deadline = None
            if not self.alive or self.life != life or self.reaper_paused:
                return  # An orphan reaper that resumes looks again.
            if self.until_boot_s is not None and self.clock.boot_s > self.until_boot_s:
                self._kill_workers()
            else:
                self._mind_deadline()

        self._deadline = self.clock.after(
            max(0.001, self.until_boot_s - self.clock.boot_s + 0.001), look
        )

    def _kill_workers(self) -> None:
        self.cluster.story.tell(f"the orphan reaper of {self.name} kills its workers")
        self.until_boot_s = None
        found = self.in_place_group or self.group
        if found is None:
            return
        if self.in_place_group is not None:
            ended = self.cluster.in_place_training.kill(self.in_place_group)
        else:
            assert self.group is not None
            ended = self.cluster.training.kill(self.group)
        fence = found.start_fence if isinstance(found, InPlaceGroup) else found.fence
        for local_rank in ended:
            rank = found.assignment.rank_base + local_rank
            failure = Failure(local_rank=local_rank, rank=rank, pid=1, exit_code=-9)
            found.feed(WorkerFailed(fence, failure, self.clock.now_s))

    def die(self) -> None:
        """End the agent and its workers."""
        self.alive = False
        self.paused = self.workers_paused = self.reaper_paused = False
        self.until_boot_s = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.backlog.clear()
        self.election = None
        if self._tick is not None:
            self._tick.cancel()
        group, self.group = self.group, None
        if group is not None:
            self.cluster.training.vanish(group)
        in_place, self.in_place_group = self.in_place_group, None
        if in_place is not None:
            self.cluster.in_place_training.vanish(in_place)

    def received(self, session: SimulatedSession, message: ToAgent) -> None:
        """Accept a message from the coordinator."""
        if self.session is not session:
            return
        if not self.paused:
            self._heard_s = self.clock.now_s
        self.welcomed = self.welcomed or isinstance(message, Welcome)
        self.feed(MessageReceived(message))
        if isinstance(message, Alive) and not message.authority:
            self.cluster.ask_leader(self, lambda host: self._doubt(session, host))

    def unlinked(self, session: SimulatedSession, reason: str) -> None:
        """Record that the coordinator's side ended the session."""
        if self.session is session and self.alive:
            self.session = None
            self.feed(Unlinked(reason))
            self.look(0.05)

    def linked(self, session: SimulatedSession) -> None:
        """Record a new session."""
        self.session, self._heard_s = session, self.clock.now_s
        self.served_by, self.refused_at = session.down.source, ""
        if self.served_by != self.name:
            self.step_downs.forget()
        assert self.core is not None
        offer = self.new_offer()
        if self.in_place_group is not None:
            self.in_place_group.offer = offer
        self.feed(Linked(offer))

    def refused_by(self, host: str) -> None:
        """Record that `host` refused a connection; campaign if the last coordinator was there."""
        if host == self.served_by != self.refused_at and self.cluster.store_backed:
            self.refused_at, self._is_refusal_used = host, False
            self.cluster.stand(self)
        self.not_found(f"{host} refuses the connection")

    def take_refusal(self) -> str:
        """Return the coordinator's host whose lease is to be ended, the first time."""
        is_used, self._is_refusal_used = self._is_refusal_used, True
        return "" if is_used else self.refused_at

    def not_found(self, reason: str) -> None:
        """Record that no coordinator was found this time."""
        self.feed(Unlinked(reason))
        self.look(0.2 + self.cluster.rng.random() * 0.3)

    def look(self, delay_s: float) -> None:
        """Look for a coordinator after `delay_s`."""
        life = self.life

        def now() -> None:
            is_over = self.core is not None and self.core.outcome is not None
            if self.alive and self.life == life and self.session is None and not is_over:
                if self.paused:
                    self.look(0.5)
                else:
                    self.cluster.find(self)

        self.clock.after(delay_s, now)

    def drop(self, reason: str) -> None:
        """End the agent's session without notice."""
        session, self.session = self.session, None
        if session is not None:
            self.cluster.close_from_agent(session, reason, clean=False)
            self.feed(Unlinked(reason))
            self.look(0.05)

    def job_is_over(self, outcome: Outcome) -> None:
        """Learn from the store that the job has ended, without a coordinator to say so."""
        if self.welcomed:
            exit_ = Exit(outcome.exit_code, outcome.reason, outcome)
        else:
            refused = Outcome(ok=False, reason=outcome.reason, slug="job-closed")
            exit_ = Exit(int(ExitCode.CONFIGURATION), "the job has ended", refused)
        self.exit = exit_
        self.cluster.agent_exits(self, exit_)

    def _doubt(self, session: SimulatedSession, host: str) -> None:
        if self.session is session and host and host != session.down.source:
            self.drop(f"{host} is the coordinator now")
        elif self.session is session:
            self.cluster.stand(self)

    def _carry_out(self, effect: AgentEffect) -> None:
        checks = self.cluster.checks
        match effect:
            case Transmit(message=message):
                if self.session is not None:
                    self.cluster.send_up(self.session, message)
            case StartGroup(assignment=assignment):
                checks.starts(self, assignment)
                self._start(assignment)
            case Decline(fence=fence):
                self._later(0.0, GroupGone(fence, self.new_offer()))
            case TryAddresses(probes=probes):
                self._try(probes)
            case WriteEvent(event=event):
                self.cluster.note(self.name, event)
            case Exit():
                self.exit = effect
                self.cluster.agent_exits(self, effect)
            case _ if self.in_place_group is not None:
                self._act_on_in_place_group(self.in_place_group, effect)
            case _:
                self._act_on_group(effect)

    def _try(self, probes: tuple[Probe, ...]) -> None:
        results = tuple(
            ProbeResult(probe, self.cluster.answers(self.name, probe.address)) for probe in probes
        )
        is_silent = not all(result.answers for result in results)
        self._later(PROBE_TIMEOUT_S if is_silent else _DIAL_S, AddressesTried(results))

    def _start(self, assignment: Assignment) -> None:
        feed = self._own_feed()
        if self.cluster.in_place:
            assert self.core is not None
            serves = assignment.node_rank == 0 and not assignment.waiting
            self.in_place_group = InPlaceGroup(
                host=self.name,
                assignment=assignment,
                size=self.size,
                feed=feed,
                new_offer=self.new_offer,
                start_fence=assignment.fence,
                offer=self.new_offer() if serves else self.core.offer,
            )
            self.cluster.in_place_training.start(self.in_place_group)
        else:
            self.group = LocalGroup(self.name, assignment, self.size, feed)
            self.cluster.training.start(self.group)

    def _act_on_group(self, effect: GroupEffect) -> None:
        training, group = self.cluster.training, self.group
        assert group is not None
        match effect:
            case StopGroup(grace_s=grace_s):
                training.stop(group, grace_s, self.new_offer)
            case MarkGroup(drain=drain):
                training.mark(group, drain)
            case AimGroup(calls=calls):
                self.cluster.checks.aims(self, group, calls)
                training.aim(group, calls)
            case ShowGroupStacks():
                pass
            case _:
                raise AssertionError(f"{effect} is for workers that recover in place")

    def _act_on_in_place_group(self, group: InPlaceGroup, effect: GroupEffect) -> None:
        training, checks = self.cluster.in_place_training, self.cluster.checks
        match effect:
            case StopGroup(grace_s=grace_s):
                training.stop(group, grace_s)
            case MarkGroup(drain=drain):
                training.drains.mark(group, drain)
            case AimGroup(calls=calls, stops=stops):
                checks.aims(self, group, calls)
                training.drains.aim(group, calls, stops=stops)
            case ReleaseGroup():
                training.release(group)
            case StartWorkers(local_ranks=ranks, delay_s=delay_s):
                training.start_workers(group, ranks, delay_s)
            case InterruptGroup():
                training.interrupt(group)
            case RegroupWorkers(assignment=assignment, able=able):
                checks.placed(self, assignment)
                training.regroup(group, assignment, able)

    def _own_feed(self) -> Callable[[AgentEvent], None]:
        life = self.life

        def feed(event: AgentEvent) -> None:
            if self.life == life:
                self.feed(event)

        return feed

    def _later(self, delay_s: float, event: AgentEvent) -> None:
        feed = self._own_feed()
        self.clock.after(delay_s, lambda: feed(event))

    def _schedule(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if not self.alive or self.core is None:
            return
        life = self.life
        delay_s = max(0.001, self.core.wake_s - self.clock.now_s)

        def tick() -> None:
            if self.life != life or not self.alive:
                return
            silent_s = self.clock.now_s - self._heard_s
            if self.session and not self.paused and silent_s > self.cluster.spec.timing.silence_s:
                self.drop(f"the coordinator was silent for {silent_s:.1f} s")
            self.feed(Tick())

        self._tick = self.clock.after(delay_s, tick)
