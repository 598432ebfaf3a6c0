"""One history from one seed: play it, check it, and explain a failure.

A history ends when the job has ended or trains stably after the last fault. If neither happens in
time, `stuck` says what is broken.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from elastane.coordinator.rules import MembershipPhase
from elastane.coordinator.rules.incident import SAME_CRASHES_MAX
from elastane.protocol.limits import BACKOFF_MAX_S, STOP_MARGIN_S
from simulation.checks import Violation
from simulation.cluster import SimulatedCluster
from simulation.faults import Faults
from simulation.in_place_workers import COLLECTIVE_TIMEOUT_S, EVALUATION_S, MEETING_TIMEOUT_S
from simulation.node import SimulatedNode
from simulation.setup import FAILS_AT_MAX, TIMING, WHOLE, Cut, HistorySetup, setup_of

# After the last fault, once everything healed that can, the job trains or has ended within this. In
# the worst case the waits follow each other. The last silence is noticed and the lease runs out; a
# coordinator takes over and waits for the old world, first for its agents, then for unreachable
# ones to stop themselves. Then a world is stopped, pauses after a crash loop, forms again in a last
# call, and starts its workers (slow ones: 8 s).
LIVENESS_S = (
    TIMING.silence_s
    + TIMING.lease_ttl_s
    + TIMING.reregister_s
    + TIMING.fence_wait_s
    + TIMING.shutdown_timeout_s
    + STOP_MARGIN_S
    + BACKOFF_MAX_S
    + TIMING.last_call_max_s
    + 8.0
)
# Workers that recover in place wait for lost peers, at a meeting and in a collective; joining ones
# are gathered and wait for a drain.
IN_PLACE_S = MEETING_TIMEOUT_S + COLLECTIVE_TIMEOUT_S + TIMING.gather_max_s + TIMING.drain_timeout_s
# A world that only shrinks grows at a checkpoint of its script. First the interval passes, doubled
# twice after growths that failed. Then come five steps of 2 s with a save and an evaluation, and a
# drain that may be called off once and has twice the time after that.
GROWTH_S = 4 * TIMING.growth_interval_s + 2 * (5 * 2.0 + 1.0 + EVALUATION_S)
GROWTH_S += 3 * TIMING.drain_timeout_s
# Workers that join at boundaries wait for a drain. Two drains that were called off meanwhile give
# the next one four times the time, after a pause of that length. In the script's first steps and
# after a save, the boundary comes late.
JOIN_S = 8 * TIMING.drain_timeout_s + 5 * 2.0 + 1.0 + EVALUATION_S
# Attempts that fail at one step: slow steps up to it, the start and the longest pause, each time.
FAILS_S = (SAME_CRASHES_MAX + 1) * (FAILS_AT_MAX * 2.0 + 8.0 + BACKOFF_MAX_S)
# Where others join at boundaries, each worker makes that step again, and fails alone: a slow step,
# the end of its process, and the meeting of the others, in each attempt.
FAILS_IN_TURN_S = (SAME_CRASHES_MAX + 1) * (2.0 + 2.0 + 1.0)
# All agents know that a job has ended, and have stopped their workers, within this.
TOLD_S = TIMING.silence_s + TIMING.shutdown_timeout_s + STOP_MARGIN_S
# A job that had enough nodes for this long after the last fault must not end for lack of nodes.
ENOUGH_S = 40.0
# Training that continues for this long after the last fault is stable.
STABLE_S = 20.0
# All agents have been started by then.
_BOOT_S = 0.5
# More events are a loop in virtual time.
_EVENTS_MAX = 400_000
# The end is tested after this many events: testing at each would cost a tenth of all time.
_LOOK_EVENTS = 16


class HistoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a history."""

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
    """A history broke an invariant; the message is its story and how to replay it."""

    def __init__(self, account: str, what: str, story: str) -> None:
        super().__init__(account)
        self.what, self.story = what, story


class History:
    """One simulated job."""

    def __init__(self, setting: HistorySetup, cut: Cut = WHOLE) -> None:
        self.setting, self.was_cut = setting.cut(cut), cut
        words = f"history {setting.seed} {setting.store_backed}"
        rng = random.Random(words + " in place" * setting.in_place)
        cluster = SimulatedCluster(
            self.setting.spec, setting.script, rng, store_backed=setting.store_backed
        )
        cluster.drifts, cluster.racks = setting.drifts, setting.racks
        cluster.network.rejects = setting.rejects
        self.cluster = cluster
        self.faults = Faults(cluster, self.setting)
        for size in self.setting.sizes:
            node = cluster.add(size)
            warm_s = rng.choice((0.0, 0.3, 1.0))
            cluster.clock.after(
                rng.random() * _BOOT_S,
                lambda n=node, w=warm_s: cluster.boot(n, w),  # type: ignore[misc]
            )
        self.faults.plan()
        self._events = 0

    def run(self) -> HistoryResult:
        """Play it to its end; raise HistoryFailedError if an invariant did not hold."""
        try:
            self._play()
        except Exception as fault:
            what = f"{type(fault).__name__}: {fault}"
            raise HistoryFailedError(
                self._account(what), what, self.cluster.story.text()
            ) from fault
        cluster, checks = self.cluster, self.cluster.checks
        return HistoryResult(
            seed=self.setting.seed,
            mode=self.setting.mode,
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
        while not self._is_settled() and cluster.clock.now_s <= self._deadline_s():
            for _ in range(_LOOK_EVENTS):
                self._events += cluster.clock.step()
            if not cluster.clock.goes_on:
                break
            if self._events > _EVENTS_MAX:
                raise Violation(f"{_EVENTS_MAX} events and no end")
            if overdue := cluster.checks.cuts.overdue(self._quiet_s()):
                raise Violation(overdue)
        if broken := stuck(cluster) or ended_in_vain(cluster, self._quiet_s()):
            raise Violation(broken)

    def _deadline_s(self) -> float:
        due_s = self._quiet_s() + LIVENESS_S + (IN_PLACE_S if self.setting.in_place else 0.0)
        due_s += GROWTH_S if self.setting.script.shrinks else 0.0
        due_s += JOIN_S if self.setting.script.planned else 0.0
        if self.setting.script.fails_at:
            due_s += FAILS_S
            due_s += FAILS_IN_TURN_S * sum(self.setting.sizes) * self.setting.script.planned
        checks = self.cluster.checks
        return due_s if checks.outcome is None else max(due_s, checks.ended_s + TOLD_S)

    def _quiet_s(self) -> float:
        """When the last fault was over, as far as is known."""
        return max(self.faults.over_s, self.cluster.disturbed_s)

    def _is_settled(self) -> bool:
        """Whether nothing more will happen: the job has ended everywhere, or trains stably."""
        cluster = self.cluster
        if cluster.clock.now_s < max(self.faults.over_s, _BOOT_S):
            return False
        if not any(node.alive for node in cluster.nodes.values()) and not cluster.coordinators:
            return True
        is_stable = cluster.clock.now_s > self._quiet_s() + STABLE_S and trains(cluster)
        return is_stable and cluster.checks.crashes.is_over and not cluster.checks.cuts.awaits

    def _account(self, what: str) -> str:
        setting, cut = self.setting, self.was_cut
        nodes = " ".join(str(size) for size in setting.sizes)
        spec, script = setting.spec, setting.script
        return (
            f"{spec.min_nodes} to {spec.max_nodes} nodes, workers of each: {nodes};"
            f" {spec.max_restarts} restarts; {script}\n\n"
            f"{self.cluster.story.text()}\n\n"
            f"seed {setting.seed} ({setting.mode}): {what}\n"
            f"replay: {replay(setting, cut)}"
        )


def trains(cluster: SimulatedCluster) -> bool:
    """Return whether the newest world makes steps, and its coordinator plans no change."""
    phases = [coordinator.machine.phase for coordinator in cluster.coordinators.values()]
    recent_s = cluster.clock.now_s - cluster.checks.step_s
    steps = recent_s < 2 * cluster.script.step_s + 1.0
    fits = cluster.checks.nodes_stepped <= cluster.most
    return phases == [MembershipPhase.RUNNING] and steps and fits and not left_out(cluster)


def left_out(cluster: SimulatedCluster) -> str:
    """Return which workers should have a place in the newest world, and have none."""
    if cluster.script.shrinks:
        if not (cluster.spec.is_elastic or cluster.spec.max_restarts):
            return ""  # The script need not expect to start again.
        if not cluster.script.resumes:
            return ""  # It is not to lose its work at each growth.
        able = {node.name: node.size for node in _able_nodes(cluster)}
        return cluster.in_place_training.short_of(able, cluster.most)
    paid = cluster.checks.restarts_used < cluster.spec.max_restarts
    out = cluster.in_place_training.left_out(paid=paid)
    return out or (_absent(cluster) if cluster.script.planned else "")


def _absent(cluster: SimulatedCluster) -> str:
    """Return which nodes have no worker in the newest world, though it has room for one."""
    able = {
        node.name: 1
        for node in _able_nodes(cluster)
        if node.in_place_group is None or any(node.in_place_group.able)
    }
    return cluster.in_place_training.short_of(able, cluster.most)


def _able_nodes(cluster: SimulatedCluster) -> list[SimulatedNode]:
    """Return the nodes that could be in a world; of two that are apart, one may be left out."""
    alive = [node.name for node in cluster.nodes.values() if node.alive]
    return [
        node
        for node in cluster.nodes.values()
        if node.alive and node.session is not None and not node.signalled
        if node.incarnation not in cluster.given_up and not cluster.apart(node.name, alive)
    ]


def stuck(cluster: SimulatedCluster) -> str:
    """Return what is broken after enough time to recover: training, or the knowledge of the end."""
    alive = [node for node in cluster.nodes.values() if node.alive and not node.signalled]
    may_train = [node for node in alive if node.incarnation not in cluster.given_up]
    if cluster.checks.outcome is not None:
        # Without a store, an endpoint that no agent could reach ends nothing for those that train.
        late = [
            node.name
            for node in alive
            if cluster.store_backed or node.session is not None or not node.trains
        ]
        return f"the job has ended, but the agents of {', '.join(late)} have not" if late else ""
    served = cluster.store_backed or cluster.endpoint in cluster.coordinators
    here = cluster.together([node.name for node in may_train]) or may_train
    if len(here) < cluster.fewest or not served or trains(cluster):
        return ""
    return (
        f"{len(may_train)} nodes of at least {cluster.fewest} are here, and nothing was"
        f" trained for {cluster.clock.now_s - cluster.checks.step_s:.0f} s"
        + (f", and {out} have no place" if (out := left_out(cluster)) else "")
    )


def ended_in_vain(cluster: SimulatedCluster, quiet_s: float) -> str:
    """Return what is wrong if a job ended for lack of nodes though enough were there."""
    checks, outcome = cluster.checks, cluster.checks.outcome
    if outcome is None or outcome.slug not in ("rdzv-timeout", "world-stalled"):
        return ""
    if len(checks.here) < cluster.fewest:
        return ""
    if checks.restarts_used >= cluster.spec.max_restarts:
        return ""  # Some nodes have lost workers that the budget does not replace.
    waited_s = checks.ended_s - quiet_s
    workers = sum(sorted(checks.here)[: cluster.most])  # whichever nodes have a place
    if waited_s < ENOUGH_S or workers < cluster.spec.min_workers:
        return ""
    return (
        f"the job ended ({outcome.reason}), and {len(checks.here)} nodes were there, undisturbed"
        f" for {waited_s:.0f} s"
    )


def replay(setting: HistorySetup, cut: Cut) -> str:
    """Return the command that plays a history again."""
    words = f"python -m simulation --seed {setting.seed} --mode {setting.mode}"
    fails, planned = bool(setting.script.fails_at), setting.script.planned
    if setting.in_place:
        kinds = {"--shrinks": setting.script.shrinks, "--planned": planned and not fails}
        kinds["--planned-fails"] = planned
        words += " " + next((option for option, is_so in kinds.items() if is_so), "--in-place")
        words += f" --span {setting.script.span}" * bool(setting.script.span)
    words += " --fails" * (fails and not planned)
    if cut.without:
        words += " --without " + ",".join(map(str, cut.without))
    if cut.nodes:
        words += f" --nodes {cut.nodes}"
    return words + " --story"


def run_seed(seed: int, *, cut: Cut = WHOLE, **drawn: Any) -> HistoryResult:
    """Play a history of `setup_of`; raise HistoryFailedError if an invariant did not hold."""
    return History(setup_of(seed, **drawn), cut).run()
