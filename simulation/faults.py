"""What goes wrong in a history: each fault of its plan, with random numbers of its own.

So leaving out one fault does not change the others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from simulation.cluster import SimulatedCluster
from simulation.crash_points import EffectGap
from simulation.places import SimulatedWorker
from simulation.setup import HistorySetup, PlannedFault

# The restart budget is exact about these: deaths of workers, arrivals and departures.
_HARMLESS = (
    "workers_crash",
    "workers_in_turn",
    "drain",
    "arrive",
    "slow_starts",
    "resize",
    "sees_deaths",
    "mismatch",
    "holders_killed",
)
# These make no host unreachable except the dead ones.
_DEATHS = (*_HARMLESS, "crash", "restart_agent", "kill_coordinator", "die_at_step", "holders_crash")
# A planned death at a crash point is given up after this long.
_TRAP_S = 30.0
_COORDINATOR_STEPS = (
    EffectGap.BEFORE_RECORD,
    EffectGap.AFTER_RECORD,
    EffectGap.BEFORE_MESSAGES,
    EffectGap.BETWEEN_MESSAGES,
    EffectGap.AFTER_MESSAGES,
    EffectGap.BEFORE_HANGUP,
    EffectGap.BEFORE_END,
)
# How long one process of a host is stopped: sometimes longer than every bound.
_STILL_S = (2.0, 9.0, 145.0, 200.0)
_AGENT_STEPS = (
    EffectGap.BEFORE_START,
    EffectGap.AFTER_START,
    EffectGap.BEFORE_STOP,
    EffectGap.AFTER_STOP,
    EffectGap.BEFORE_DRAIN,
    EffectGap.BEFORE_REPORT,
    EffectGap.AFTER_REPORT,
    EffectGap.BEFORE_END,
)


class Faults:
    """Performs the planned faults; knows when the last of them is over."""

    def __init__(self, cluster: SimulatedCluster, setting: HistorySetup) -> None:
        self._cluster, self._setting = cluster, setting
        self._rng = random.Random()
        self.over_s = 0.0

    def plan(self) -> None:
        """Schedule all faults of this history."""
        for planned in self._setting.plan:
            self._cluster.clock.after(planned.at_s, lambda p=planned: self._begin(p))  # type: ignore[misc]
            self._until(planned.at_s - self._cluster.clock.now_s)

    def _begin(self, planned: PlannedFault) -> None:
        seed, mode = self._setting.seed, self._setting.mode
        self._rng = random.Random(f"fault {planned.number} of {seed} {mode}")
        self._cluster.upset = self._cluster.upset or planned.kind not in _HARMLESS
        self._cluster.torn = self._cluster.torn or planned.kind not in _DEATHS
        self._cluster.drained = self._cluster.drained or planned.kind in ("arrive", "resize")
        act: Callable[[], None] = getattr(self, f"_{planned.kind}")
        act()

    def _until(self, for_s: float) -> None:
        self.over_s = max(self.over_s, self._cluster.clock.now_s + for_s)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._until(delay_s)
        rng = self._rng

        def now() -> None:
            self._rng = rng
            act()

        self._cluster.clock.after(delay_s, now)

    def _tell(self, what: str) -> None:
        self._cluster.story.tell(f"FAULT {what}")

    def _some(self) -> str:
        alive = [name for name, node in self._cluster.nodes.items() if node.alive]
        return self._rng.choice(alive or [*self._cluster.nodes])

    def _leader(self) -> str:
        coordinators = [*self._cluster.coordinators]
        return self._rng.choice(coordinators) if coordinators else self._some()

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

    def _sees_deaths(self) -> None:
        self._tell("the job's owner hears of hosts that crash")
        self._cluster.sees_deaths = True

    def _resize(self) -> None:
        high = self._rng.randint(1, len(self._cluster.nodes))
        low = self._rng.randint(1, high)
        self._tell(f"the job's owner wants {low} to {high} nodes")
        self._cluster.resize(low, high)

    def _mismatch(self) -> None:
        """Let members call different collectives, so that all wait, in several worlds in a row."""
        worlds = self._rng.choice((1, 1, 2, 3))
        self._tell(f"the members of the next {worlds} worlds that reduce wait for one another")
        self._cluster.in_place_training.mismatch(worlds, self._cluster.clock.now_s + _TRAP_S)
        self._until(_TRAP_S)

    def _holders_killed(self) -> None:
        """Kill all workers that hold the state, while a worker that joins receives it."""

        def kill(holder: SimulatedWorker) -> None:
            self._cluster.kill_worker(holder.group.host, holder.local_rank)

        self._lose_holders(kill)

    def _holders_crash(self) -> None:
        """Crash all hosts that hold the state, while a worker that joins receives it."""

        def crash(holder: SimulatedWorker) -> None:
            name = holder.group.host
            if self._cluster.nodes[name].alive:
                self._cluster.crash(name, "a holder of the state is lost", silent=False)
                self._back(name, 6.0)

        self._lose_holders(crash)

    def _lose_holders(self, lose: Callable[[SimulatedWorker], None]) -> None:
        """Kill a worker, and call `lose` with all state holders as its replacement joins."""
        self._tell("all holders of the state are lost as the next worker joins")

        def lose_all(holders: list[SimulatedWorker]) -> None:
            for holder in holders:
                self._later(0.04 * self._rng.random(), functools.partial(lose, holder))

        self._cluster.in_place_training.watch_holders(lose_all, self._cluster.clock.now_s + _TRAP_S)
        self._until(_TRAP_S)
        self._worker_crash()

    # Deaths.

    def _crash(self) -> None:
        name = self._some()
        self._cluster.crash(name, "killed", silent=self._rng.random() < 0.4)
        if self._comes_back(name):
            self._back(name, self._rng.choice((0.2, 1.0, 6.0)))
        self._cluster.nodes[name].moves = self._rng.random() < 0.5

    def _restart_agent(self) -> None:
        name = self._some()
        self._cluster.crash(name, "its agent is replaced", silent=self._rng.random() < 0.4)
        self._back(name, 0.05)
        self._cluster.nodes[name].moves = self._rng.random() < 0.5

    def _kill_coordinator(self) -> None:
        name = self._leader()
        self._cluster.crash(name, "the coordinator is killed", silent=self._rng.random() < 0.3)
        if self._comes_back(name):
            self._back(name, self._rng.choice((0.1, 1.0, 5.0)))

    def _die_at_step(self) -> None:
        """Kill the next process that reaches a crash point, mostly a coordinator."""
        steps = _COORDINATOR_STEPS if self._rng.random() < 0.7 else _AGENT_STEPS
        step, left = self._rng.choice(steps), self._rng.choice((1, 1, 2, 3, 5, 9))
        back_s = self._rng.choice((0.1, 1.0, 6.0))
        silent = self._rng.random() < 0.3
        armed_s, rng, cluster = self._cluster.clock.now_s, self._rng, self._cluster
        before = cluster.on_step

        def on_step(host: str, passed: EffectGap) -> bool:
            nonlocal left
            if left <= 0 or passed is not step or cluster.clock.now_s > armed_s + _TRAP_S:
                return before(host, passed)
            left -= 1
            if left:
                return False
            cluster.crash(host, f"dies where it is {step.value!r}", silent=silent)
            self._rng = rng
            if self._comes_back(host):
                self._back(host, back_s)
            return True

        cluster.on_step = on_step
        self._until(_TRAP_S)

    def _workers_crash(self) -> None:
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._later(self._rng.random() * 0.01, self._worker_crash)

    def _workers_in_turn(self) -> None:
        """Kill one worker after the other, while others recover, join and heal."""
        for number in range(self._rng.choice((2, 3, 5, 8))):
            delay_s = number * self._rng.choice((0.03, 0.2, 0.7, 1.6))
            self._later(delay_s + self._rng.random() * 0.3, self._worker_crash)

    def _worker_crash(self) -> None:
        node = self._cluster.nodes[self._some()]
        if node.group is not None or node.in_place_group is not None:
            self._tell(f"a worker of {node.name} is killed")
            self._cluster.kill_worker(node.name, self._rng.randrange(node.size))

    # Time.

    def _pause(self) -> None:
        self._stand_still(self._some(), self._rng.choice((0.5, 2.0, 4.0, 9.0, 140.0)))

    def _pause_coordinator(self) -> None:
        """Stop a coordinator for slightly longer than its lease lasts."""
        ttl_s = self._setting.spec.timing.lease_ttl_s
        self._stand_still(self._leader(), ttl_s * self._rng.uniform(0.85, 2.0))

    def _stand_still(self, name: str, for_s: float) -> None:
        self._cluster.pause(name, for_s)
        self._until(for_s)

    def _suspend(self) -> None:
        for_s = self._rng.choice((1.0, 4.0, 30.0))
        self._cluster.pause(self._some(), for_s, suspended=True)
        self._until(for_s)

    # One process of a host, and no other.

    def _stop_agent(self) -> None:
        """Stop an agent; its workers continue, and the orphan reaper runs."""
        self._stop_processes("agent")

    def _stop_agent_and_reaper(self) -> None:
        """Stop agent and orphan reaper, so that workers have to check their deadline themselves."""
        looks = self._setting.script.asks or self._setting.in_place
        self._stop_processes("agent", *("orphan reaper",) * looks)

    def _stop_workers(self) -> None:
        self._stop_processes("workers")

    def _stop_reaper(self) -> None:
        self._stop_processes("orphan reaper")

    def _stop_processes(self, *kinds: str) -> None:
        for_s = self._rng.choice(_STILL_S)
        self._cluster.stop_processes(self._some(), kinds, for_s)
        self._until(for_s)

    def _stop_zygote(self) -> None:
        self._hold_up("the zygote", self._cluster.still.zygotes)

    def _stop_store_process(self) -> None:
        self._hold_up("the store process", self._cluster.still.stores)

    def _stop_snapshot_server(self) -> None:
        self._hold_up("the snapshot server", self._cluster.still.snapshot_servers)

    def _hold_up(self, what: str, hosts: set[str]) -> None:
        name, for_s = self._some(), self._rng.choice(_STILL_S)
        self._tell(f"{what} of {name} stands still for {for_s:.1f} s")
        hosts.add(name)
        self._later(for_s, lambda: hosts.discard(name))

    def _clock_jump(self) -> None:
        self._cluster.jump_clock(self._some(), self._rng.choice((0.3, 2.5, 60.0, 3600.0)))

    def _slow_starts(self) -> None:
        slow_s = self._rng.choice((2.0, 8.0))
        self._cluster.training.slow_start_s = self._cluster.in_place_training.slow_start_s = slow_s

    # The network.

    def _break(self) -> None:
        self._cluster.break_session(self._some(), "connection reset")

    def _replay(self) -> None:
        """Deliver a frame twice or early, so that its sequence number is wrong."""
        self._cluster.break_session(self._some(), "a frame has the wrong sequence number")

    def _flap(self) -> None:
        name = self._some()
        for number in range(self._rng.choice((3, 6, 12))):
            self._later(number * self._rng.choice((0.03, 0.12, 0.5)), lambda: self._reset(name))

    def _reset(self, name: str) -> None:
        self._cluster.break_session(name, "connection reset")

    def _half_open(self) -> None:
        self._cluster.deaden_session(self._some())

    def _late_session(self) -> None:
        self._cluster.delay_session(self._some(), self._rng.choice((0.3, 1.5, 3.5, 8.0)))

    def _slow_host(self) -> None:
        name, by_s = self._some(), self._rng.choice((0.05, 0.4, 1.5))
        self._tell(f"{name} is slow: up to {by_s} s for each message")
        self._cluster.network.lag_s[name] = by_s
        self._later(self._rng.choice((2.0, 10.0, 25.0)), lambda: self._fast(name))

    def _fast(self, name: str) -> None:
        self._cluster.story.tell(f"{name} is no longer slow")
        self._cluster.network.lag_s.pop(name, None)

    def _heal(self) -> None:
        self._cluster.story.tell("the network is whole again")
        self._cluster.network.heal()
        self._cluster.store.cut_off.clear()

    def _partition(self) -> None:
        names = [*self._cluster.nodes]
        side = {name for name in names if self._rng.random() < 0.5}
        self._tell(f"partition: {sorted(side)} against the rest")
        for one in names:
            for other in names:
                if (one in side) != (other in side):
                    self._cluster.network.cut(one, other)
        if self._rng.random() < 0.5:
            self._cluster.store.cut_off |= side
        self._later(self._rng.choice((1.0, 3.5, 8.0, 20.0, 160.0)), self._heal)

    def _partial(self) -> None:
        """Cut some pairs of hosts, though both reach all others."""
        names = [*self._cluster.nodes]
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            one, other = self._rng.choice(names), self._rng.choice([*names, self._leader()])
            self._tell(f"{one} and {other} do not reach each other")
            self._cluster.network.cut(one, other)
            self._cluster.network.cut(other, one)
        self._later(self._rng.choice((1.0, 3.5, 8.0, 20.0)), self._heal)

    def _one_way(self) -> None:
        names = [*self._cluster.nodes]
        one, other = self._rng.choice(names), self._leader()
        self._tell(f"nothing passes from {one} to {other}")
        self._cluster.network.cut(one, other)
        if self._rng.random() < 0.3:
            self._cluster.network.cut(other, self._some())
        self._later(self._rng.choice((1.0, 3.5, 8.0, 20.0)), self._heal)

    # The store.

    def _store_away(self) -> None:
        self._tell("the store is away")
        self._cluster.store.away = True
        self._later(self._rng.choice((0.5, 2.0, 8.0, 25.0, 150.0)), self._store_back)

    def _store_back(self) -> None:
        self._cluster.story.tell("the store is back")
        self._cluster.store.away, self._cluster.store.slow_s = False, 0.0

    def _store_slow(self) -> None:
        slow_s = self._rng.choice((0.3, 0.9, 2.5))
        self._tell(f"the store takes up to {slow_s} s each way")
        self._cluster.store.slow_s = slow_s
        self._later(self._rng.choice((3.0, 12.0, 30.0)), self._store_back)

    def _replies_lost(self) -> None:
        count = self._rng.choice((1, 1, 2, 4))
        self._tell(f"the next {count} answers of the store are lost")
        self._cluster.store.replies_lost = count

    def _lease_revoked(self) -> None:
        self._tell("the store loses the lease")
        self._cluster.store.revoke()
        if self._rng.random() < 0.7:  # an agent looks for the coordinator at that moment
            self._cluster.break_session(self._some(), "connection reset")

    def _cut_off_coordinator(self) -> None:
        name = self._leader()
        self._tell(f"{name} cannot reach the store")
        self._cluster.store.cut_off.add(name)
        self._later(self._rng.choice((1.0, 5.0, 30.0)), self._heal)

    # Arrivals and departures.

    def _drain(self) -> None:
        name = self._some()
        self._cluster.drain(name)
        if self._rng.random() < 0.2:
            self._later(self._rng.random() * 3.0, lambda: self._cluster.drain(name))
        if self._comes_back(name):
            self._back(name, 14.0)

    def _give_up(self) -> None:
        """Lose a host to its cluster, seldom dead: another agent replaces its agent."""
        name, how = self._some(), self._rng.random()
        if how < 0.5:
            self._cut_off(name, store=self._rng.random() < 0.5)
            self._later(self._rng.choice((8.0, 20.0, 160.0)), self._heal)
        elif how < 0.7:
            self._stand_still(name, self._rng.choice((2.0, 9.0, 140.0)))
        delay_s = self._rng.choice((0.0, 1.0, 4.0, 9.0))
        self._later(delay_s, lambda: self._cluster.give_up(name))
        if self._rng.random() < 0.8:
            self._later(delay_s + self._rng.random() * 3.0, self._arrival)

    def _leader_isolated(self) -> None:
        """Let no other node reach the coordinator, for a while or until some other cut is healed.

        Others must train meanwhile, if enough are left.
        """
        name = self._leader()
        self._tell(f"{name} reaches no other node, now or later")
        self._cluster.network.isolate(name)
        for_s = self._rng.choice((8.0, 20.0, 60.0, 0.0))
        if for_s:
            self._later(for_s, self._heal)

    def _pair_apart(self) -> None:
        """Cut two hosts from each other, for a while or until some other cut is healed.

        Both reach all others. The link may be cut again soon after it is whole.
        """
        alive = [name for name, node in self._cluster.nodes.items() if node.alive]
        if len(alive) < 2:
            return
        one, other = self._rng.sample(alive, 2)
        for_s = self._rng.choice((0.0, 0.0, 60.0, 250.0))
        self._cut_pair(one, other, for_s)
        if for_s and self._rng.random() < 0.4:
            gap_s = self._rng.choice((2.0, 20.0, 60.0))
            again_s = self._rng.choice((0.0, 100.0))
            self._later(for_s + gap_s, lambda: self._cut_pair(one, other, again_s))

    def _cut_pair(self, one: str, other: str, for_s: float) -> None:
        self._tell(f"{one} and {other} no longer reach each other")
        self._cluster.network.cut(one, other)
        self._cluster.network.cut(other, one)
        if for_s:
            self._later(for_s, self._heal)

    def _cut_off(self, name: str, *, store: bool) -> None:
        self._tell(f"{name} reaches no other node" + ", nor the store" * store)
        for other in self._cluster.nodes:
            if other != name:
                self._cluster.network.cut(name, other)
                self._cluster.network.cut(other, name)
        if store:
            self._cluster.store.cut_off.add(name)

    def _arrive(self) -> None:
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            self._later(self._rng.random() * 1.5, self._arrival)

    def _arrival(self) -> None:
        if self._cluster.checks.outcome is None and len(self._cluster.nodes) < 10:
            wish = self._rng.choice((None, None, 0, 1))
            self._cluster.boot(self._cluster.add(2, wish), warm_s=self._rng.choice((0.0, 0.3, 8.0)))
