"""Jobs that recover in place: thousands of histories, and a death at every step of one.

`python -m simulation --in-place` replays a seed; its line in kept_seeds.txt has the same option.
"""

import os
import random

import pytest
from deaths import die_at
from played_histories import all_hold, played

from simulation import run_seed, setup_of
from simulation.crash_points import EffectGap
from simulation.history import IN_PLACE_S, LIVENESS_S, stuck
from simulation.transcript import Play

# The seeds below this draw every kind of fault.
HISTORIES = 140
# One of so many steps is played by every run of the tests, all of them by the soak.
STRIDE = 32
SOAK_SEEDS = int(os.environ.get("ELASTANE_SOAK_SEEDS", "500000"))
MODES = pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])

SCRIPT = """
job nodes=2:4 restarts=5 steps=60 recovers=in-place min-workers=3 mode={mode}
boot n0 n1 n2
run 5.2
kill-worker n1 0
run 4
boot n3
run 5
kill-worker n0 1
run 0.1
kill-worker n2 0
run 6
drain n2
run 6
break n1
run 3
"""


def test_no_step_is_lost_or_made_twice_in_any_history():
    """Without a store; the test that looks at what they meet plays the histories with one."""
    all_hold(range(HISTORIES), [False], in_place=True)


@MODES
def test_no_step_is_lost_with_whole_nodes(store_backed):
    all_hold(range(HISTORIES), [store_backed], in_place=True, span=1)


def test_no_step_is_lost_with_replicas_of_two_nodes():
    """Without a store; the test of uneven worlds below plays the histories with one."""
    all_hold(range(HISTORIES), [False], in_place=True, span=2)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@MODES
def test_no_step_is_lost_or_made_twice_in_a_million_histories(store_backed):
    first = HISTORIES
    jobs = len(os.sched_getaffinity(0))
    all_hold(range(first, first + SOAK_SEEDS), [store_backed], jobs, in_place=True)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("span", [1, 2, 3])
@MODES
def test_no_step_is_lost_with_sharded_state(store_backed, span):
    seeds = range(HISTORIES, HISTORIES + SOAK_SEEDS // 10)
    jobs = len(os.sched_getaffinity(0))
    all_hold(seeds, [store_backed], jobs, in_place=True, span=span)


def test_the_first_histories_hold_and_meet_what_they_are_meant_to_meet():
    regrouped = healed = restarts = ended = 0
    kinds = set()
    for seed in range(HISTORIES):
        history, result = played(setup_of(seed, store_backed=True, in_place=True))
        line = history.cluster.checks.states
        regrouped, healed = regrouped + line.regrouped, healed + line.healed
        restarts, ended = restarts + result.restarts_used, ended + ("succeeded" in result.ended)
        kinds |= {planned.kind for planned in history.setting.plan}
    assert regrouped > 100 and healed > 100, (regrouped, healed)
    assert restarts > 40 and ended > 20, (restarts, ended)
    assert len(kinds) == 42


def test_histories_of_replicas_over_nodes_meet_worlds_that_are_to_be_evened_out():
    uneven = 0
    for seed in range(HISTORIES):
        history, _ = played(setup_of(seed, store_backed=True, in_place=True, span=2))
        uneven += history.cluster.story.text().count("complete no replica and leave the world")
    assert uneven > 20, uneven


def test_histories_of_the_other_kind_are_not_changed_by_this_one():
    plain, in_place = (setup_of(5, store_backed=True, in_place=p) for p in (False, True))
    assert plain.plan != in_place.plan and not plain.script.in_place and in_place.script.in_place


def test_a_failing_seed_is_replayed_by_its_command(capsys, monkeypatch):
    from simulation.__main__ import main
    from simulation.state_checks import StateChecks

    monkeypatch.setattr(StateChecks, "forks", lambda self, before: self._require(False, "a fork"))
    assert main(["--seeds", "50", "--mode", "store", "--in-place"]) == 1
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("replay: python -m simulation ")
    assert "--in-place" in command
    assert main(command.split()) == 1
    assert "a fork" in capsys.readouterr().out


def one_job(mode, dies_at=(), back_s=0.5):
    """Play the script, and kill at the given numbers of steps; return the steps passed."""
    play = Play()
    job, *commands = SCRIPT.format(mode=mode).split("\n")[1:-1]
    play.do(job)
    cluster = play.cluster
    passed = die_at(cluster, dies_at, back_s)
    for command in commands:
        name = command.split()[1]
        if command.startswith("kill-worker") and cluster.nodes[name].in_place_group is None:
            continue
        play.do(command)
    play.do("run 60")
    if stuck(cluster):
        play.do(f"run {LIVENESS_S + IN_PLACE_S}")
    return cluster, [step for _, step in passed]


def survives(mode, dies_at, back_s):
    try:
        cluster, _ = one_job(mode, dies_at, back_s)
        broken = stuck(cluster)
    except Exception as fault:
        raise AssertionError(f"{mode}: deaths at steps {dies_at}: {fault!r}") from fault
    assert not broken, f"{cluster.story.text()}\n{mode}: deaths at steps {dies_at}: {broken}"


@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_a_death_at_any_step_of_a_recovery_in_place_is_survived(mode):
    _, passed = one_job(mode)
    assert len(passed) > 150 and {EffectGap.BEFORE_START, EffectGap.BEFORE_STOP} < {*passed}
    for number in range(STRIDE - 1 if mode == "store" else 7, len(passed), STRIDE):
        survives(mode, {number}, back_s=(0.05, 0.5, 4.0)[number % 3])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_a_death_at_each_step_of_a_recovery_in_place_is_survived(mode):
    _, passed = one_job(mode)
    for number in range(len(passed)):
        for back_s in (0.05, 0.5, 4.0):
            survives(mode, {number}, back_s)


@pytest.mark.parametrize("mode", ["store", "endpoint"])
def test_two_and_three_deaths_at_any_steps_of_it_are_survived(mode):
    rng, (_, passed) = random.Random(7), one_job(mode)
    for count in (2, 3):
        for _ in range(15):
            survives(mode, {*rng.sample(range(len(passed)), count)}, rng.choice((0.05, 0.5, 4.0)))


def narrowed(dies_at=-1, back_s=0.5):
    """Let the owner of a job take two of three nodes away; the third has the coordinator."""
    play = Play()
    play.do("job nodes=1:3 restarts=5 steps=60 recovers=in-place mode=store seed=2")
    cluster = play.cluster
    for command in ("boot n0", "run 4", "boot n1 n2", "run 12"):
        play.do(command)
    passed = die_at(cluster, {dies_at}, back_s)
    cluster.drained = True
    cluster.resize(1, 1)
    play.do("run 8")
    count = len(passed)
    play.do("run 60")
    if stuck(cluster):
        play.do(f"run {LIVENESS_S + IN_PLACE_S}")
    assert not stuck(cluster), f"{cluster.story.text()}\n a death at step {dies_at}"
    return cluster, [host for host, _ in passed[:count]]


def test_a_death_at_any_step_of_a_job_that_is_made_smaller_loses_no_step():
    """Also that of the only node that is left, and of its coordinator with it."""
    cluster, passed = narrowed()
    assert len(passed) > 100 and cluster.checks.settled > 2
    for number, host in enumerate(passed):
        if host == "n0":
            narrowed(number, back_s=(0.05, 4.0)[number % 2])


def test_an_undisturbed_job_of_it_loses_no_step_and_restarts_no_worker():
    cluster, _ = one_job("store")
    told = cluster.story.text()
    assert "workers-regrouped" in told and cluster.checks.states.healed >= 4
    assert "round 1 attempt 1" not in told
    assert cluster.checks.outcome.ok and cluster.checks.restarts_used == 3


def test_one_seed_is_one_history():
    first, second = (run_seed(7, store_backed=True, in_place=True) for _ in range(2))
    assert first == second
