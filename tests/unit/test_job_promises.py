"""The checks of job histories find each broken promise, and pass a right history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from job_promises import (
    Body,
    BrokenJobError,
    DurableState,
    ExactStep,
    Promised,
    SeenJob,
    SettledWorld,
    check_job,
)

STEPS = 12
EXACT = [
    ExactStep(tuple(range(6 * step, 6 * step + 6)), f"d{step}", f"d{step + 1}")
    for step in range(STEPS)
]
PROMISED = Promised(size_min=2, size_max=3, harmed_workers=1, steps=EXACT)
# Fence, members in the order of their ranks, and the steps that their world made.
WORLDS = [
    ((1, 0), ("a.10.1", "b.10.2", "c.10.3"), range(6)),
    ((2, 0), ("b.10.2", "c.10.3"), range(5, 9)),
    ((3, 0), ("b.10.2", "c.10.3", "a.11.4"), range(9, STEPS)),
]


def body_of(fence: tuple[int, int], members: tuple[str, ...], rank: int, step: int) -> Body:
    samples = EXACT[step].samples[rank :: len(members)]
    begun_s = 100.0 * fence[0] + step
    return Body(
        process=members[rank],
        node=members[rank][0],
        fence=fence,
        rank=rank,
        size=len(members),
        step=step,
        samples=samples,
        before=f"d{step}",
        begun_s=begun_s,
        after=f"d{step + 1}",
        committed_s=begun_s + 0.5,
    )


def good() -> SeenJob:
    """Return a history in which a is killed after its commit of step 5, before b and c know it."""
    bodies = [
        body_of(fence, members, rank, step)
        for fence, members, steps in WORLDS
        for rank in range(len(members))
        for step in steps
    ]
    bodies = [
        replace(body, after=None, committed_s=None)
        if body.fence == (1, 0) and body.step == 5 and body.node != "a"
        else body
        for body in bodies
    ]
    return SeenJob(
        bodies=bodies,
        worlds=[
            SettledWorld(fence, tuple(m[0] for m in members), len(members), 100.0 * fence[0])
            for fence, members, _ in WORLDS
        ],
        saves=[DurableState(4, 104.0, 105.0), DurableState(8, 208.0, 209.0)],
        started=frozenset({("a", 10), ("b", 10), ("c", 10), ("a", 11)}),
        charged=1,
        codes=[("a", 0), ("b", 0), ("c", 0)],
        is_ok=True,
    )


def but(chosen: Callable[[Body], bool], **values: object) -> SeenJob:
    """The good history with other values in the chosen bodies."""
    seen = good()
    assert any(map(chosen, seen.bodies))
    bodies = [replace(b, **values) if chosen(b) else b for b in seen.bodies]
    return replace(seen, bodies=bodies)


def without(chosen: Callable[[Body], bool]) -> SeenJob:
    seen = good()
    return replace(seen, bodies=[body for body in seen.bodies if not chosen(body)])


def at(fence: int, step: int, node: str = "") -> Callable[[Body], bool]:
    return lambda body: (
        body.fence[0] == fence and body.step == step and (not node or body.node == node)
    )


def test_a_history_without_a_broken_promise_passes():
    counts = check_job(good(), PROMISED)
    assert counts["worlds"] == 3 and counts["steps"] == STEPS and counts["processes"] == 4
    assert counts["bodies without commit"] == 2


def test_workers_that_restart_make_steps_again_but_none_that_was_durable_before():
    seen = without(lambda body: body.fence == (3, 0))
    again = [
        body_of((3, 0), ("b.20.5", "c.20.6"), rank, step)
        for rank in range(2)
        for step in range(6, STEPS)
    ]
    seen = replace(seen, bodies=[*seen.bodies, *again])
    seen = replace(seen, started=seen.started | {("b", 20), ("c", 20)})
    seen = replace(seen, worlds=[*seen.worlds[:2], SettledWorld((3, 0), ("b", "c"), 2, 300.0)])
    late = DurableState(8, 208.0, 301.0)
    check_job(replace(seen, saves=[good().saves[0], late]), PROMISED)
    with pytest.raises(BrokenJobError, match="begins with an earlier step than a checkpoint"):
        check_job(seen, PROMISED)


def test_a_commit_that_a_member_hears_of_late_is_no_second_world():
    check_job(but(at(1, 4, "c"), committed_s=250.0), PROMISED)


STALE = replace(body_of((1, 0), WORLDS[0][1], 1, 11), after=None, committed_s=None)

PLANTED = {
    "two workers have one rank": (
        but(lambda body: body.process == "c.10.3" and body.fence == (2, 0), rank=0),
        "two places in one world",
    ),
    "two workers think the world has another size": (
        but(at(1, 3, "c"), size=2, rank=1),
        "two places in one world",
    ),
    "a rank is as large as its world": (
        but(lambda body: body.process == "c.10.3" and body.fence == (2, 0), rank=2),
        "outside of its world",
    ),
    "a minority trains on": (
        but(lambda body: body.fence == (2, 0), size=1),
        "a world of 1 workers, not 2 to 3",
    ),
    "a world trains without one of its members": (
        without(at(2, 7, "c")),
        r"ranks \[0\] alone made",
    ),
    "a replica has other weights": (but(at(3, 10, "c"), after="odd"), "wrong weights after"),
    "a newcomer did not get the state": (but(at(3, 9, "a"), before="d0"), "wrong weights before"),
    "a sample is lost": (
        but(at(1, 2, "b"), samples=EXACT[2].samples[1::3][:1]),
        r"samples \[16\] are lacking and \[\]",
    ),
    "a sample is used twice": (
        but(at(1, 2, "b"), samples=(*EXACT[2].samples[1::3], 12)),
        r"samples \[\] are lacking and \[12\]",
    ),
    "a world trains on beside the next one": (
        but(at(1, 4), begun_s=210.0, committed_s=210.5),
        "two worlds train at the same time",
    ),
    "a worker goes back to an older world": (
        replace(good(), bodies=[*good().bodies, STALE]),
        "a worker went back",
    ),
    "a survivor makes a step again": (
        but(at(1, 5), after="d6", committed_s=106.0),
        "a worker went back",
    ),
    "a step is made by nobody": (without(at(2, 6)), r"steps \[6\] of 12"),
    "a world begins after the last step": (
        without(lambda body: body.fence == (2, 0)),
        r"steps \[6, 7, 8\] of 12",
    ),
    "a checkpoint is ahead of all workers": (
        replace(good(), saves=[DurableState(8, 207.0, 209.0)]),
        "not committed before",
    ),
    "nobody trains": (without(lambda body: True), "no step was committed"),
    "a round has two memberships": (
        replace(good(), worlds=[*good().worlds, SettledWorld((1, 1), ("a", "b"), 2, 150.0)]),
        "two memberships in one round",
    ),
    "a fence has two worlds": (
        replace(good(), worlds=[*good().worlds, SettledWorld((1, 0), ("b", "a", "c"), 3, 150.0)]),
        "one fence of two worlds",
    ),
    "the log does not tell of a world": (
        replace(good(), worlds=good().worlds[1:]),
        "does not tell of its world",
    ),
    "the log has another membership": (
        replace(
            good(), worlds=[SettledWorld((1, 0), ("a", "b", "d"), 3, 100.0), *good().worlds[1:]]
        ),
        "not of its world",
    ),
    "the log does not tell of a worker": (
        replace(good(), started=good().started - {("a", 11)}),
        "does not tell of its start",
    ),
    "a fault of a host is charged": (replace(good(), charged=2), "2 restarts were charged, and 1"),
    "the job ends badly": (replace(good(), is_ok=False), "no good end"),
    "an agent fails": (replace(good(), codes=[("a", 0), ("b", 1)]), "agents ended with"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_history_is_found(planted: str):
    seen, words = PLANTED[planted]
    with pytest.raises(BrokenJobError, match=words):
        check_job(seen, PROMISED)
