"""Finds the worker for which the workers of one or several nodes wait.

Each agent reports what its own workers show once they make no progress. When all members of the
world have reported, `protocol.culprits` compares the workers. A worker is ended only where the wait
never ends by itself; then its failure is like any other. Workers that recover in place are not
ended for a mismatch: their world ends at once, as after a stall. Every other standstill is only
reported, and left to the timeout of the script's own process group, since a worker that computes
or loads data may be busy with something that takes minutes.
"""

from __future__ import annotations

from elastane.coordinator.rules.incident import Blame
from elastane.coordinator.rules.state import State
from elastane.protocol.culprits import STACKS_MAX, judge
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import EndWorker, ShowStacks
from elastane.protocol.verdicts import Verdict, culprit_data

# Stacks that are read if no worker is behind: two that wait show where.
_WAITING_SHOWN = 2


def find_culprit(state: State) -> None:
    """Compare the workers of all nodes, once none makes progress and a new report is here."""
    assert state.world is not None
    standstill = state.incidents.standstill
    if not standstill.is_to_be_compared(state.now_s):
        if standstill.again_s is not None:
            state.queue.wait_until(standstill.again_s)
        return
    members = [*state.roster.members()]
    if len(state.roster.at_standstill) < len(state.world.members):
        still_s = state.now_s - standstill.since_s
        if standstill.reports.end(still_s):
            reason = f"the workers make progress again, after {still_s:.1f} s"
            state.log(EventKind.CULPRIT_ENDED, reason, still_s=round(still_s, 1))
        standstill.compared(state.now_s)
        return
    if standstill.is_new:
        since_s = state.now_s - min(node.progress.still_s for node in members)
        standstill.compared(since_s)
    still_s = state.now_s - standstill.since_s
    evidence = [each for node in members for each in node.progress.evidence]
    verdict = judge(evidence, state.world.world_size)
    if verdict is None:
        return
    is_due = verdict.is_mismatch or not any(node.progress.is_early for node in members)
    if not is_due or not standstill.reports.is_new(verdict, still_s):
        later_s = standstill.since_s + standstill.reports.due_after_s(verdict)
        if later_s > state.now_s:
            standstill.compare_again(later_s)
            state.queue.wait_until(later_s)
        return
    state.log(EventKind.CULPRIT, verdict.sentence, **culprit_data(verdict, still_s))
    if verdict.is_mismatch and state.in_place.active:
        standstill.blame(Blame(verdict.sentence, verdict.worker))
    else:
        _ask_agents(state, verdict)


def _ask_agents(state: State, verdict: Verdict) -> None:
    """Let agents end workers that would wait for ever, which shows stacks, or show some stacks."""
    assert state.world is not None
    fence = state.world.fence
    shown = verdict.ranks[:STACKS_MAX] or tuple(range(_WAITING_SHOWN))
    for node in state.roster.members():
        for rank in verdict.ends:
            state.queue.send(node, EndWorker(fence=fence, rank=rank, reason=verdict.sentence))
        if not verdict.ends:
            state.queue.send(node, ShowStacks(fence=fence, ranks=shown))
