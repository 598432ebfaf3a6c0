"""The history of training states in recovery in place: what must hold of its steps.

No step is lost while a surviving worker holds it, none is applied twice, and no two worlds train.
Each method is called for one action of a simulated worker, and raises through `require`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from elastane.protocol.model import Fence, WorldMember
from simulation import mesh
from simulation.boundary_checks import BoundaryCheck
from simulation.observed import ObservedCluster, RecordedJob
from simulation.places import Gathering, InPlaceGroup, SimulatedWorker

Require = Callable[[bool, str], None]


@dataclass(frozen=True)
class StoppedState:
    """The furthest state that agents stopped without need: no later world may begin before it."""

    step: int = 0
    name: str = ""  # one of its workers
    shards: frozenset[tuple[int, int]] = frozenset()  # what those workers held of it

    def with_stop(self, other: StoppedState) -> StoppedState:
        """Return the further one of two, or both where they are of one step."""
        if other.step != self.step:
            return max(self, other, key=lambda each: each.step)
        return replace(self, name=self.name or other.name, shards=self.shards | other.shards)

    def without_holder(
        self, shard: tuple[int, int], left: AbstractSet[tuple[int, int]]
    ) -> StoppedState:
        """Return the state after a holder of `shard` has ended, while `left` have other holders.

        If it alone held its shard, the state would be lost without the stop too.
        """
        return self if shard in left | self.shards else StoppedState()


class StateChecks:
    """Which world made which step, checked against what each worker holds."""

    def __init__(
        self,
        cluster: ObservedCluster,
        recorded: RecordedJob,
        boundaries: BoundaryCheck,
        require: Require,
        stepped: Callable[[Fence], None],
    ) -> None:
        self._cluster, self._recorded, self._boundaries = cluster, recorded, boundaries
        self._require, self._stepped = require, stepped
        self._made: dict[int, Gathering] = {}  # by step: the world that made it
        self._entered: dict[int, Fence] = {}  # by process: the last world assigned to it
        self._stopped = StoppedState()
        self._ended = False  # a worker has exited with 0
        self.regrouped = 0
        self.healed = 0

    def forks(self, before: SimulatedWorker) -> None:
        """Check the start of a replacement for this worker."""
        self._require(not before.alive, f"{before.name} is to have a successor, and lives")

    def given(self, worker: SimulatedWorker) -> None:
        """Check a place given to a worker; the agent knows of those that ended on the way."""
        core = self._cluster.nodes[worker.group.host].core
        reported = core.group.failures if core is not None and core.group is not None else {}
        self._require(
            worker.able or not worker.alive or worker.local_rank in reported,
            f"{worker.name} has a place in {worker.group.fence}, and is not able",
        )

    def enters(self, worker: SimulatedWorker, world: Gathering, rank: int) -> None:
        """Check a worker that comes to the store of a world."""
        last = self._entered.get(worker.pid)
        self._require(
            last is None or world.fence > last, f"{worker.name} enters {world.fence} after {last}"
        )
        self._entered[worker.pid] = world.fence
        other = world.workers.get(rank)
        self._require(
            rank < world.size and (other is None or other is worker),
            f"{worker.name} has rank {rank} of {world.size} in {world.fence}, as another has",
        )

    def begins(self, world: Gathering, members: Sequence[SimulatedWorker]) -> None:
        """Check a world whose members have met, and know the step that they continue from."""
        self.regrouped += world.in_place
        self.healed += sum(w.committed != world.base for w in members) if world.from_state else 0
        saved = self._cluster.saved_step
        self._require(
            world.from_state or world.base >= saved or self._may_be_outrun(),
            f"{world.fence} begins at step {world.base}, and step {saved} is saved",
        )
        self._ordered(world, members)
        self._whole(world, members)
        self._give_way(world)
        had_place = [self._had_place(w, world.fence) for w in members]
        self._boundaries.begins(world, members, had_place)
        ahead = [f"{w.name} (step {w.committed})" for w in members if w.held > world.base]
        self._require(
            not ahead, f"{world.fence} has {', '.join(ahead)}, and continues from step {world.base}"
        )
        if not self.is_strict:
            self._forget(world.base)
            return
        elsewhere = [
            w
            for group in self._cluster.groups
            for w in group.workers.values()
            if w.held > world.base and self._must_be_in(w)
        ]
        names = ", ".join(f"{w.name} (step {w.committed})" for w in elsewhere)
        self._require(
            not elsewhere, f"{world.fence} continues from step {world.base} without {names}"
        )
        lost = self._stopped
        self._require(
            world.base >= lost.step,
            f"{world.fence} continues from step {world.base}; {lost.name} had {lost.step} and was"
            " stopped",
        )
        self._forget(world.base)

    def _may_be_outrun(self) -> bool:
        """Whether workers of an older world may have saved while this one started.

        Without a store nothing stops the workers of an agent that stands still. Their saves have
        the fence of the older world, so no later one loads them before those of a newer world.
        """
        agents = self._cluster.nodes.values()
        return not self._cluster.store_backed and any(node.paused for node in agents)

    def _whole(self, world: Gathering, members: Sequence[SimulatedWorker]) -> None:
        """Check that no worker is left out on nodes that take part whole or not at all."""
        if not self._cluster.script.span:
            return
        here = Counter(w.group.host for w in members)
        parts = [w.group.host for w in members if here[w.group.host] < w.group.size]
        self._require(not parts, f"{world.fence} has a part of the workers of {', '.join(parts)}")

    def _give_way(self, world: Gathering) -> None:
        """Record the workers that lost their place as a surplus: no world needs them.

        One that is further than the world is no such: it may not be left behind.
        """
        before = self._recorded.members_before(world.fence)
        if len(world.hosts) > self._cluster.most or len(before) <= len(world.hosts):
            return
        for group in self._cluster.groups:
            for worker in group.workers.values():
                out = group.host not in world.hosts and worker.held <= world.base
                worker.gave_way = worker.gave_way or out
        for worker in world.workers.values():
            worker.gave_way = False

    def steps(self, world: Gathering) -> None:
        """Check a world that reduces a step."""
        self._stepped(world.fence)
        self._require(not world.is_uneven, f"{world.fence} is of no whole replicas, and steps")
        late = [
            w.name
            for w in world.workers.values()
            if self._entered[w.pid] != world.fence or w.committed is None
        ]
        self._require(not late, f"{', '.join(late)} step in {world.fence}, and are not of it")
        self._boundaries.steps(world)

    def commits(self, worker: SimulatedWorker, world: Gathering) -> None:
        """Check a worker that has applied a step."""
        step = worker.committed
        assert step is not None
        made = self._made.setdefault(step, world)
        if not self.is_strict:
            # A worker out of reach may have applied a step that others interrupt and retry.
            # `begins` checks that no member of the newer world is one.
            self._made[step] = world
            return
        self._require(
            made is world, f"step {step} was made in {made.fence}, and again in {world.fence}"
        )

    def breaks_off(self, worker: SimulatedWorker) -> None:
        """Check a worker that leaves its world in a step; never in a drain without faults."""
        world, group = worker.world, worker.group
        if world is None or worker.stage not in ("computing", "applying") or not self.is_strict:
            return
        groups = {id(w.group): w.group for w in world.workers.values()}.values()
        whole = len(world.workers) == world.size and all(
            w.world is world or w.stage == "parked" for w in world.workers.values()
        )
        whole = whole and not world.mismatched
        aimed = [g.aimed_s for g in groups if g.target is not None and g.aimed_s is not None]
        timing = self._cluster.spec.timing
        in_time = (
            len(aimed) == len(groups)
            and self._cluster.clock.now_s - min(aimed, default=0.0) < timing.drain_timeout_s - 1.0
        )
        self._require(
            not (whole and in_time and group.phase == "running" and not group.crashed),
            f"{worker.name} is broken off in {world.fence}, which parks for a planned change",
        )

    def stops(self, group: InPlaceGroup) -> None:
        """Check a stop of the workers of a node by its agent."""
        node = self._cluster.nodes[group.host]
        held = [
            w
            for w in group.workers.values()
            if w.committed is not None and w.able and w.able_s < self._cluster.clock.now_s - 1.0
            if not w.gave_way and not (w.sole and group.crashed)
        ]
        if group.phase != "running" or not held or not self.is_strict or self._ended:
            return
        if self._cluster.script.is_unmodified:
            return  # All restart from the checkpoint, where too few are left and where they grow.
        furthest = max(held, key=lambda w: w.committed or 0)
        if self._is_incomplete():
            if self._stopped.step <= furthest.held:  # Then that state is lost too, and rightly.
                self._stopped = StoppedState()
            return
        if node.signalled or self._recorded.outcome is not None:
            self._is_kept(furthest)
            return
        shards = frozenset(mesh.shard(w) for w in held if w.committed == furthest.committed)
        stopped = StoppedState(furthest.held, furthest.name, shards)
        self._stopped = self._stopped.with_stop(stopped)

    def ends(self, worker: SimulatedWorker) -> None:
        """Record the end of a worker that still has its state.

        Nodes that complete no replica are stopped and healed in another slice. The only holder of a
        shard may end before that is done.
        """
        stopped = self._stopped
        if (
            self._cluster.script.span < 2
            or not stopped.step
            or not _can_reach(worker, stopped.step)
        ):
            return
        left = {
            mesh.shard(other)
            for group in self._cluster.groups
            for other in group.workers.values()
            if other is not worker and other.alive and _can_reach(other, stopped.step)
        }
        self._stopped = stopped.without_holder(mesh.shard(worker), left)

    def _is_incomplete(self) -> bool:
        """Whether some shard of the furthest state is lost, so that its rest is of no use."""
        span = self._cluster.script.span
        left = [w for group in self._cluster.groups for w in group.workers.values()]
        whole = [w for w in left if w.committed is not None and self._must_be_in(w)]
        furthest = max((w.held for w in whole), default=0)
        held = {mesh.shard(w) for w in whole if _can_reach(w, furthest)}
        return span > 1 and len(held) < span * max((w.group.size for w in left), default=0)

    def _is_kept(self, worker: SimulatedWorker) -> None:
        """Check that steps of a leaving node are held by others, or saved."""
        world, steps = worker.world, worker.committed or 0
        if world is None or not world.all_are("parked") or not worker.group.drained:
            return
        held = any(self._must_be_in(w) and w.held >= steps for w in world.workers.values())
        self._require(
            held or self._cluster.saved_step >= steps,
            f"{worker.name} leaves with step {steps}, and only {self._cluster.saved_step} is saved",
        )

    def exits(self) -> None:
        """Record that a worker has made all its steps."""
        self._ended = True

    @property
    def is_strict(self) -> bool:
        """Whether the only faults so far were deaths of processes and hosts."""
        return not self._cluster.torn

    def _must_be_in(self, worker: SimulatedWorker) -> bool:
        node = self._cluster.nodes[worker.group.host]
        return (
            worker.alive
            and worker.able
            and not worker.gave_way
            and node.alive
            and not node.signalled
            and worker.group.phase == "running"
        )

    def _ordered(self, world: Gathering, members: Sequence[SimulatedWorker]) -> None:
        """Check that survivors of one world keep their order, before joining workers."""
        known = [
            w.last for w in members if w.last is not None and not self._gave_up(w, world.fence)
        ]
        newest = max((fence for fence, _ in known), default=None)
        ranks = [rank for fence, rank in known if fence == newest]
        self._require(ranks == sorted(ranks), f"{world.fence}: survivors have the order {ranks}")
        # A worker with a place in a world that never began counts as a survivor for a coordinator
        # that knows of it. A displaced one without a place in the last world does not.
        placed = [self._had_place(w, world.fence) for w in members]
        survives = [p and w.committed is not None for p, w in zip(placed, members, strict=True)]
        # An endpoint without memory knows only the worlds that workers report.
        reported = not self._cluster.store_backed and members[0].last is not None
        self._require(
            placed[0] or reported or not any(survives), f"{world.fence}: rank 0 is a joiner"
        )
        for host in {w.group.host for w in members}:
            here = [i for i, w in enumerate(members) if w.group.host == host]
            first = next((i for i in here if not placed[i]), len(members))
            self._require(
                not any(survives[i] for i in here if i > first),
                f"{world.fence}: a joiner of {host} is before survivors",
            )

    def _had_place(self, worker: SimulatedWorker, fence: Fence) -> bool:
        """Whether the world before the one of `fence` had a place for this worker, or for another.

        A coordinator may not know of a worker's end yet as it decides, and so place its successor.
        """
        return _is_among(worker, self._recorded.members_before(fence))

    def _gave_up(self, worker: SimulatedWorker, fence: Fence) -> bool:
        """Whether a world between the last that it began in and `fence` had no place for it."""
        assert worker.last is not None
        between = self._recorded.between(worker.last[0], fence)
        return not all(_is_among(worker, members) for members in between)

    def _forget(self, base: int) -> None:
        """Forget the steps after `base`: they are made again."""
        self._made = {step: world for step, world in self._made.items() if step <= base}
        if base < self._stopped.step:
            self._stopped = replace(self._stopped, step=base)


def _can_reach(worker: SimulatedWorker, step: int) -> bool:
    """Whether the worker has the state of `step`, or all that it takes to apply that step."""
    return worker.held + (worker.ready or worker.stage == "applying") >= step


def _is_among(worker: SimulatedWorker, members: Sequence[WorldMember]) -> bool:
    return any(
        member.node_id == worker.group.host
        and (not member.workers or worker.local_rank in member.workers)
        for member in members
    )
