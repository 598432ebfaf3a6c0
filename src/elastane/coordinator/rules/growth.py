"""Growth of a shrink-only world: all workers restart at a checkpoint, with those that waited.

No worker can join such a world in place. Places of lost workers and nodes that arrived wait until
the script has written a checkpoint, since a restart at any other time repeats the steps after the
last one. A worker reports the checkpoint; `machine` asks whether a restart is due. The workers are
then brought to one boundary of steps by a drain, so that none of them is killed while it writes. If
some do not reach it in time, the drain is called off, and the next checkpoint is another chance. If
a fault follows soon after a growth, the next one waits for twice as long: the new worker may be
unable to train.

A script that does not resume from its checkpoint loses all its work at a restart. So a job does not
grow if its script has no reason to resume: the number of nodes is fixed, and no restart is allowed.
Nor does it grow once its script has failed to resume: it wrote a checkpoint, all workers started
again, and the worker that wrote the next one had read none.
"""

from __future__ import annotations

from elastane.coordinator.rules import next_world, sizing
from elastane.coordinator.rules.changes import PlannedGrowth
from elastane.coordinator.rules.nodes import named
from elastane.coordinator.rules.state import State
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.log_events import EventKind
from elastane.protocol.model import Joining

# Capacity that has waited for this long without a checkpoint is worth one message.
QUIET_S = 600.0
# A growth has failed if a fault follows within this. New workers import and build their model
# first, which takes tens of seconds.
LASTS_S = 60.0
# After failed growths the pause doubles from at least the first, and is bounded by the second: a
# broken node then costs a restart of all workers an hour.
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 3600.0
# No exponent is larger, so that no float overflows.
_DOUBLINGS_MAX = 16


def record_checkpoint(state: State, where: str, *, resumed: bool) -> None:
    """Record that the script has written a whole checkpoint in the current world.

    `resumed`: the worker that wrote it has read one since it was started.
    """
    where = where[-REASON_CHARS_MAX:]
    if state.growth.note_checkpoint(where, state.now_s, resumed=resumed):
        state.log(
            EventKind.NOT_RESUMED,
            f"the script wrote {where} and had read no checkpoint since all workers started again:"
            " it started from the beginning, and its earlier work is lost. The world does not grow"
            " any more. Let the script resume from its newest checkpoint when it starts",
            checkpoint=where,
        )


def growth_due(state: State) -> PlannedGrowth | None:
    """Return the growth for which all workers restart now; None: there is none, or not yet."""
    if state.worlds.shrunk_from:
        return None  # The workers have not agreed to continue: they may all restart now.
    growth = state.growth
    checkpoint = growth.pop_checkpoint()
    workers, nodes = _waiting(state)
    if not workers:
        growth.forget_waiting()
        return None
    _explain_waiting(state, workers, nodes)
    goes_on = all(node.survivors and node.session for node in state.roster.members())
    is_ready = _may_restart(state) and goes_on and state.now_s >= _earliest_s(state)
    if checkpoint is None or not is_ready:
        return None
    return PlannedGrowth(checkpoint, workers, nodes, growth.waits_since_s or state.now_s)


def record_fault(state: State) -> None:
    """Record an unplanned incident, by which the growth before it may have failed."""
    if not state.incidents.is_planned:
        state.growth.note_fault(state.now_s, LASTS_S)


def describe(planned: PlannedGrowth, now_s: float) -> str:
    """Return why all workers restart, in words."""
    return (
        f"checkpoint {planned.checkpoint} is written: all workers restart, with"
        f" {_more_workers(planned.workers)} on {planned.nodes} that waited for"
        f" {now_s - planned.since_s:.1f} s"
    )


def log_growth(state: State, planned: PlannedGrowth) -> None:
    """Log that all workers restart, which uses no restart of the budget."""
    state.growth.note_growth()
    state.log(
        EventKind.GROWTH,
        describe(planned, state.now_s),
        checkpoint=planned.checkpoint,
        workers=planned.workers,
        nodes=planned.nodes,
        waited_s=round(state.now_s - planned.since_s, 3),
    )


def _may_restart(state: State) -> bool:
    """Whether the script has to expect that it starts again, as under torchrun, and resumes."""
    expects = state.spec.is_elastic or state.owner.resized or state.budget.allowed > 0
    return expects and not state.growth.does_not_resume


def _waiting(state: State) -> tuple[int, str]:
    """Return how many workers a restart would add to the world, and on which nodes."""
    if not (state.in_place.active and next_world.joining(state) is Joining.NEVER):
        return 0, ""
    assert state.world is not None
    staying = [node for node in state.roster.members() if not node.leaving]
    others = [state.roster.nodes[i] for i in sorted(state.roster.nodes) if _may_come(state, i)]
    found = [*staying, *others][: sizing.most_nodes(state)]
    size = sum(node.spec.local_world_size for node in found)
    added = [n for n in found if not (n.is_member and n.has_all_in_world)]
    return max(0, size - state.world.world_size), named([node.id for node in added])


def _may_come(state: State, node_id: str) -> bool:
    node = state.roster.nodes[node_id]
    away = node.is_member or node.leaving or node.is_left_out or node.session is None
    return not away and node_id not in state.roster.unready


def _explain_waiting(state: State, workers: int, nodes: str) -> None:
    """Log what waits whenever that is new, and once that no checkpoint comes."""
    growth = state.growth
    if growth.note_waiting(workers, nodes, state.now_s):
        reason = f"{_more_workers(workers)} could run on {nodes}: {_when_they_start(state)}"
        state.log(EventKind.WAITING, reason, workers=workers, trains=True)
    since_s = growth.quiet_since_s
    if since_s is None or not _may_restart(state):
        return
    if state.now_s < since_s + QUIET_S:
        state.queue.wait_until(since_s + QUIET_S)
        return
    growth.note_explained()
    reason = (
        f"no checkpoint of the script was seen for {QUIET_S:g} s, so the world does not grow;"
        " docs/unmodified-reference.md says which ones are seen"
    )
    state.log(EventKind.WAITING, reason, workers=workers, trains=True)


def _when_they_start(state: State) -> str:
    if state.growth.does_not_resume:
        return "the others train on without them, since the script does not resume"
    if not _may_restart(state):
        return (
            "the others train on without them, since no restart is allowed; if the script resumes"
            " from its checkpoints, add --max-restarts N"
        )
    rest_s = _earliest_s(state) - state.now_s
    later = f", in {rest_s:.0f} s at the earliest" if rest_s > 0 else ""
    return f"all workers restart with them at the next checkpoint of the script{later}"


def _earliest_s(state: State) -> float:
    interval_s, failed = state.spec.timing.growth_interval_s, state.growth.failed
    if failed:
        longer_s = doubled(max(interval_s, PAUSE_FIRST_S), failed)
        interval_s = max(interval_s, min(longer_s, PAUSE_MAX_S))
    return state.growth.started_s + interval_s


def doubled(base_s: float, times: int) -> float:
    """Return a duration, doubled `times` times within a bound."""
    doubled_s: float = base_s * 2.0 ** min(times, _DOUBLINGS_MAX)
    return doubled_s


def _more_workers(count: int) -> str:
    return f"{count} more worker" + "s" * (count > 1)
