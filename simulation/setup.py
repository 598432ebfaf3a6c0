"""One history before anything happens: the job, its nodes, and the plan of its faults.

All of it is drawn from the seed, and is data. `Cut` removes faults and nodes; the rest happens as
before, since each fault has random numbers of its own.
"""

from __future__ import annotations

import random

import msgspec

from elastane.protocol.limits import ISOLATION_LIMIT_MIN_S, Timing
from elastane.protocol.model import JobSpec
from simulation.script import Script

TIMING = Timing(
    join_timeout_s=60.0,
    last_call_s=1.0,
    last_call_max_s=5.0,
    drain_timeout_s=6.0,
    shutdown_timeout_s=4.0,
    growth_interval_s=10.0,
)
# The virtual seconds between which faults begin.
FIRST_S, LAST_S = 1.0, 40.0
# The owner's actions are numbered from here, after all faults: changed ranges, agents given up,
# reported deaths, worlds with mismatched collectives, the loss of all state holders, a coordinator
# that no other node reaches, and two nodes that do not reach each other.
FAULTS_MAX = 100
GIVEN_UP_FIRST = 2 * FAULTS_MAX
SEES_DEATHS = 3 * FAULTS_MAX
# Single processes of a host that are stopped, numbered after all that.
STILL_FIRST = 4 * FAULTS_MAX
STILL = (
    "stop_agent",
    "stop_agent",
    "stop_agent_and_reaper",
    "stop_workers",
    "stop_reaper",
    "stop_zygote",
    "stop_store_process",
    "stop_snapshot_server",
)
MISMATCH = 4 * FAULTS_MAX
HOLDERS_LOST = 5 * FAULTS_MAX
LEADER_ISOLATED = 6 * FAULTS_MAX
PAIR_APART = 7 * FAULTS_MAX
# Jobs of unmodified scripts whose worlds only shrink in place, of those with boundaries at which
# workers join, and of scripts of which a worker raises an error at some step, in each world or in
# the first ones. The last restart with all their workers, or recover in place.
KINDS = ("shrinks", "planned", "fails", "planned-fails")
# The last step at which a script fails, of those that do.
FAILS_AT_MAX = 12
# How often each kind of fault is drawn, relative to the others.
WEIGHTS = {
    "crash": 4,
    "restart_agent": 3,
    "workers_crash": 5,
    "pause": 3,
    "suspend": 1,
    "clock_jump": 1,
    "break": 3,
    "flap": 1,
    "replay": 1,
    "half_open": 2,
    "late_session": 2,
    "slow_host": 2,
    "partition": 3,
    "partial": 2,
    "one_way": 2,
    "kill_coordinator": 3,
    "die_at_step": 4,
    "drain": 3,
    "arrive": 3,
    "slow_starts": 1,
}
STORE_WEIGHTS = {
    "store_away": 3,
    "store_slow": 2,
    "replies_lost": 2,
    "lease_revoked": 2,
    "cut_off_coordinator": 2,
    "pause_coordinator": 3,
}
IN_PLACE_WEIGHTS = {"workers_crash": 10, "workers_in_turn": 8, "drain": 5, "arrive": 6}
DEATHS = (
    *IN_PLACE_WEIGHTS,
    "slow_starts",
    "crash",
    "restart_agent",
    "kill_coordinator",
    "die_at_step",
)


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault of a plan."""

    number: int
    at_s: float
    kind: str


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The faults and nodes left out of a history, to test whether it still fails."""

    without: tuple[int, ...] = ()
    nodes: int = 0  # the first nodes that are kept; 0: all


WHOLE = Cut()


class HistorySetup(msgspec.Struct, frozen=True, kw_only=True):
    """One history before anything goes wrong."""

    seed: int
    store_backed: bool
    spec: JobSpec
    script: Script
    sizes: tuple[int, ...]
    drifts: tuple[float, ...]
    plan: tuple[PlannedFault, ...]
    in_place: bool = False  # its workers recover in place
    rejects: bool = False  # cut connections are refused by a firewall, not silent
    racks: int = 0  # over which the nodes are spread in turn; 0: nodes have no topology

    @property
    def mode(self) -> str:
        """How the coordinator is found."""
        return "store" if self.store_backed else "endpoint"

    def cut(self, cut: Cut) -> HistorySetup:
        """Return the same history with less in it."""
        sizes = self.sizes[: cut.nodes or None]
        spec = msgspec.structs.replace(self.spec, min_nodes=min(self.spec.min_nodes, len(sizes)))
        plan = tuple(one for one in self.plan if one.number not in cut.without)
        return msgspec.structs.replace(self, sizes=sizes, spec=spec, plan=plan)


def setup_of(
    seed: int,
    *,
    store_backed: bool,
    in_place: bool = False,
    span: int = 0,
    kind: str = "",
) -> HistorySetup:
    """Draw the job, its nodes and its faults; `span` draws the same with sharded state.

    `kind` is one of `KINDS`, or empty.
    """
    shrinks = kind == "shrinks"
    planned, fails = kind.startswith("planned"), kind.endswith("fails")
    in_place = in_place or shrinks or planned
    rng = random.Random(f"setting {seed} {store_backed}" + " in place" * in_place)
    nodes = rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
    low = rng.randint(1, nodes)
    unequal = rng.random() < 0.3
    asks = rng.random() < 0.6
    # A job of four has the shortest isolation limit.
    short = random.Random(f"isolation {seed}").random() < 0.25
    limit_s = ISOLATION_LIMIT_MIN_S if short else TIMING.isolation_limit_s
    spec = JobSpec(
        job=f"seed-{seed}",
        min_nodes=low,
        max_nodes=rng.choice((nodes, nodes, low)),
        max_restarts=rng.choice((0, 1, 3, 10, 10, 10) if in_place else (0, 1, 3, 10)),
        min_workers=rng.choice((0, 0, 1, 2)) if in_place else 0,
        timing=msgspec.structs.replace(TIMING, isolation_limit_s=limit_s),
    )
    own = random.Random(f"fails {seed}")
    if fails:
        spec = msgspec.structs.replace(spec, max_restarts=own.choice((1, 3, 10, 10, 10)))
    script = Script(
        steps=rng.choice((15, 40, 10_000, 10_000)),
        step_s=rng.choice((0.5, 1.0, 2.0)),
        checkpoint_every=5,
        asks=asks,
        leaves_on_sigterm=not asks and rng.random() < 0.5,
        trap_s=rng.choice((0.0, 0.0, 0.0, 1.0, 3.0, 100.0)),
        in_place=in_place,
        heal_s=rng.choice((0.05, 0.5, 2.0)) if in_place else 0.0,
        span=span,
        shrinks=shrinks,
        planned=planned,
        resumes=not shrinks or random.Random(f"resumes {seed}").random() >= 0.2,
        loads_after=random.Random(f"loads after {seed}").choice((0, 0, 1, 3)),
        keeps_rank=(shrinks or planned) and random.Random(f"keeps rank {seed}").random() < 0.1,
        fails_at=own.randint(1, FAILS_AT_MAX) if fails else 0,
        fails_times=own.choice((0, 0, 1, 2)) if fails else 0,
        ends_after_s=own.choice((0.0, 0.3, 2.0)) if fails and in_place else 0.0,
        evaluates=(shrinks or planned) and random.Random(f"evaluates {seed}").random() < 0.3,
    )
    sizes = tuple(rng.choice((1, 2)) if unequal else 2 for _ in range(nodes))
    # A replica of several nodes needs equal nodes, and there is more than one replica.
    if span > 1:
        nodes, most = nodes + span, spec.max_nodes + span
        sizes = (2,) * nodes
        spec = msgspec.structs.replace(spec, max_nodes=most)
    spares = (2,) * rng.choice((0, 0, 1, 2))
    return HistorySetup(
        seed=seed,
        store_backed=store_backed,
        spec=spec,
        script=script,
        sizes=sizes + spares,
        # A quartz is wrong by less than 0.01 %; the bounds allow 3 %.
        drifts=rng.choice(((1.0,), (0.9999, 1.0001), (0.97, 1.0, 1.03))),
        plan=(
            *_plan(rng, store_backed=store_backed, in_place=in_place),
            *_resizes(seed),
            *_still(seed),
            *(_mismatch(seed) if in_place else ()),
            *(_holders_lost(seed) if in_place and not shrinks else ()),
            *(_given_up(seed) + _sees_deaths(seed) if store_backed else ()),
            *(_leader_isolated(seed) if store_backed else ()),
            *(_pair_apart(seed) if store_backed else ()),
        ),
        in_place=in_place,
        rejects=random.Random(f"rejects {seed}").random() < 0.3,
    )


def _plan(rng: random.Random, *, store_backed: bool, in_place: bool) -> tuple[PlannedFault, ...]:
    """Draw the faults: single ones, and two or three at once or in sequence."""
    weights = WEIGHTS | (STORE_WEIGHTS if store_backed else {})
    if in_place:
        weights |= IN_PLACE_WEIGHTS
        if rng.random() < 0.3:  # deaths alone: every step of a survivor must be kept
            weights = {kind: weights[kind] for kind in DEATHS}
    if rng.random() < 0.1:  # histories in which only workers fail, and nodes only leave
        weights = {kind: weights[kind] for kind in ("workers_crash", "drain")}
    kinds, at_s = [*weights], FIRST_S
    plan = []
    counts = (1, 1, 2, 3, 4, 6) if in_place else (0, 1, 1, 2, 2, 3, 3, 4, 6)
    for number in range(rng.choice(counts)):
        near = rng.random()
        gap_s = 0.0 if near < 0.1 else 0.4 if near < 0.5 else 14.0
        at_s = min(at_s + rng.random() * gap_s, LAST_S)
        plan.append(PlannedFault(number, at_s, rng.choices(kinds, [*weights.values()])[0]))
    return tuple(plan)


def _resizes(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when the owner changes the range, in some histories, independently of the faults."""
    rng = random.Random(f"resizes {seed}")
    if rng.random() > 0.15:
        return ()
    times = [FIRST_S + rng.random() * (LAST_S - FIRST_S) for _ in range(rng.choice((1, 1, 2, 4)))]
    return tuple(PlannedFault(FAULTS_MAX + n, at_s, "resize") for n, at_s in enumerate(times))


def _given_up(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when the owner gives agents up, in some histories, independently of the faults."""
    rng = random.Random(f"given up {seed}")
    if rng.random() > 0.1:
        return ()
    times = [FIRST_S + rng.random() * (LAST_S - FIRST_S) for _ in range(rng.choice((1, 1, 1, 3)))]
    return tuple(PlannedFault(GIVEN_UP_FIRST + n, at_s, "give_up") for n, at_s in enumerate(times))


def _mismatch(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when members of a world call different collectives: once, in some histories."""
    rng = random.Random(f"mismatch {seed}")
    if rng.random() > 0.1:
        return ()
    return (PlannedFault(MISMATCH, FIRST_S + rng.random() * (LAST_S - FIRST_S), "mismatch"),)


def _holders_lost(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when all holders of the state are lost while others join: once, in some histories."""
    rng = random.Random(f"holders lost {seed}")
    if rng.random() > 0.05:
        return ()
    kind = rng.choice(("holders_killed", "holders_crash"))
    return (PlannedFault(HOLDERS_LOST, FIRST_S + rng.random() * (LAST_S - FIRST_S), kind),)


def _leader_isolated(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when no other node reaches the coordinator, which keeps the store: in some histories."""
    rng = random.Random(f"leader isolated {seed}")
    if rng.random() > 0.1:
        return ()
    at_s = FIRST_S + rng.random() * (LAST_S - FIRST_S)
    return (PlannedFault(LEADER_ISOLATED, at_s, "leader_isolated"),)


def _pair_apart(seed: int) -> tuple[PlannedFault, ...]:
    """Draw when two nodes no longer reach each other, for good: in some histories."""
    rng = random.Random(f"pair apart {seed}")
    if rng.random() > 0.1:
        return ()
    at_s = FIRST_S + rng.random() * (LAST_S - FIRST_S)
    return (PlannedFault(PAIR_APART, at_s, "pair_apart"),)


def _still(seed: int) -> tuple[PlannedFault, ...]:
    """Draw which processes are stopped alone, and when, in some histories."""
    rng = random.Random(f"still {seed}")
    if rng.random() > 0.15:
        return ()
    times = [FIRST_S + rng.random() * (LAST_S - FIRST_S) for _ in range(rng.choice((1, 1, 2, 3)))]
    return tuple(
        PlannedFault(STILL_FIRST + n, at_s, rng.choice(STILL)) for n, at_s in enumerate(times)
    )


def _sees_deaths(seed: int) -> tuple[PlannedFault, ...]:
    """Draw whether the owner learns of crashed hosts: no fault, in a fifth of the histories."""
    seen = random.Random(f"sees deaths {seed}").random() < 0.2
    return (PlannedFault(SEES_DEATHS, 0.0, "sees_deaths"),) if seen else ()
