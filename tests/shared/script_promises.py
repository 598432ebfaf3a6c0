"""What a job of an unmodified script promises, as checks of what its workers noted. Pure.

The script makes each step of the same samples, dealt to the ranks of the world in which its workers
started (tests/process/scripts/script_steps.py). With `--in-place` the world shrinks beneath it: a
step is then the mean over the workers that contributed, among them all that continue.
`check_script` computes each step again from the replayed state before it, with each set of workers
that may have contributed. All else is checked as by `job_promises`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from job_promises import (
    Body,
    BrokenJobError,
    FenceOf,
    Promised,
    SeenJob,
    check_charges,
    check_end,
    check_events,
    check_one_side,
    check_places,
    check_processes,
    check_saves,
    check_surviving_history,
    counts,
)

# Replayed sums have another order.
NEAR = 1e-9
# A state: weights and momentum.
State = tuple[tuple[float, ...], tuple[float, ...]]
# (state, step, contributing ranks, size) -> state after the step
Replay = Callable[[State, int, Sequence[int], int], State]


@dataclass(frozen=True)
class ScriptBody(Body):
    """A step of an unmodified script.

    `fence`, `rank` and `size` are those with which its process started. `weights`: after the step.
    """

    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class ScriptPromised:
    """What a script's history allows, and how its steps are computed again.

    `shrinks`: lost workers leave a world to the others. `first`: digest and state before step 0.
    """

    bounds: Promised
    shrinks: bool
    first: tuple[str, State]
    replay: Replay


def check_script(seen: SeenJob, promised: ScriptPromised) -> dict[str, int]:
    """Check all that a job of an unmodified script promises, and return how much was seen."""
    worlds: dict[FenceOf, list[ScriptBody]] = defaultdict(list)
    for body in seen.bodies:
        assert isinstance(body, ScriptBody)
        worlds[body.fence].append(body)
    for members in worlds.values():
        check_places(members, promised.bounds)
    # A worker that was lost may begin another step before it is ended, and never commits it.
    check_one_side([body for body in seen.bodies if body.committed_s is not None])
    check_processes(seen.bodies)
    check_surviving_history(seen.bodies)
    check_saves(seen)
    check_events(seen)
    check_charges(seen, promised.bounds)
    check_end(seen)
    shrunk = check_states(worlds, promised)
    return counts(seen) | {"steps of shrunk worlds": shrunk}


def check_states(worlds: dict[FenceOf, list[ScriptBody]], promised: ScriptPromised) -> int:
    """Check the state after each step of each world; return how many steps a shrunk one made."""
    digest, state = promised.first
    known: dict[int, dict[str, State]] = defaultdict(dict)
    known[0][digest] = state
    shrunk = 0
    for fence in sorted(worlds):
        steps: dict[int, list[ScriptBody]] = defaultdict(list)
        for body in worlds[fence]:
            steps[body.step].append(body)
        before = _begin(steps, known)
        for step in sorted(steps):
            is_whole = len(steps[step]) == steps[step][0].size
            if not _committed(steps[step]):
                break
            if not is_whole and not promised.shrinks:
                ranks = sorted(body.rank for body in steps[step])
                raise BrokenJobError(
                    f"ranks {ranks} alone made a committed step:\n  {steps[step][0]}"
                )
            shrunk += not is_whole
            before = _check_step(steps, step, before, known, promised)
    return shrunk


def _committed(bodies: Iterable[ScriptBody]) -> list[ScriptBody]:
    return [body for body in bodies if body.committed_s is not None]


def _begin(steps: dict[int, list[ScriptBody]], known: dict[int, dict[str, State]]) -> State:
    """Return the state in which a world starts: one that an earlier world left at that step."""
    first = steps[min(steps)]
    started = {body.process: body for step in sorted(steps) for body in reversed(steps[step])}
    for process, body in started.items():
        own = min(step for step in steps for each in steps[step] if each.process == process)
        if own != min(steps):
            raise BrokenJobError(f"workers of one world start at different steps:\n  {body}")
    digests = {body.before for body in first}
    if len(digests) > 1 or not digests <= set(known[min(steps)]):
        states = "\n  ".join(f"{body.before} before {body}" for body in first)
        raise BrokenJobError(f"a world starts in a state that no world left:\n  {states}")
    return known[min(steps)][first[0].before]


def _check_step(
    steps: dict[int, list[ScriptBody]],
    step: int,
    before: State,
    known: dict[int, dict[str, State]],
    promised: ScriptPromised,
) -> State:
    """Check a committed step; return the state after it of the workers that continue."""
    committed = _committed(steps[step])
    later = {body.process for body in steps.get(step + 1, ())}
    continuing = [body for body in committed if body.process in later] or committed
    if left := later - {body.process for body in committed}:
        raise BrokenJobError(f"{left} skip the end of a step:\n  {committed[0]}")
    if len(_committed(steps.get(step + 1, ()))) and len(later) < promised.bounds.size_min:
        raise BrokenJobError(f"too few workers continue:\n  {committed[0]}")
    if len({body.after for body in continuing}) > 1 and later:
        said = "\n  ".join(f"{body.after} after {body}" for body in continuing)
        raise BrokenJobError(f"workers of one world have different states:\n  {said}")
    ranks = [body.rank for body in steps[step]]
    state = before
    for body in committed:
        least = continuing if body in continuing and later else [body]
        found = _replayed(body, before, [each.rank for each in least], ranks, promised)
        known[step + 1][body.after or ""] = found
        state = found if body in continuing else state
    return state


def _replayed(
    body: ScriptBody,
    before: State,
    certain: Sequence[int],
    possible: Sequence[int],
    promised: ScriptPromised,
) -> State:
    """Return the computed state after a step, of a set of workers that may have contributed."""
    others = sorted(set(possible) - set(certain))
    count = len(others) if promised.shrinks else 0
    base = list(certain) if promised.shrinks else list(possible)
    for more in itertools.chain.from_iterable(
        itertools.combinations(others, n) for n in range(count, -1, -1)
    ):
        found = promised.replay(before, body.step, sorted([*base, *more]), body.size)
        if all(
            math.isclose(one, other, rel_tol=NEAR, abs_tol=NEAR)
            for one, other in zip(found[0], body.weights, strict=True)
        ):
            return found
    raise BrokenJobError(
        f"no mean over ranks {list(certain)} and some of {others} makes these weights:\n  {body}\n"
        f"  {body.weights}"
    )
