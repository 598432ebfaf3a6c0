"""The checks of histories of unmodified scripts find each broken promise, and pass a right one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_promises import BrokenJobError, DurableState, Promised, SeenJob, SettledWorld
from script_promises import ScriptBody, ScriptPromised, State, check_script

sys.path.append(str(Path(__file__).parents[1] / "process" / "scripts"))
from script_steps import SIZE, digest, replayed

ZERO: State = ((0.0,) * SIZE, (0.0,) * SIZE)
PROMISED = ScriptPromised(
    bounds=Promised(size_min=2, size_max=3, harmed_workers=1, steps=()),
    shrinks=True,
    first=(digest(*ZERO), ZERO),
    replay=replayed,
)
# Fence, processes by rank, its first step, and who contributes to each step.
FIRST = ((1, 0), ("a.10.1", "b.10.2", "c.10.3"), 0, ["abc"] * 4 + ["ab"] * 4)
SECOND = ((2, 0), ("a.20.4", "b.20.5", "c.20.6"), 6, ["abc"] * 3)
Change = Callable[[ScriptBody], ScriptBody]


def bodies_of(world: tuple, states: dict[int, State]) -> list[ScriptBody]:
    """Return the bodies of a world, and record in `states` its state after each step."""
    fence, processes, first, steps = world
    found = []
    for step, nodes in enumerate(steps, first):
        before = states[step]
        ranks = ["abc".index(node) for node in nodes]
        states[step + 1] = replayed(before, step, ranks, len(processes))
        begun_s = 100.0 * fence[0] + step
        found += [
            ScriptBody(
                processes[rank], processes[rank][0], fence, rank, len(processes), step, (),
                digest(*before), begun_s, digest(*states[step + 1]), begun_s + 0.5,
                weights=states[step + 1][0],
            )
            for rank in ranks
        ]  # fmt: skip
    return found


def good(change: Change = lambda body: body) -> SeenJob:
    """Return a history in which c is lost, and all restart from the checkpoint of step 6."""
    states = {0: ZERO}
    bodies = [*bodies_of(FIRST, states), *bodies_of(SECOND, states)]
    # c has begun the step in which it is lost.
    lost = next(body for body in bodies if body.step == 3 and body.rank == 2)
    bodies.append(replace(lost, step=4, begun_s=104.0, after=None, committed_s=None, weights=()))
    started = {(body.node, int(body.process.split(".")[1])) for body in bodies}
    return SeenJob(
        bodies=[change(body) for body in bodies],
        worlds=[
            SettledWorld(fence, tuple("abc"), 3, 100.0 * fence[0]) for fence, *_ in (FIRST, SECOND)
        ],
        saves=[DurableState(6, 105.6, 105.7)],
        started=frozenset(started),
        charged=1,
        codes=[(node, 0) for node in "abc"],
        is_ok=True,
    )


def at(fence: int, number: int, nodes: str, **values: object) -> Change:
    """Return a change of the bodies of a step on some nodes."""

    def change(body: ScriptBody) -> ScriptBody:
        is_it = (body.fence[0], body.step) == (fence, number) and body.node in nodes
        return replace(body, **values) if is_it else body

    return change


def test_a_world_that_shrinks_and_restarts_at_a_checkpoint_passes():
    assert check_script(good(), PROMISED)["steps of shrunk worlds"] == 3


def test_without_in_place_no_step_is_made_without_a_rank():
    with pytest.raises(BrokenJobError, match=r"no mean over ranks|alone made"):
        check_script(good(), replace(PROMISED, shrinks=False))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at(2, 7, "b", rank=0), "two places in one world do not agree"),
        (at(1, 5, "b", after="other"), "workers of one world have different states"),
        (at(1, 5, "ab", weights=(1.0,) * SIZE), "makes these weights"),
        (at(2, 6, "abc", before="other"), "starts in a state that no world left"),
        (at(1, 6, "ab", begun_s=300.0), "two worlds train at the same time"),
        (at(1, 5, "a", committed_s=None), "skip the end of a step"),
        (at(1, 5, "a", step=4), "a worker went back"),
        (at(2, 6, "c", step=7), r"start at different steps|went back"),
    ],
)
def test_each_broken_promise_is_found(change: Change, words: str):
    with pytest.raises(BrokenJobError, match=words):
        check_script(good(change), PROMISED)


def test_a_step_of_too_few_workers_is_found():
    bounds = replace(PROMISED.bounds, size_min=3)
    with pytest.raises(BrokenJobError, match="too few workers continue"):
        check_script(good(), replace(PROMISED, bounds=bounds))


def test_a_world_that_starts_before_a_durable_checkpoint_is_found():
    late = DurableState(8, 107.6, 108.0)
    with pytest.raises(BrokenJobError, match="begins with an earlier step than a checkpoint"):
        check_script(replace(good(), saves=[late]), PROMISED)
