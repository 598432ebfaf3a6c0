"""Simulated workers that recover in place: each process acts alone, as in the library.

They meet at the store of their world and compare what they have committed. The furthest state wins;
the others receive it, which takes time. Workers that start together load the checkpoint. Those that
join load none, and end if no member holds the state. All reduce a step at once, and each applies it
at its own moment, so an interrupt finds some of them one step ahead. A dead peer makes some fail
and others hang.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from elastane.comms.state_plan import MemberStatus, decide
from elastane.protocol.events import (
    GroupAble,
    GroupGone,
    GroupStarted,
    GroupWroteCheckpoint,
    WorkerFailed,
    WorkerLost,
    WorkerSucceeded,
)
from elastane.protocol.hangs import HANG_LOOK_S
from elastane.protocol.model import NO_SLICE, Assignment, CheckpointUse, Failure, Fence, Joining
from simulation.checks import Checks
from simulation.clock import VirtualClock
from simulation.drains import Drains
from simulation.mesh import Mesh
from simulation.places import (
    TAKES_PART,
    WAITS_FOR_PEERS,
    Gathering,
    InPlaceGroup,
    SimulatedWorker,
    left_out,
    short_of,
)
from simulation.script import HasHosts, Script, StoppedProcesses
from simulation.workers import BAD_SAMPLE, STALL_S

# How long workers wait for all members of their world, and for one collective.
MEETING_TIMEOUT_S = 15.0
COLLECTIVE_TIMEOUT_S = 30.0
_WATCH_S = 5.0
_STATE_LOST = "JobError: no worker of this world holds the state of the job [job-state-lost]"
_NO_HOLDER = (
    "elastane: all workers restart: no worker is left that holds the state of the job"
    " [job-state-lost]"
)
_RANK_0_LOST = "elastane: all workers restart: the worker of rank 0 is lost [in-place-restart]"
_CLOSED = "Connection closed by peer [10.0.0.1]"
_NOT_CONNECTED = (
    "lost a peer: Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection timed"
    " out, remote=[{}]:41$2 [group-not-built]"
)
# The longest that an unmodified script takes to write a checkpoint.
_SAVE_S = 1.0
# How long it evaluates a model, if it does: longer than a drain may take.
EVALUATION_S = 8.0
# How long members compare what they hold, before the first of them gives its state.
_COMPARE_S = 0.02
# The share of a step's time in which some have applied it and others have not.
_APPLY_SHARE = 0.3


class InPlaceTraining:
    """All workers of a job that recover in place, and what is saved of them."""

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        script: Script,
        can_step: Callable[[HasHosts], bool],
        checks: Checks,
        still: StoppedProcesses,
    ) -> None:
        self._clock, self._rng, self.script = clock, rng, script
        self._can_step, self._checks, self._still = can_step, checks, still
        self._mesh = Mesh(script.span, clock, rng, self._tell_able)
        self._worlds: dict[tuple[str, int, Fence], Gathering] = {}
        # The address of one of these hosts that a host does not reach; empty if it reaches all.
        self.address_apart: Callable[[str, Sequence[str]], str] = lambda host, hosts: ""
        self._pids = 1000
        self.groups: list[InPlaceGroup] = []
        self.saved_step = 0
        self.drains = Drains(clock, None if script.is_unmodified else self._save)
        self.slow_start_s = 0.0
        self.mismatches, self._mismatch_until_s = 0, 0.0
        self._lose_holders: Callable[[list[SimulatedWorker]], None] | None = None
        self._lose_until_s = 0.0

    # What the shell of an agent does.

    def start(self, group: InPlaceGroup) -> None:
        """Fork all workers of a node; those without a place prepare for a later one."""
        self.groups = [g for g in self.groups if g.phase != "gone"] + [group]
        ranks = tuple(range(group.size))
        for local_rank in ranks:
            self._fork(group, local_rank, group.assignment)
        pids = tuple(w.pid for w in group.workers.values())
        self._clock.after(0.002, lambda: group.feed(GroupStarted(group.start_fence, pids)))

    def start_workers(self, group: InPlaceGroup, ranks: tuple[int, ...], delay_s: float) -> None:
        """Fork replacements of workers that have ended."""

        def fork() -> None:
            if group.phase != "running":
                return
            for local_rank in ranks:
                self._checks.states.forks(group.workers[local_rank])
                self._fork(group, local_rank, None)

        self._clock.after(delay_s, fork)

    def interrupt(self, group: InPlaceGroup) -> None:
        """Interrupt the current step of all workers of a node.

        One that is not able yet is still building its first group, which fails.
        """
        group.minding.world_ended()
        for worker in [*group.inside()]:
            if worker.able:
                self._break_off(worker)
            else:
                self._clock.after(0.003, lambda w=worker, at=worker.world: self._lose(w, at))  # type: ignore[misc]

    def regroup(self, group: InPlaceGroup, assignment: Assignment, able: tuple[int, ...]) -> None:
        """Give `able` their place in another world."""
        self.interrupt(group)
        group.assignment, group.crashed = assignment, False
        group.offer = group.new_offer()  # The last offer's port is known to others now.
        group.gated, group.target, group.aimed_s = False, None, None
        group.stops = group.drained = False
        for place, local_rank in enumerate(assignment.workers or range(group.size)):
            worker, rank = group.workers[local_rank], assignment.rank_base + place
            self._checks.states.given(worker)
            if not worker.able or local_rank not in able:
                continue
            worker.places += 1
            delay_s = 0.001 + self._rng.random() * 0.02
            self._clock.after(
                delay_s,
                lambda w=worker, r=rank: self._enter(w, assignment, r),  # type: ignore[misc]
            )
        self._clock.after(0.002, lambda: self._tell_able(group))

    def crash(self, group: InPlaceGroup, local_rank: int, exit_code: int = -9) -> None:
        """Let one worker die by itself."""
        worker = group.workers.get(local_rank)
        if worker is not None and worker.alive and group.phase != "gone":
            self._die(worker, exit_code, "")

    def vanish(self, group: InPlaceGroup) -> None:
        """Let all workers of a node die at once, without a report."""
        group.phase = "gone"
        for worker in [w for w in group.workers.values() if w.alive]:
            self._end(worker, "dead")

    def kill(self, group: InPlaceGroup) -> list[int]:
        """SIGKILL to all workers of a node that live; returns which those were."""
        ended = [i for i, worker in group.workers.items() if worker.alive]
        group.crashed = True
        for local_rank in ended:
            self._end(group.workers[local_rank], "dead")
        return ended

    def stop(self, group: InPlaceGroup, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after the grace; a shorter one may follow."""
        if group.phase == "gone":
            return
        is_parked = self.script.is_unmodified and group.stops and group.drained
        is_parked = is_parked and group.target is not None
        if is_parked:
            self._checks.growth.stops(group)
        self._checks.states.stops(group)
        group.phase = "stopping"
        lives_s = min(grace_s, self.script.trap_s) if any(group.inside()) else 0.0
        lives_s = 0.0 if is_parked else lives_s
        if not lives_s:
            self.interrupt(group)
        self._clock.after(lives_s + 0.01, lambda: self._gone(group))

    def release(self, group: InPlaceGroup) -> None:
        """Let the workers of a node continue: the drain was called off."""
        self._checks.released(group)
        for worker in self.drains.release(group):
            worker.stage = "boundary"
            if worker.world is not None:
                self._call(worker, worker.world)

    def short_of(self, able: Mapping[str, int], most: int) -> str:
        """Return which nodes could have more workers in the newest world."""
        return short_of(self._worlds.values(), able, most)

    def left_out(self, *, paid: bool) -> str:
        """Return which workers wait for a place in the newest world, as `places.left_out` does."""
        return left_out(self._worlds.values(), self.groups, paid=paid)

    # Processes.

    def _fork(self, group: InPlaceGroup, local_rank: int, first: Assignment | None) -> None:
        self._pids += 1
        worker = SimulatedWorker(group, local_rank, self._pids)
        if self.script.is_unmodified:
            worker.joins = Joining.NEVER
        group.workers[local_rank] = worker
        delay_s = 0.05 + self._rng.random() * 0.4 + self.slow_start_s
        self._clock.after(delay_s, lambda: self._imported(worker, first))

    def _imported(self, worker: SimulatedWorker, first: Assignment | None) -> None:
        if worker.stage != "starting":
            return
        if worker.group.host in self._still.zygotes:
            self._clock.after(STALL_S, lambda: self._imported(worker, first))
            return
        worker.stage = "waiting"
        worker.joined = first is None or first.waiting
        worker.restored = 0 if worker.joined else self.saved_step
        if first is None or first.waiting:
            if self.script.planned:  # It waits at its loader.
                worker.joins = Joining.PLANNED
            self._declare(worker)
        else:
            worker.places = 1
            self._enter(worker, first, first.rank_base + worker.local_rank)

    def _declare(self, worker: SimulatedWorker) -> None:
        """Report that the worker can enter another world from now on."""
        if not worker.able:
            worker.able, worker.able_s = True, self._clock.now_s
            delay_s = 0.001 + self._rng.random() * 0.01
            self._clock.after(delay_s, lambda: self._tell_able(worker.group))

    def _tell_able(self, group: InPlaceGroup) -> None:
        if group.phase == "running":
            sharding = self._mesh.said(group)
            known = [w.joins for w in group.workers.values() if w.alive and w.able]
            group.joining = min(known, default=group.joining)
            group.feed(
                GroupAble(group.start_fence, group.able, group.offer, sharding, group.joining)
            )

    def _die(
        self,
        worker: SimulatedWorker,
        exit_code: int,
        message: str,
        *,
        by_itself: bool = True,
        error_file: str = "",
        lives_s: float = 0.0,
    ) -> None:
        """End a worker with an error; not `by_itself`: an earlier loss is the cause.

        `lives_s`: how long its process lives on without connections, before its agent sees its end.
        """
        group = worker.group
        if by_itself:
            self._checks.died(group.fence)
        rank = max(0, worker.rank)
        failure = Failure(
            local_rank=worker.local_rank,
            rank=rank,
            pid=worker.pid,
            exit_code=exit_code,
            message=message,
            error_file=error_file,
            steps=worker.held,
            met=worker.met,
        )
        group.crashed = True
        self._end(worker, "dead")
        if not lives_s:
            group.feed(WorkerFailed(group.start_fence, failure, self._clock.now_s))
            return
        self._checks.budget.is_ending(worker.pid)
        self._clock.after(lives_s, lambda: self._report_end(group, failure))

    def _report_end(self, group: InPlaceGroup, failure: Failure) -> None:
        if group.phase == "running":
            self._checks.budget.has_ended(failure.pid)
            group.feed(WorkerFailed(group.start_fence, failure, self._clock.now_s))

    def _end(self, worker: SimulatedWorker, stage: str) -> None:
        """End the process; some of those that wait for it notice."""
        self._checks.states.ends(worker)
        world, worker.world, worker.stage = worker.world, None, stage
        worker.committed, worker.able = None, False
        if not any(each.alive for each in worker.group.workers.values()):
            worker.group.part = NO_SLICE
        worker.group.lacks = worker.group.lacks or (worker.sole and stage == "dead")
        self.drains.mind(worker.group)
        if world is None:
            return
        self.drains.mind_all(world)
        for peer in world.workers.values():
            waits = peer.world is world and peer.stage in WAITS_FOR_PEERS
            if waits and self._rng.random() < 0.5:
                delay_s = 0.04 + self._rng.random() * 0.02
                self._clock.after(delay_s, lambda p=peer: self._lose(p, world))  # type: ignore[misc]

    def _lose(self, worker: SimulatedWorker, world: Gathering, text: str = _CLOSED) -> None:
        """Let a collective of the worker fail."""
        if worker.world is not world or worker.stage not in WAITS_FOR_PEERS:
            return
        if not worker.able:
            self._die(worker, 1, f"RuntimeError: {text}")
            return
        self._break_off(worker)
        worker.group.feed(WorkerLost(worker.group.start_fence, world.fence, text))

    def _break_off(self, worker: SimulatedWorker) -> None:
        """Let the worker leave its world; it no longer applies an unfinished step."""
        world = worker.world
        if worker.stage == "applying" and world is not None:
            worker.ready = self._rng.random() >= 0.5
            if not worker.ready:
                self._apply(worker, world)
        self._checks.states.breaks_off(worker)
        worker.left = worker.stage if world is not None else worker.left
        worker.world, worker.stage = None, "waiting" if worker.alive else worker.stage
        self.drains.mind(worker.group)
        if world is not None:
            self.drains.mind_all(world)

    def _gone(self, group: InPlaceGroup) -> None:
        if group.phase == "gone":
            return
        group.phase = "gone"
        for worker in [w for w in group.workers.values() if w.alive]:
            self._end(worker, "dead")
        if group.use == CheckpointUse():
            self._checks.crashes.breaks_row()
        group.feed(GroupGone(group.start_fence, group.new_offer(), group.use))

    # Worlds.

    def _enter(self, worker: SimulatedWorker, assignment: Assignment, rank: int) -> None:
        if worker.group.assignment is not assignment or worker.stage != "waiting":
            return
        if worker.group.phase != "running":
            return
        place = (assignment.master_addr, assignment.master_port, assignment.fence)
        world = self._worlds.get(place)
        if world is None or world.is_abandoned:
            world = Gathering(assignment.fence, assignment.world_size, assignment.in_place)
            self._worlds[place] = world
        self._checks.states.enters(worker, world, rank)
        worker.world, worker.rank, worker.stage = world, rank, "meeting"
        worker.moved_s = self._clock.now_s
        worker.calls = worker.committed or 0  # It does not reach that boundary again.
        world.workers[rank] = worker
        self._watch(worker, world)
        self._meet(world)

    def _watch(self, worker: SimulatedWorker, world: Gathering) -> None:
        """Let a wait for peers that does not end fail after its timeout."""
        if worker.world is not world:
            return
        if world.mismatched:
            return  # The real timeout is half an hour: another world comes long before.
        limit_s = MEETING_TIMEOUT_S if worker.stage == "meeting" else COLLECTIVE_TIMEOUT_S
        if worker.stage in WAITS_FOR_PEERS and self._clock.now_s >= worker.moved_s + limit_s:
            apart = self.address_apart(worker.group.host, world.hosts)
            is_built = worker.stage != "meeting" or not apart
            self._lose(worker, world, _CLOSED if is_built else _NOT_CONNECTED.format(apart))
        else:
            self._clock.after(_WATCH_S, lambda: self._watch(worker, world))

    def _meet(self, world: Gathering) -> None:
        world.busy = False
        if not world.all_are("meeting"):
            return
        at = {w.group.assignment.master_addr for w in world.workers.values()}
        if not self._can_step(world) or at & self._still.stores:
            world.busy = True
            self._clock.after(STALL_S, lambda: self._meet(world))
            return
        members = [world.workers[rank] for rank in range(world.size)]
        if not self._mesh.assign(world, members):
            self._mesh.level_without_slices(members, world.fence)
            for worker in members:
                self._declare(worker)
                self._lose(worker, world, "no whole replicas")
            return
        base = self._agreed_step(world, members)
        if base is None:
            self._checks.crashes.breaks_row()
        if base is None or self._lacks_rank_0(world, members):
            self._end_all(world, members, is_lost=base is None)
            return
        world.base, world.began_s = base, self._clock.now_s
        if not world.in_place:
            self._checks.crashes.restarted(base, world.hosts)
            for worker in members if self.script.is_unmodified else ():
                worker.group.use = CheckpointUse(read=base > 0, written=False)
        self._checks.crashes.met(world.hosts)
        world.from_state = any(w.committed is not None for w in members)
        self._checks.states.begins(world, members)
        self._call_watcher(members)
        for worker in members:
            worker.moved_s = self._clock.now_s
            heals = worker.committed != base
            worker.torn = worker.torn or (heals and worker.committed is not None)
            worker.committed = None if heals else base  # A half overwritten state is no state.
            self._clock.after(_COMPARE_S, functools.partial(self._overwrite, worker, world))
            worker.last, worker.stage = (world.fence, worker.rank), "healing"
            heal_s = self._rng.random() * self.script.heal_s if heals else 0.0
            delay_s = _COMPARE_S + heal_s if heals else 0.001
            self._clock.after(
                delay_s,
                lambda w=worker: self._healed(w, world),  # type: ignore[misc]
            )

    def _end_all(
        self, world: Gathering, members: Sequence[SimulatedWorker], *, is_lost: bool
    ) -> None:
        """End members that cannot continue: their state `is_lost`, or rank 0 is."""
        budget = self._checks.budget
        (budget.lost_state if is_lost else budget.asked_restart)(world.fence)
        for worker in members:
            if not is_lost:
                self._die(worker, 75, _RANK_0_LOST, by_itself=False)
            elif self.script.planned:
                self._die(worker, 75, _NO_HOLDER, by_itself=False)
            else:
                # Without whole replicas a shard may be lost though no worker was.
                self._die(worker, 1, _STATE_LOST, by_itself=self.script.span > 0)

    def _lacks_rank_0(self, world: Gathering, members: Sequence[SimulatedWorker]) -> bool:
        """Whether the worker was lost without which the script would no longer save and log."""
        if not world.in_place:
            members[0].is_first = True
        is_new = all(worker.joined for worker in members)
        return self.script.keeps_rank and not is_new and not any(w.is_first for w in members)

    def _overwrite(self, worker: SimulatedWorker, world: Gathering) -> None:
        """Let a member begin to receive the state of another, which overwrites its own."""
        receives = worker.world is world and worker.stage == "healing" and world.from_state
        if receives and worker.committed is None and self._mesh.can_give(world, worker):
            worker.torn, worker.restored = True, 0

    def _agreed_step(self, world: Gathering, members: Sequence[SimulatedWorker]) -> int | None:
        """Return the step that the members continue from; None: they hold no whole state.

        As in the library: a worker that starts with all others loads the newest checkpoint. A
        worker that joins loads none, because a member gives it the state. Simplified: shards that
        no member has held yet are loaded by those that join, too.
        """
        known = [w.committed for w in members if w.committed is not None]
        if self.script.is_unmodified:
            is_lost = self.script.planned and world.in_place and not known
            return None if is_lost else max(known, default=self.saved_step)
        if not self.script.span:
            healing = decide([_status(worker) for worker in members])
            return healing.committed if healing is not None else None
        base = max(known, default=self.saved_step)
        self._mesh.advance(members, base)
        if not known and any(worker.begins_apart for worker in members):
            return None
        return None if known and self._mesh.is_lost(members, base) else base

    def _healed(self, worker: SimulatedWorker, world: Gathering) -> None:
        if worker.world is not world or worker.stage != "healing":
            return
        if worker.committed is None and not self._mesh.can_give(world, worker):
            return  # Its donor is gone; it hangs until it is interrupted.
        if world.is_uneven:
            worker.committed, worker.torn, worker.restored = world.base, False, 0
            self._mesh.level(world)
            return
        worker.committed = worker.calls = world.base
        worker.torn, worker.restored = False, 0
        worker.stage, worker.begun, worker.moved_s = "boundary", True, self._clock.now_s
        worker.met = world.fence.round
        was, worker.sole = worker.sole, len(world.hosts) == self.script.span
        if worker.able and (worker.sole != was or self.script.span > 1):
            self._tell_able(worker.group)
        self._declare(worker)
        self._call(worker, world)

    def _go_on(self, world: Gathering) -> None:
        if world.all_are("computing") and not world.busy:
            world.busy = True
            for worker in world.workers.values():
                worker.ready = False
            self._clock.after(self.script.step_s, lambda: self._reduce(world))

    def _reduce(self, world: Gathering) -> None:
        """End the reduction of a step for all at once; each applies it at its own moment."""
        world.busy = False
        if not world.all_are("computing"):
            return
        if not self._can_step(world):
            world.busy = True
            self._clock.after(STALL_S, lambda: self._reduce(world))
            return
        if self.mismatches and self._clock.now_s < self._mismatch_until_s:
            self.mismatches -= 1
            world.mismatched = True
            self._mind(world)
            return
        if self._fails(world):
            return
        self._checks.states.steps(world)
        for worker in world.workers.values():
            worker.stage = "applying"
            self._clock.after(
                self._rng.random() * _APPLY_SHARE * self.script.step_s,
                lambda w=worker: self._applied(w, world),  # type: ignore[misc]
            )

    def _fails(self, world: Gathering) -> bool:
        """Let a worker raise an error if this is the step at which the script fails."""
        crashes, worker = self._checks.crashes, world.workers[self.script.fails_at % world.size]
        if crashes.is_over or worker.held + 1 != self.script.fails_at:
            return False
        if crashes.may_pass:
            crashes.passed()
            return False
        self._checks.script_failed_in_place(worker.group.fence)
        lives_s = self.script.ends_after_s
        self._die(worker, 1, BAD_SAMPLE, by_itself=False, error_file="error.json", lives_s=lives_s)
        return True

    def mismatch(self, worlds: int, until_s: float) -> None:
        """Let members of the next worlds that reduce call other collectives than their peers."""
        self.mismatches, self._mismatch_until_s = worlds, until_s

    def watch_holders(self, lose: Callable[[list[SimulatedWorker]], None], until_s: float) -> None:
        """Call `lose` once with the state holders, as a world begins in which others join."""
        self._lose_holders, self._lose_until_s = lose, until_s

    def _call_watcher(self, members: Sequence[SimulatedWorker]) -> None:
        holders = [worker for worker in members if worker.committed is not None]
        lose, is_joining = self._lose_holders, 0 < len(holders) < len(members)
        if lose is not None and is_joining and self._clock.now_s < self._lose_until_s:
            self._lose_holders = None
            lose(holders)

    def _mind(self, world: Gathering) -> None:
        """Let agents observe a world that stands still, until its workers have left it."""
        inside = [w for w in world.workers.values() if w.world is world]
        for group in {id(w.group): w.group for w in inside}.values():
            if group.phase == "running" and group.fence == world.fence:
                group.minding.look([w for w in inside if w.group is group], self._clock.now_s)
        if inside:
            self._clock.after(HANG_LOOK_S, lambda: self._mind(world))

    def _applied(self, worker: SimulatedWorker, world: Gathering) -> None:
        if worker.world is world and worker.stage == "applying":
            self._apply(worker, world)
            self._call(worker, world)

    def _apply(self, worker: SimulatedWorker, world: Gathering) -> None:
        assert worker.committed is not None
        worker.committed, worker.stage = worker.committed + 1, "boundary"
        worker.made += 1
        worker.moved_s = self._clock.now_s
        self._checks.states.commits(worker, world)
        is_due = worker.committed % self.script.checkpoint_every == 0
        if self.script.is_unmodified:
            worker.owes_save = worker.rank == 0 and is_due
            worker.owes_evaluation = worker.rank == 0 and self._evaluates_at(worker.committed)
            self._report(worker)
        elif worker.rank == 0 and is_due and not self._still.snapshot_servers & {*world.hosts}:
            self._save(worker.committed)

    def _call(self, worker: SimulatedWorker, world: Gathering) -> None:
        """Play one boundary; a gated worker waits there until the target is known."""
        group = worker.group
        if worker.world is not world or worker.stage != "boundary":
            return
        assert worker.committed is not None
        self._load(worker)
        if worker.owes_save:
            self._write(worker)
        if worker.owes_evaluation:
            self._evaluate(worker)
        if worker.is_busy:
            return
        if worker.committed >= self.script.steps:
            self._finish(world)
            return
        is_gated = group.gated and group.aimed_s is None
        if is_gated or self._still.is_overdue(group.host):
            self._clock.after(0.05, lambda: self._call(worker, world))
            return
        worker.calls = worker.committed
        if worker.calls == group.target:
            worker.stage = "parked"
            self.drains.mind(group)
            return
        worker.stage, worker.moved_s = "computing", self._clock.now_s
        self._go_on(world)

    def _load(self, worker: SimulatedWorker) -> None:
        """Let the script make its loader: from now on it has boundaries where workers join."""
        is_due = self.script.planned and worker.made >= self.script.loads_after
        if is_due and worker.joins is Joining.NEVER:
            worker.joins = Joining.PLANNED
            self._clock.after(0.001, lambda: self._tell_able(worker.group))

    def _save(self, steps: int) -> None:
        self.saved_step = max(self.saved_step, steps)

    def _write(self, worker: SimulatedWorker) -> None:
        """Let an unmodified script write a checkpoint, which takes its main thread a while."""
        assert worker.committed is not None
        step, worker.owes_save, group = worker.committed, False, worker.group

        def written() -> None:
            worker.reports = step
            group.use = msgspec.structs.replace(group.use, written=True)
            self._checks.growth.written(step)
            self._save(step)

        self._keep_busy(worker, 0.01 + self._rng.random() * _SAVE_S, written)

    def _evaluates_at(self, step: int) -> bool:
        """Whether the script evaluates after this step: the next one after every other save."""
        return self.script.evaluates and step % (2 * self.script.checkpoint_every) == 1

    def _evaluate(self, worker: SimulatedWorker) -> None:
        worker.owes_evaluation = False
        self._keep_busy(worker, EVALUATION_S, lambda: None)

    def _keep_busy(
        self, worker: SimulatedWorker, duration_s: float, done: Callable[[], None]
    ) -> None:
        """Let the main thread do something between two steps, if the process lives that long."""
        worker.is_busy = True

        def ends() -> None:
            if not worker.alive:
                return
            worker.is_busy = False
            done()
            if worker.world is not None:
                self._call(worker, worker.world)

        self._clock.after(duration_s, ends)

    def _report(self, worker: SimulatedWorker) -> None:
        """Report a checkpoint, since all workers have made another step by now."""
        step, worker.reports = worker.reports, None
        if step is not None:
            assert worker.committed is not None
            resumed = self.script.resumes and worker.made < worker.committed
            fence = worker.group.start_fence
            worker.group.feed(GroupWroteCheckpoint(fence, f"step-{step}", resumed))

    def _finish(self, world: Gathering) -> None:
        """After the last step each worker exits at its own moment, unless it is interrupted."""
        steps = self.script.steps
        if not all(w.world is world and w.committed == steps for w in world.workers.values()):
            return
        if not world.finished and len(world.workers) == world.size:
            world.finished = True
            self._save(steps)
            for worker in world.workers.values():
                delay_s = self._rng.random() * 0.05
                self._clock.after(delay_s, lambda w=worker: self._exit(w, world))  # type: ignore[misc]

    def _exit(self, worker: SimulatedWorker, world: Gathering) -> None:
        if worker.world is world and worker.stage in TAKES_PART:
            worker.world, worker.stage, worker.able = None, "done", False
            self._checks.states.exits()
            self._tell_able(worker.group)
            worker.group.feed(WorkerSucceeded(worker.group.start_fence, worker.local_rank))
            self.drains.mind(worker.group)


def _status(worker: SimulatedWorker) -> MemberStatus:
    """Return what the worker reports as a world begins."""
    return MemberStatus(
        worker.committed if worker.committed is not None else worker.restored,
        worker.committed is not None or worker.restored > 0,
        torn=worker.torn,
        came_later=worker.joined,
    )
