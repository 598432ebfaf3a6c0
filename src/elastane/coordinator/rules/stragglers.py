"""Logs which ranks make the others wait in each step, when that is over, and all step times.

Heartbeats carry the step times of each worker; `protocol.stragglers` compares them, as soon as all
workers of the world have made new ones. A straggler is only reported.
"""

from __future__ import annotations

from elastane.coordinator.rules.state import State
from elastane.protocol.log_events import EventKind
from elastane.protocol.stragglers import Pace, Straggler, listed_parts


def find_stragglers(state: State) -> None:
    """Compare the workers of the world, at most once for each time of a heartbeat."""
    assert state.world is not None
    watch = state.stragglers
    if not watch.is_due(state.now_s, state.world.fence, state.spec.timing.heartbeat_s):
        return
    members = [*state.roster.members()]
    paces = {pace.rank: pace for node in members for pace in node.progress.paces}
    nodes = {pace.rank: node.id for node in members for pace in node.progress.paces}
    begun, ended = watch.rules.look(paces, state.world.world_size)
    for found in begun:
        node_id = nodes[found.rank]
        state.log(EventKind.STRAGGLER, found.sentence(node_id), node_id, **_data(found))
    for found in ended:
        node_id = nodes[found.rank]
        text = f"rank {found.rank} on node {node_id} is as fast as the others again"
        state.log(EventKind.STRAGGLER_ENDED, text, node_id, rank=found.rank)
    if 1 < len(paces) == state.world.world_size:
        _log_step_times(state, paces, nodes, is_news=bool(begun or ended))


def _log_step_times(
    state: State, paces: dict[int, Pace], nodes: dict[int, str], *, is_news: bool
) -> None:
    """Log how long each worker's own part of a step takes, at intervals.

    `is_news`: a rank has become slow or usual, so that the last line is no longer true.
    """
    steps = min(pace.step for pace in paces.values())
    if not state.stragglers.is_to_log(state.now_s, steps, is_news=is_news):
        return
    listed = listed_parts(paces)
    data: dict[str, str | int | float | bool] = {
        "own_ms": listed.own_ms,
        "median_ms": listed.median_ms,
        "workers": len(paces),
    }
    if len(listed.ranks) < len(paces):
        data["ranks"] = ",".join(map(str, listed.ranks))
        data["nodes"] = " ".join(nodes[rank] for rank in listed.ranks)
    words = f"a worker's own part of a step takes {listed.median_ms:.3g} ms in the median"
    state.log(EventKind.STEP_TIMES, words, **data)


def _data(found: Straggler) -> dict[str, str | int | float | bool]:
    return {
        "rank": found.rank,
        "why": found.why.value,
        "own_s": round(found.own_s, 4),
        "others_s": round(found.others_s, 4),
    }
