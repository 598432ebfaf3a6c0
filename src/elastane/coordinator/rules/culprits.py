"""Finds the worker for which workers of several nodes wait.

Each agent reports what its own workers show once they make no progress. When all members of the
world have reported, `protocol.culprits` compares the workers. A worker is ended only where the wait
never ends by itself; then its failure is like any other.
"""

from __future__ import annotations

from elastane.coordinator.rules.state import State
from elastane.protocol.culprits import judge
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import EndWorker
from elastane.protocol.verdicts import culprit_data


def find_culprit(state: State) -> None:
    """Compare the workers of all nodes, once none makes progress and a new report is here."""
    assert state.world is not None
    standstill = state.incidents.standstill
    if not standstill.is_new:
        return
    members = [*state.roster.members()]
    if len(state.roster.at_standstill) < len(state.world.members):
        standstill.reports.end(state.now_s - standstill.since_s)
        standstill.compared(state.now_s)
        return
    still_s = min(node.progress.still_s for node in members)
    standstill.compared(state.now_s - still_s)
    evidence = [each for node in members for each in node.progress.evidence]
    verdict = judge(evidence, state.world.world_size)
    if verdict is None or not standstill.reports.is_new(verdict, still_s):
        return
    culprits = (each.node_id for each in evidence if each.rank in verdict.ranks[:1])
    data = {**culprit_data(verdict, still_s), "culprit_node": next(culprits, "")}
    state.log(EventKind.CULPRIT, verdict.sentence, **data)
    for node in members:
        for rank in verdict.ends:
            end = EndWorker(fence=state.world.fence, rank=rank, reason=verdict.sentence)
            state.queue.send(node, end)
