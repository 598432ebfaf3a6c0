"""Simulated training of plain scripts: worker groups that step only while the whole world is there.

A world makes a step when every member's group computes and all hosts reach each other. Groups call
should_checkpoint() once a step, after it. A dead worker makes some peers fail and others hang, as
with gloo.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from elastane.protocol.culprits import (
    STANDSTILL_FACTOR,
    STANDSTILL_MOVES_FIRST,
    ProcessFacts,
    StandstillEvidence,
)
from elastane.protocol.events import (
    GroupDrained,
    GroupGone,
    GroupMarked,
    GroupStandstill,
    GroupStarted,
    WorkerFailed,
    WorkerSucceeded,
)
from elastane.protocol.limits import Timing
from elastane.protocol.model import UNUSED, CheckpointUse, Failure, PortOffer
from simulation.checks import Checks
from simulation.clock import VirtualClock
from simulation.runs import LocalGroup, SimulatedRun
from simulation.script import HasHosts, Script, StoppedProcesses

# The process group's own timeout, from the last step.
_COLLECTIVE_TIMEOUT_S = 60.0
# How often an incomplete step checks whether it now can complete.
STALL_S = 0.5
_CHECKPOINT_S = 0.1
_TIMED_OUT = "RuntimeError: Timed out waiting 60000ms for recv operation"
BAD_SAMPLE = (
    'Traceback (most recent call last):\n  File "train.py", line 8, in main\nValueError: bad'
)
_NOT_CONNECTED = (
    "RuntimeError: Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection"
    " timed out, remote=[{}]:41$2"
)


class Training:
    """All runs of a job, and what is saved of them."""

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
        self._runs: dict[tuple[str, int], SimulatedRun] = {}
        self._last: SimulatedRun | None = None
        # The address of one of these hosts that a host does not reach; empty if it reaches all.
        self.address_apart: Callable[[str, Sequence[str]], str] = lambda host, hosts: ""
        self.saved_step = 0
        self.slow_start_s = 0.0

    def start(self, group: LocalGroup) -> None:
        """Fork the workers; they compute once they have imported and met."""
        fence, nodes = group.fence, group.assignment.nodes
        # They meet at the store of this address, and accept any worker that comes there.
        place = (group.assignment.master_addr, group.assignment.master_port)
        run = self._runs.get(place)
        if run is None:
            self._must_have_saved()
            run = self._last = self._runs[place] = SimulatedRun(fence, nodes, self.saved_step)
        self._checks.meets(run, group)
        group.run = run
        run.groups[group.assignment.node_rank] = group
        pids = tuple(range(100, 100 + group.size))
        self._clock.after(0.002, lambda: group.feed(GroupStarted(fence, pids)))
        delay_s = 0.05 + self._rng.random() * 0.4 + self.slow_start_s
        self._clock.after(delay_s, lambda: self._compute(run, group))

    def _must_have_saved(self) -> None:
        """Check that a drain with all workers leaves at most the step after it to redo."""
        last = self._last
        if last is None or not all(g.saved and g.target for g in last.groups.values()):
            return
        redone = last.base + last.steps - self.saved_step
        assert redone <= 1, f"{redone} steps were lost in the drain of {last.fence}"

    def crash(self, group: LocalGroup, local_rank: int, exit_code: int = -9) -> None:
        """Let one worker die by itself."""
        if group.phase not in ("starting", "computing", "broken"):
            return
        self._checks.died(group.fence)
        self._fail(group, local_rank, exit_code, "")
        self._peers_notice(group)

    def vanish(self, group: LocalGroup) -> None:
        """Let all workers of a node die at once, without a report."""
        was_computing, group.phase = group.computes, "gone"
        if was_computing:
            self._peers_notice(group)

    def stop(self, group: LocalGroup, grace_s: float, new_offer: Callable[[], PortOffer]) -> None:
        """SIGTERM, and SIGKILL after the grace; a shorter one may follow."""
        if group.phase == "gone":
            return
        if group.end is not None:
            group.end.cancel()
        is_dead = group.phase == "done" or group.killed
        lives_s = 0.0 if is_dead else min(grace_s, self.script.trap_s)
        if group.phase == "computing" and not self.script.trap_s:
            group.phase = "broken"
        group.end = self._clock.after(lives_s + 0.01, lambda: self._gone(group, new_offer))

    def kill(self, group: LocalGroup) -> list[int]:
        """SIGKILL to all workers of a node that live; returns which those were."""
        if group.phase in ("done", "gone"):
            return []
        was_computing, group.phase, group.killed = group.computes, "broken", True
        if was_computing:
            self._peers_notice(group)
        ended = sorted({*range(group.size)} - group.failed)
        group.failed.update(ended)
        return ended

    def mark(self, group: LocalGroup, drain: int) -> None:
        """Gate the workers and count their calls."""
        group.gated, group.drain = True, drain
        calls = group.calls if self.script.asks and group.calls else None
        self._clock.after(0.003, lambda: group.feed(GroupMarked(group.fence, drain, calls)))

    def aim(self, group: LocalGroup, calls: int | None) -> None:
        """Let should_checkpoint() be true at call `calls`."""
        run = group.run
        assert run is not None
        if group.saved or group.phase in ("done", "broken", "gone") or calls is None:
            if calls is None and self.script.leaves_on_sigterm and group.computes:
                self._clock.after(_CHECKPOINT_S, lambda: self._leave(run, group))
            done = GroupDrained(group.fence, group.drain, stops=True)
            self._clock.after(_CHECKPOINT_S, lambda: group.feed(done))
            return
        group.target = run.target = calls
        self._go_on(run)

    def _compute(self, run: SimulatedRun, group: LocalGroup) -> None:
        held_up = group.host in self._still.zygotes
        if group.phase == "starting" and (
            held_up or group.assignment.master_addr in self._still.stores
        ):
            self._clock.after(STALL_S, lambda: self._compute(run, group))
        elif group.phase == "starting":
            group.phase, group.moved_s = "computing", self._clock.now_s
            self._go_on(run)
            self._watch(group)

    def _watch(self, group: LocalGroup) -> None:
        """Let a collective that does not end fail after its timeout, unless it was not begun."""
        if not group.computes:
            return
        due_s = group.moved_s + _COLLECTIVE_TIMEOUT_S
        if self._clock.now_s >= due_s and not group.gated:
            run = group.run
            assert run is not None
            apart = self.address_apart(group.host, run.hosts) if not run.steps else ""
            # A connection that is not made fails long before the waits of those that have theirs.
            if run.steps or apart or not self._is_apart(run):
                self._checks.died(group.fence)
                self._fail(group, 0, 1, _NOT_CONNECTED.format(apart) if apart else _TIMED_OUT)
                return
        delay_s = max(1.0, due_s - self._clock.now_s)
        self._clock.after(delay_s, lambda: self._watch(group))

    def _is_apart(self, run: SimulatedRun) -> bool:
        """Whether some hosts of a world do not reach each other."""
        return any(self.address_apart(host, run.hosts) for host in run.hosts)

    def _go_on(self, run: SimulatedRun) -> None:
        if run.is_whole and not run.busy and not self._waits(run):
            run.busy = True
            self._clock.after(self.script.step_s, lambda: self._step(run))

    def _waits(self, run: SimulatedRun) -> bool:
        """Whether some group is still in its last call of should_checkpoint()."""
        return any(g.calls < run.steps for g in run.groups.values())

    def _step(self, run: SimulatedRun) -> None:
        run.busy = False
        if not run.is_whole:
            return
        if self._fails(run):
            return
        if not self._can_step(run):
            self._report_standstill(run)
            run.busy = True
            self._clock.after(STALL_S, lambda: self._step(run))
            return
        run.steps += 1
        for group in run.groups.values():
            group.moved_s = self._clock.now_s
            self._report(group, still_s=0.0)
        self._checks.stepped(run.fence)
        done = run.base + run.steps
        if done % self.script.checkpoint_every == 0 and not self._still.snapshot_servers & {
            *run.hosts
        }:
            self.saved_step, run.wrote = max(self.saved_step, done), True
        if done >= self.script.steps:
            self._finish(run)
            return
        for group in run.groups.values():
            delay_s = self._rng.random() * 0.2 * self.script.step_s
            self._clock.after(delay_s, lambda g=group: self._call(run, g))  # type: ignore[misc]

    def _fails(self, run: SimulatedRun) -> bool:
        """Let a worker raise an error if this is the step at which the script fails."""
        script, crashes = self.script, self._checks.crashes
        if crashes.is_over or run.base + run.steps + 1 != script.fails_at:
            return False
        if crashes.may_pass:
            crashes.passed()
            return False
        self._checks.script_failed(run.fence, run.base)
        first = run.groups[min(run.groups)]
        self._fail(first, 0, 1, BAD_SAMPLE, error_file="error.json")
        self._peers_notice(first)
        return True

    def _report_standstill(self, run: SimulatedRun) -> None:
        """Let agents report that workers make no collective, if some hosts do not reach others.

        Simplified: all of them are in the same collective, so no worker is to blame.
        """
        limit_s = max(Timing().hang_floor_s, STANDSTILL_FACTOR * self.script.step_s)
        if run.steps < STANDSTILL_MOVES_FIRST or not self._is_apart(run):
            return
        for group in run.groups.values():
            still_s = self._clock.now_s - group.moved_s
            if still_s >= limit_s:
                self._report(group, still_s)

    def _report(self, group: LocalGroup, still_s: float) -> None:
        """Report that workers have made no collective for so long; 0: they make some again."""
        if group.is_still == (still_s > 0):
            return
        group.is_still = still_s > 0
        first = group.assignment.rank_base
        evidence = tuple(
            StandstillEvidence(
                rank=first + i, node_id=group.host, local_rank=i, pid=100 + i, facts=ProcessFacts()
            )
            for i in range(group.size if group.is_still else 0)
        )
        group.feed(GroupStandstill(group.fence, group.fence, evidence, still_s))

    def _call(self, run: SimulatedRun, group: LocalGroup) -> None:
        """Play one should_checkpoint(); a gated one blocks until its target is known."""
        if not group.computes or group.calls >= run.steps:
            return
        is_overdue = self.script.asks and self._still.is_overdue(group.host)
        if is_overdue or (group.gated and group.target is None):
            self._clock.after(0.05, lambda: self._call(run, group))
            return
        if group.target is not None and group.calls >= group.target:
            return  # Parked for good.
        group.calls += 1
        if group.calls == group.target:
            self._clock.after(_CHECKPOINT_S, lambda: self._saved(run, group))
        self._go_on(run)

    def _saved(self, run: SimulatedRun, group: LocalGroup) -> None:
        if group.phase == "gone":
            return
        group.saved = True
        if all(g.saved for g in run.groups.values()) and group.target is not None:
            self.saved_step, run.wrote = max(self.saved_step, run.base + group.target), True
        group.feed(GroupDrained(group.fence, group.drain, stops=True))

    def _finish(self, run: SimulatedRun) -> None:
        self.saved_step = max(self.saved_step, self.script.steps)
        for group in run.groups.values():
            group.phase = "done"
            for rank in range(group.size):
                delay_s = self._rng.random() * 0.05
                event = WorkerSucceeded(group.fence, rank)
                self._clock.after(delay_s, lambda g=group, e=event: g.feed(e))  # type: ignore[misc]

    def _leave(self, run: SimulatedRun, group: LocalGroup) -> None:
        if not group.computes:
            return
        group.phase = "done"
        self.saved_step, run.wrote = max(self.saved_step, run.base + run.steps), True
        for rank in range(group.size):
            group.feed(WorkerSucceeded(group.fence, rank))
        self._peers_notice(group)

    def _fail(
        self,
        group: LocalGroup,
        local_rank: int,
        exit_code: int,
        message: str,
        *,
        error_file: str = "",
    ) -> None:
        if local_rank in group.failed:
            return
        group.failed.add(local_rank)
        group.phase = "broken"
        failure = Failure(
            local_rank=local_rank,
            rank=group.assignment.rank_base + local_rank,
            pid=100 + local_rank,
            exit_code=exit_code,
            message=message,
            error_file=error_file,
            steps=group.run.steps if group.run is not None else 0,
        )
        group.feed(WorkerFailed(group.fence, failure, self._clock.now_s))

    def _peers_notice(self, lost: LocalGroup) -> None:
        """Let neighbours in the ring fail within some tens of milliseconds; others hang."""
        run = lost.run
        assert run is not None
        for group in run.groups.values():
            if group is not lost and group.computes and self._rng.random() < 0.5:
                delay_s = 0.04 + self._rng.random() * 0.02
                self._clock.after(delay_s, lambda g=group: self._lose(g))  # type: ignore[misc]

    def _lose(self, group: LocalGroup) -> None:
        if group.computes:
            self._fail(group, 0, 1, "RuntimeError: Connection closed by peer [10.0.0.1]")

    def _gone(self, group: LocalGroup, new_offer: Callable[[], PortOffer]) -> None:
        if group.phase == "gone":
            return
        was_computing, group.phase = group.computes, "gone"
        if was_computing:
            self._peers_notice(group)
        group.feed(GroupGone(group.fence, new_offer(), _use(group.run)))


def _use(run: SimulatedRun | None) -> CheckpointUse:
    """Return what the workers of a run did with checkpoints."""
    return UNUSED if run is None else CheckpointUse(read=run.base > 0, written=run.wrote)
