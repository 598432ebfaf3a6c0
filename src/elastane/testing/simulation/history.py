"""One history from one seed: run it, hold it against what must hold, tell it when it fails."""

from __future__ import annotations

import random

import msgspec

from elastane.core.limits import FENCE_WAIT_S
from elastane.core.rendezvous import Phase
from elastane.testing.simulation.checks import Violation
from elastane.testing.simulation.cluster import Cluster
from elastane.testing.simulation.faults import Faults, Setting, setting_of

# Once the last fault is over and all that can be is healed, the job trains or has ended within
# this: the longest wait of the coordinator, then a stop, a rejoin and a start.
LIVENESS_S = FENCE_WAIT_S + 60.0
# Training that goes on for this long after the last fault goes on for good.
STABLE_S = 20.0
# More is a loop in virtual time.
_EVENTS_MAX = 400_000


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a history came to."""

    seed: int
    mode: str
    virtual_s: float
    events: int
    messages: int
    worlds: int
    steps: int
    restarts_used: int
    ended: str


class HistoryFailedError(AssertionError):
    """A history broke what must hold; the message is its story and how to replay it."""


class History:
    """One simulated job."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        rng = random.Random(f"history {setting.seed} {setting.store_backed}")
        self.cluster = Cluster(setting.spec, setting.script, rng, store_backed=setting.store_backed)
        self.faults = Faults(self.cluster, setting, rng)
        for size in (*setting.sizes, *((2,) * setting.spares)):
            node = self.cluster.add(size)
            warm_s = rng.choice((0.0, 0.3, 1.0))
            self.cluster.clock.after(
                rng.random() * 0.5,
                lambda n=node, w=warm_s: self.cluster.boot(n, w),  # type: ignore[misc]
            )
        self.faults.plan()
        self._events = 0

    def run(self) -> Result:
        """Play it to its end; raise HistoryFailedError where something did not hold."""
        try:
            self._play()
        except Exception as fault:
            raise HistoryFailedError(self._account(fault)) from fault
        cluster, checks = self.cluster, self.cluster.checks
        return Result(
            seed=self.setting.seed,
            mode=_mode(self.setting.store_backed),
            virtual_s=cluster.clock.now_s,
            events=self._events,
            messages=cluster.network.carried,
            worlds=checks.settled,
            steps=checks.steps,
            restarts_used=checks.restarts_used,
            ended=checks.outcome.reason if checks.outcome else "",
        )

    def _play(self) -> None:
        cluster = self.cluster
        while not self._is_settled():
            if not cluster.clock.step() or cluster.clock.now_s > self._deadline_s():
                break
            self._events += 1
            if self._events > _EVENTS_MAX:
                raise Violation(f"{_EVENTS_MAX} events and no end")
        self._must_live()

    def _deadline_s(self) -> float:
        return self._quiet_s() + LIVENESS_S

    def _quiet_s(self) -> float:
        """When the last fault was over, as far as is known."""
        return max(self.faults.over_s, self.cluster.disturbed_s)

    def _is_settled(self) -> bool:
        """Whether nothing more will come: the job has ended and all know, or trains on."""
        cluster = self.cluster
        if cluster.clock.now_s < self.faults.over_s:
            return False
        if not any(node.alive for node in cluster.nodes.values()) and not cluster.seats:
            return True
        return cluster.clock.now_s > self._quiet_s() + STABLE_S and self._trains()

    def _trains(self) -> bool:
        """Whether the newest world makes steps, and its coordinator is content."""
        cluster = self.cluster
        phases = [seat.machine.phase for seat in cluster.seats.values()]
        recent_s = cluster.clock.now_s - cluster.checks.step_s
        return phases == [Phase.RUNNING] and recent_s < 2 * self.setting.script.step_s + 1.0

    def _must_live(self) -> None:
        cluster, spec = self.cluster, self.setting.spec
        alive = [node for node in cluster.nodes.values() if node.alive and not node.signalled]
        if cluster.checks.outcome is not None:
            if alive:
                names = ", ".join(node.name for node in alive)
                raise Violation(f"the job has ended, but the agents of {names} have not")
            return
        served = cluster.store_backed or cluster.endpoint in cluster.seats
        if len(alive) >= spec.min_nodes and served and not self._trains():
            raise Violation(
                f"{len(alive)} nodes of at least {spec.min_nodes} are here, and nothing was"
                f" trained for {cluster.clock.now_s - cluster.checks.step_s:.0f} s"
            )

    def _account(self, fault: Exception) -> str:
        seed, mode = self.setting.seed, _mode(self.setting.store_backed)
        return (
            f"{self.cluster.story.text()}\n\n{self.setting.spec}\n{self.setting.script}\n"
            f"seed {seed} ({mode}): {type(fault).__name__}: {fault}\n"
            f"replay: python -m elastane.testing.simulation --seed {seed} --mode {mode}"
        )


def _mode(store_backed: bool) -> str:
    return "store" if store_backed else "endpoint"


def run_seed(seed: int, *, store_backed: bool) -> Result:
    """Play the history of `seed`; raise HistoryFailedError where something did not hold."""
    return History(setting_of(seed, store_backed=store_backed)).run()
