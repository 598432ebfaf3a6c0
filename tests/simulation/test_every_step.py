"""Death at every step: the process that performs effects is killed between any two of them.

One script (a job forms, loses a worker, takes in a node, drains one, loses its coordinator's node
and ends) is played once to count the places; then once for each of them, with a death there, and
all that holds in a history must hold.
"""

import itertools
import random

import pytest
from deaths import die_at

from simulation.crash_points import EffectGap
from simulation.history import LIVENESS_S, stuck
from simulation.transcript import Play

SCRIPT = """
job nodes=2:4 restarts=3 steps=60 mode={mode}
boot n0 n1 n2
run 4
kill-worker n1
run 4
boot n3
run 6
drain n2
run 9
break n1
run 3
"""


def play(mode, dies_at=(), back_s=0.5):
    """Play the script, and kill at the given numbers of steps; return the steps passed."""
    play = Play()
    job, *commands = SCRIPT.format(mode=mode).split("\n")[1:-1]
    play.do(job)
    cluster = play.cluster
    passed = die_at(cluster, dies_at, back_s)
    for command in commands:
        if command.startswith("kill-worker") and cluster.nodes["n1"].group is None:
            continue
        play.do(command)
    play.do("run 30")
    if stuck(cluster):
        play.do(f"run {LIVENESS_S}")
    return cluster, [step for _, step in passed]


def holds(mode, dies_at, back_s=0.5):
    try:
        cluster, _ = play(mode, dies_at, back_s)
        story, broken = cluster.story, stuck(cluster)
    except Exception as fault:
        raise AssertionError(f"{mode}: deaths at steps {dies_at}: {fault!r}") from fault
    assert not broken, f"{story.text()}\n{mode}: deaths at steps {dies_at}: {broken}"


@pytest.mark.parametrize(
    ("mode", "first", "stride"),
    [
        ("store", 0, 8),
        ("endpoint", 3, 8),
        pytest.param("store", 0, 1, marks=pytest.mark.soak),
        pytest.param("endpoint", 0, 1, marks=pytest.mark.soak),
    ],
)
def test_a_death_at_any_step_of_a_job_is_survived(mode, first, stride):
    _, passed = play(mode)
    assert len(passed) > 100
    for number in range(first, len(passed), stride):
        holds(mode, {number}, back_s=(0.05, 0.5, 4.0)[number % 3])


@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_every_named_place_is_met(mode):
    _, passed = play(mode)
    assert {*passed} == {*EffectGap} - {EffectGap.NONE, EffectGap.BEFORE_HANGUP}


@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_two_and_three_deaths_at_any_steps_are_survived(mode):
    rng, (_, passed) = random.Random(4), play(mode)
    for count in (2, 3):
        for _ in range(30):
            holds(mode, {*rng.sample(range(len(passed)), count)}, rng.choice((0.05, 0.5, 4.0)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_every_pair_of_deaths_is_survived(mode):
    _, passed = play(mode)
    for pair in itertools.combinations(range(0, len(passed), 2), 2):
        holds(mode, {*pair})
