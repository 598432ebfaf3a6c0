"""The simulated network: ordered sessions with delay, cuts, and sessions that went dead unnoticed.

While a direction between two hosts is cut, messages wait, as TCP would resend them; they arrive
after the cut if the session still exists. A half-open session loses everything. Messages of one
session stay in order and arrive once, by TCP and the frames' sequence numbers. Messages of two
sessions of one agent may overtake each other by any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.clock import VirtualClock

Act = Callable[[], None]


@dataclass(slots=True)
class Direction:
    """One direction of a session: what is under way arrives in order."""

    source: str
    target: str
    last_s: float = 0.0
    stuck: list[Act] = field(default_factory=list)


@dataclass(slots=True)
class SimulatedSession:
    """A connection of an agent to a coordinator, with what each side does on its events."""

    number: int
    up: Direction  # agent to coordinator
    down: Direction
    life: int = 0  # which life of the agent's host began it
    half_open: bool = False
    lag_s: float = 0.0


class Network:
    """Which host reaches which, and how long messages take."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self._cuts: set[tuple[str, str]] = set()
        self._isolated: set[str] = set()
        self._stuck: dict[int, SimulatedSession] = {}
        self._healed_s = 0.0
        self._cut_s: dict[tuple[str, str], float] = {}
        self._numbers = 0
        self.lag_s: dict[str, float] = {}
        # Whether what cuts two hosts off is a firewall that answers for the other one.
        self.rejects = False
        self.carried = 0

    def open(self, agent: str, life: int, coordinator: str) -> SimulatedSession:
        """Return a new session between two hosts."""
        self._numbers += 1
        return SimulatedSession(
            self._numbers, Direction(agent, coordinator), Direction(coordinator, agent), life
        )

    def carry(self, session: SimulatedSession, way: Direction, act: Act) -> None:
        """Do `act` at the other end, after what was sent before it."""
        if session.half_open:
            return
        lag_s = self._lag_s(way.source, way.target) + session.lag_s
        due_s = max(way.last_s, self._clock.now_s + self.delay_s() + lag_s)
        way.last_s = due_s
        self._clock.after(due_s - self._clock.now_s, lambda: self._arrive(session, way, act))

    def delay_s(self) -> float:
        """Return the time that a message takes now."""
        return 0.0002 + self._rng.random() * 0.003

    def dial_s(self, source: str, target: str) -> float:
        """Return the time that a new connection takes now."""
        return 2 * (self.delay_s() + self._lag_s(source, target))

    def reaches(self, source: str, target: str) -> bool:
        """Whether packets pass from `source` to `target`."""
        is_cut = source != target and (source in self._isolated or target in self._isolated)
        return not is_cut and (source, target) not in self._cuts

    def linked(self, one: str, other: str) -> bool:
        """Whether packets pass both ways."""
        return self.reaches(one, other) and self.reaches(other, one)

    @property
    def is_whole(self) -> bool:
        """Whether packets pass everywhere."""
        return not self._cuts and not self._isolated

    def cut(self, source: str, target: str) -> None:
        """Let no packet pass from `source` to `target`."""
        if source != target and (source, target) not in self._cuts:
            self._cuts.add((source, target))
            self._cut_s[source, target] = self._clock.now_s

    def were_linked_after(self, one: str, other: str, since_s: float) -> bool:
        """Whether packets passed both ways between two hosts at some time since then."""
        cut_s = [self._cut_s.get(way, 0.0) for way in ((one, other), (other, one))]
        return self.linked(one, other) or self._healed_s > since_s or min(cut_s) > since_s

    def isolate(self, host: str) -> None:
        """Let no packet pass between `host` and any other, those that come later included."""
        self._isolated.add(host)

    def heal(self) -> None:
        """Let all packets pass again, those that waited first."""
        self._healed_s = self._clock.now_s
        self._cuts.clear()
        self._isolated.clear()
        stuck, self._stuck = self._stuck, {}
        for session in stuck.values():
            for way in (session.up, session.down):
                waiting, way.stuck = way.stuck, []
                for act in waiting:
                    self.carry(session, way, act)

    def _lag_s(self, source: str, target: str) -> float:
        if not self.lag_s:
            return 0.0
        lag_s = self.lag_s.get(source, 0.0) + self.lag_s.get(target, 0.0)
        return lag_s * (0.5 + self._rng.random() / 2)

    def _arrive(self, session: SimulatedSession, way: Direction, act: Act) -> None:
        if session.half_open:
            return
        if way.stuck or not self.reaches(way.source, way.target):
            way.stuck.append(act)
            self._stuck[session.number] = session
            return
        self.carried += 1
        act()
