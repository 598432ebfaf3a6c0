"""A coordinator's rules driven by hand: sessions are numbers, and the test sets the time."""

import msgspec

from elastane.coordinator.rules import Rendezvous, Takeover
from elastane.protocol.effects import Finished, Hangup, Persist, Send, WriteEvent
from elastane.protocol.events import AuthorityChanged, Broken, Received, Tick
from elastane.protocol.limits import Timing
from elastane.protocol.messages import (
    Assign,
    Drain,
    Drained,
    DrainTarget,
    Failed,
    Heartbeat,
    Holding,
    Join,
    Leave,
    Marked,
    Ready,
    Stop,
    Stopped,
    Succeeded,
)
from elastane.protocol.model import UNUSED, Failure, JobSpec, NodeSpec, PortOffer, Versions

VERSIONS = Versions(elastane="0.1", python="3.11", torch="2.13")


def job_spec(low=2, high=2, restarts=3, **more):
    timing = Timing(**more.pop("timing", {}))
    return JobSpec(
        job="digits", min_nodes=low, max_nodes=high, max_restarts=restarts, timing=timing, **more
    )


def node_spec(node_id, incarnation="1", size=2, **more):
    more.setdefault("versions", VERSIONS)
    return NodeSpec(node_id=node_id, incarnation=incarnation, local_world_size=size, **more)


class Driver:
    """One coordinator and the agents that talk to it."""

    def __init__(self, spec=None, record=None, **more):
        self.spec = spec or job_spec()
        self.now_s = 100.0
        self.machine = Rendezvous(self.spec, self.now_s, Takeover(record, **more))
        self.sessions = {}
        self.numbers = 0
        self.inbox = {}  # node id: messages of its latest session
        self.persisted, self.events, self.hangups, self.finished = [], [], [], None
        self.assigned = {}  # node id: its latest assignment

    def handle(self, event):
        effects = self.machine.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case Send(session=number, message=message):
                    name = self.by_number(number)
                    self.inbox.setdefault(name, []).append(message)
                    if isinstance(message, Assign):
                        self.assigned[name] = message.assignment
                case Persist(record=record):
                    self.persisted.append(record)
                case Hangup(session=number):
                    self.hangups.append(self.by_number(number))
                case WriteEvent(event=event):
                    self.events.append(event)
                case Finished(outcome=outcome):
                    self.finished = outcome
        return effects

    def by_number(self, number):
        return next(name for name, numbers in self.sessions.items() if number in numbers)

    def join(self, node_id, incarnation="1", *, holding=None, key=None, host=None, **more):
        self.numbers += 1
        self.sessions.setdefault(key or node_id, []).append(self.numbers)
        own = {k: more.pop(k) for k in ("ready", "welcomed", "seen", "restarts_seen") if k in more}
        spec = more.pop("spec", self.spec)
        join = Join(
            spec=spec,
            node=node_spec(node_id, incarnation, **more),
            offer=PortOffer(7000 + self.numbers, True),
            holding=holding,
            **own,
        )
        return self.handle(
            Received(
                session=self.numbers,
                message=join,
                peer_host=host or f"10.0.0.{self.numbers}",
                local_host="10.0.0.99",
            )
        )

    def says(self, node_id, message):
        return self.handle(Received(session=self.sessions[node_id][-1], message=message))

    def passes(self, seconds, *, alive=()):
        """Let time pass, in which the agents `alive` send their heartbeats."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.1)
            for node_id in alive:
                self.says(node_id, Heartbeat())
            self.handle(Tick())

    def meets(self, *node_ids):
        """Report that the workers of these nodes have met in the current world."""
        for node_id in node_ids:
            fence = self.assigned[node_id].fence
            self.says(node_id, Heartbeat(fence=fence, met=fence.round))

    def breaks(self, node_id, *, clean=True):
        return self.handle(Broken(self.sessions[node_id][-1], "EOF", clean=clean))

    def authority(self, held):
        return self.handle(AuthorityChanged(held, "the test says so"))

    def fails(self, node_id, message="ValueError: boom", exit_code=1, age_s=0.0, local_rank=0):
        given = self.assigned[node_id]
        failure = Failure(
            local_rank=local_rank,
            rank=given.rank_base + local_rank,
            pid=4242,
            exit_code=exit_code,
            age_s=age_s,
            message=message,
        )
        return self.says(node_id, Failed(fence=given.fence, failures=(failure,)))

    def stops(self, *node_ids, use=UNUSED):
        for node_id in node_ids:
            fence = self.assigned[node_id].fence
            self.says(node_id, Stopped(fence, PortOffer(9000, True), use=use))

    def succeeds(self, *node_ids):
        for node_id in node_ids:
            self.says(node_id, Succeeded(self.assigned[node_id].fence))

    def leaves(self, node_id, reason="SIGTERM"):
        self.says(node_id, Leave(reason))

    def warms(self, node_id):
        self.says(node_id, Ready())

    def marks(self, node_id, calls):
        self.says(
            node_id,
            Marked(fence=self.assigned[node_id].fence, drain=self.drain_of(node_id), calls=calls),
        )

    def drains(self, node_id):
        fence = self.assigned[node_id].fence
        self.says(node_id, Drained(fence=fence, drain=self.drain_of(node_id)))

    def drain_of(self, node_id):
        """The number of the last drain of which the node was informed; 0: of none."""
        return max((m.drain for m in self.got(node_id, Drain | DrainTarget)), default=0)

    def got(self, node_id, kind):
        """Messages of this kind that the node was sent, oldest first."""
        return [m for m in self.inbox.get(node_id, []) if isinstance(m, kind)]

    def holding(self, node_id, state="running", **more):
        return Holding(assignment=self.assigned[node_id], state=state, **more)

    def ranks(self):
        world = self.persisted[-1].world
        return [member.node_id for member in world.members]

    @property
    def phase(self):
        return self.machine.phase.value

    @property
    def fence(self):
        return msgspec.to_builtins(self.machine.report().fence)

    def stopped_all(self, *node_ids):
        assert all(self.got(node_id, Stop) for node_id in node_ids)
        self.stops(*node_ids)
