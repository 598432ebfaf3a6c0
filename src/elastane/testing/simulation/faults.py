"""What goes wrong in a history, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from elastane.core.limits import Timing
from elastane.core.model import JobSpec
from elastane.testing.simulation.cluster import Cluster
from elastane.testing.simulation.workers import Script

TIMING = Timing(
    join_timeout_s=60.0,
    last_call_s=1.0,
    last_call_max_s=5.0,
    drain_timeout_s=6.0,
    shutdown_timeout_s=4.0,
)
# The virtual second of the first fault at the earliest, and of the last at the latest.
FIRST_S, LAST_S = 1.0, 40.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One history before anything goes wrong."""

    seed: int
    store_backed: bool
    spec: JobSpec
    script: Script
    sizes: tuple[int, ...]
    spares: int
    faults: int


def setting_of(seed: int, *, store_backed: bool) -> Setting:
    """Draw the job, its nodes and how many faults there are."""
    rng = random.Random(f"setting {seed} {store_backed}")
    nodes = rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
    low = rng.randint(1, nodes)
    unequal = rng.random() < 0.3
    asks = rng.random() < 0.6
    return Setting(
        seed=seed,
        store_backed=store_backed,
        spec=JobSpec(
            job=f"seed-{seed}",
            min_nodes=low,
            max_nodes=rng.choice((nodes, nodes, low)),
            max_restarts=rng.choice((0, 1, 3, 10)),
            timing=TIMING,
        ),
        script=Script(
            steps=rng.choice((15, 40, 10_000, 10_000)),
            step_s=rng.choice((0.5, 1.0, 2.0)),
            checkpoint_every=5,
            asks=asks,
            leaves_on_sigterm=not asks and rng.random() < 0.5,
            trap_s=rng.choice((0.0, 0.0, 0.0, 1.0, 3.0, 100.0)),
        ),
        sizes=tuple(rng.choice((1, 2)) if unequal else 2 for _ in range(nodes)),
        spares=rng.choice((0, 0, 1, 2)),
        faults=rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 6)),
    )


class Faults:
    """Draws faults and lets them happen; knows when the last of them is over."""

    def __init__(self, cluster: Cluster, setting: Setting, rng: random.Random) -> None:
        self._cluster, self._setting, self._rng = cluster, setting, rng
        self.over_s = 0.0
        self._kinds: list[tuple[int, Callable[[], None]]] = [
            (4, self._crash),
            (3, self._restart_agent),
            (5, self._workers_crash),
            (3, self._pause),
            (3, self._break),
            (2, self._half_open),
            (3, self._partition),
            (2, self._one_way),
            (3, self._kill_coordinator),
            (3, self._drain),
            (3, self._arrive),
            (1, self._slow_starts),
        ]
        if cluster.store_backed:
            self._kinds += [
                (3, self._store_away),
                (2, self._cut_off_coordinator),
                (2, self._die_after_persist),
            ]

    def plan(self) -> None:
        """Put all faults of this history on the clock."""
        at_s = FIRST_S
        for _ in range(self._setting.faults):
            close = self._rng.random() < 0.45
            at_s += self._rng.random() * 0.4 if close else self._rng.random() * 14.0
            at_s = min(at_s, LAST_S)
            weights = [weight for weight, _ in self._kinds]
            act = self._rng.choices([act for _, act in self._kinds], weights)[0]
            self._cluster.clock.after(at_s, act)
            self._until(at_s - self._cluster.clock.now_s)

    def _until(self, for_s: float) -> None:
        self.over_s = max(self.over_s, self._cluster.clock.now_s + for_s)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._until(delay_s)
        self._cluster.clock.after(delay_s, act)

    def _some(self) -> str:
        alive = [name for name, node in self._cluster.nodes.items() if node.alive]
        return self._rng.choice(alive or [*self._cluster.nodes])

    def _seat(self) -> str:
        seats = [*self._cluster.seats]
        return self._rng.choice(seats) if seats else self._some()

    def _back(self, name: str, delay_s: float) -> None:
        def boot() -> None:
            node = self._cluster.nodes[name]
            if not node.alive and self._cluster.checks.outcome is None:
                self._cluster.boot(node)

        self._later(delay_s, boot)

    def _comes_back(self, name: str) -> bool:
        """Whether a dead host gets a new agent; the endpoint's does, or the job is over."""
        fixed = not self._cluster.store_backed and name == self._cluster.endpoint
        return fixed or self._rng.random() < 0.7

    def _crash(self) -> None:
        name = self._some()
        self._cluster.crash(name, "killed", silent=self._rng.random() < 0.4)
        if self._comes_back(name):
            self._back(name, self._rng.choice((0.2, 1.0, 6.0)))

    def _restart_agent(self) -> None:
        name = self._some()
        self._cluster.crash(name, "its agent is replaced", silent=self._rng.random() < 0.4)
        self._back(name, 0.05)

    def _workers_crash(self) -> None:
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._later(self._rng.random() * 0.01, self._worker_crash)

    def _worker_crash(self) -> None:
        node = self._cluster.nodes[self._some()]
        if node.group is not None:
            self._cluster.story.tell(f"FAULT a worker of {node.name} is killed")
            self._cluster.training.crash(node.group, self._rng.randrange(node.size))

    def _pause(self) -> None:
        for_s = self._rng.choice((0.5, 2.0, 4.0, 9.0, 140.0))
        self._cluster.pause(self._some(), for_s)
        self._until(for_s)

    def _break(self) -> None:
        self._cluster.break_session(self._some(), half_open=False)

    def _half_open(self) -> None:
        self._cluster.break_session(self._some(), half_open=True)

    def _heal(self) -> None:
        self._cluster.story.tell("the network is whole again")
        self._cluster.network.heal()
        self._cluster.store.cut_off.clear()

    def _partition(self) -> None:
        names = [*self._cluster.nodes]
        side = {name for name in names if self._rng.random() < 0.5}
        self._cluster.story.tell(f"FAULT partition: {sorted(side)} against the rest")
        for one in names:
            for other in names:
                if (one in side) != (other in side):
                    self._cluster.network.cut(one, other)
        if self._rng.random() < 0.5:
            self._cluster.store.cut_off |= side
        self._later(self._rng.choice((1.0, 3.5, 8.0, 20.0, 160.0)), self._heal)

    def _one_way(self) -> None:
        names = [*self._cluster.nodes]
        one, other = self._rng.choice(names), self._seat()
        self._cluster.story.tell(f"FAULT nothing passes from {one} to {other}")
        self._cluster.network.cut(one, other)
        if self._rng.random() < 0.3:
            self._cluster.network.cut(other, self._some())
        self._later(self._rng.choice((1.0, 3.5, 8.0, 20.0)), self._heal)

    def _kill_coordinator(self) -> None:
        name = self._seat()
        self._cluster.crash(name, "the coordinator is killed", silent=self._rng.random() < 0.3)
        if self._comes_back(name):
            self._back(name, self._rng.choice((0.1, 1.0, 5.0)))

    def _drain(self) -> None:
        name = self._some()
        self._cluster.drain(name)
        if self._rng.random() < 0.2:
            self._later(self._rng.random() * 3.0, lambda: self._cluster.drain(name))
        if self._comes_back(name):
            self._back(name, 14.0)

    def _arrive(self) -> None:
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            self._later(self._rng.random() * 1.5, self._arrival)

    def _arrival(self) -> None:
        if self._cluster.checks.outcome is None and len(self._cluster.nodes) < 10:
            wish = self._rng.choice((None, None, 0, 1))
            self._cluster.boot(self._cluster.add(2, wish), warm_s=self._rng.choice((0.0, 0.3, 8.0)))

    def _slow_starts(self) -> None:
        self._cluster.training.slow_start_s = self._rng.choice((2.0, 8.0))

    def _store_away(self) -> None:
        self._cluster.story.tell("FAULT the store is away")
        self._cluster.store.away = True
        self._later(self._rng.choice((0.5, 2.0, 8.0, 25.0, 150.0)), self._store_back)

    def _store_back(self) -> None:
        self._cluster.story.tell("the store is back")
        self._cluster.store.away = False

    def _cut_off_coordinator(self) -> None:
        name = self._seat()
        self._cluster.story.tell(f"FAULT {name} cannot reach the store")
        self._cluster.store.cut_off.add(name)
        self._later(self._rng.choice((1.0, 5.0, 30.0)), self._heal)

    def _die_after_persist(self) -> None:
        for seat in self._cluster.seats.values():
            seat.dies_after_persist = True
            self._back(seat.host, 30.0)
