"""Scripts that raise an error at one step: those that do in each attempt end their job.

`python -m simulation --fails` replays a seed; its line in kept_seeds.txt has the same option.
"""

import os
from itertools import count

import pytest
from played_histories import all_hold, played

from elastane.coordinator.rules.incident import RestartBudget
from elastane.protocol.model import Crash
from simulation import History, HistoryFailedError, run_seed, setup_of

SEEDS = 100
SOAK_SEEDS = int(os.environ.get("ELASTANE_SOAK_SEEDS", "500000")) // 5
MODES = pytest.mark.parametrize("store_backed", [True, False], ids=["store", "endpoint"])


def test_without_a_store_only_attempts_that_fail_alike_end_the_job():
    all_hold(range(SEEDS), [False], kind="fails")


def test_histories_hold_and_meet_jobs_that_end_and_jobs_that_go_on():
    ended = again = went_on = 0
    for seed in range(SEEDS):
        history, result = played(setup_of(seed, store_backed=True, kind="fails"))
        ended += "in the same way" in result.ended
        again += "in the same way" in result.ended and result.restarts_used > 2
        went_on += history.setting.script.fails_times > 0 and not result.ended
    assert ended > 20 and again > 5 and went_on > 20, (ended, again, went_on)


def test_in_place_the_third_world_that_fails_at_one_step_ends_the_job(monkeypatch):
    def play():
        ended = went_on = 0
        for seed in range(SEEDS // 2):
            setting = setup_of(seed, store_backed=True, in_place=True, kind="fails")
            result = History(setting).run()
            ended += "in the same way" in result.ended
            went_on += setting.script.fails_times > 0 and not result.ended
        return ended, went_on

    ended, went_on = play()
    assert ended > 5 and went_on > 5, (ended, went_on)
    monkeypatch.setattr(Crash, "repeats", lambda self, last: None)
    with pytest.raises(HistoryFailedError, match="which should have ended the job"):
        play()


def test_in_place_failures_that_are_reported_in_a_later_world_and_do_not_count_are_found(
    monkeypatch,
):
    monkeypatch.setattr(RestartBudget, "last_met", 1 << 40)
    with pytest.raises(HistoryFailedError, match="which should have ended the job"):
        for seed in range(SEEDS):
            run_seed(seed, store_backed=True, in_place=True, kind="fails")


def test_where_others_join_at_boundaries_attempts_that_fail_alike_end_the_job(monkeypatch):
    def play():
        ended = 0
        for seed in range(SEEDS // 2):
            setting = setup_of(seed, store_backed=True, kind="planned-fails")
            ended += "in the same way" in History(setting).run().ended
        return ended

    assert play() > 5
    monkeypatch.setattr(Crash, "repeats", lambda self, last: None)
    with pytest.raises(HistoryFailedError, match="which should have ended the job"):
        play()


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@MODES
def test_repeated_crashes_hold_in_a_hundred_thousand_histories(store_backed):
    jobs = len(os.sched_getaffinity(0))
    all_hold(range(SEEDS, SEEDS + SOAK_SEEDS), [store_backed], jobs, kind="fails")


def first_failure(seeds=100):
    for seed in range(seeds):
        try:
            run_seed(seed, store_backed=True, kind="fails")
        except HistoryFailedError as fault:
            return str(fault)
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_failures_at_one_step_that_are_not_counted_are_found(monkeypatch):
    monkeypatch.setattr(Crash, "repeats", lambda self, last: None)
    assert "which should have ended the job" in first_failure()


def test_a_new_coordinator_that_forgets_the_failures_is_found(monkeypatch):
    original = RestartBudget.of.__func__

    def of(cls, allowed, record):
        budget = original(cls, allowed, record)
        budget.crash, budget.crashes = None, 0
        return budget

    monkeypatch.setattr(RestartBudget, "of", classmethod(of))
    assert "which should have ended the job" in first_failure(1000)


def test_failures_at_other_steps_that_count_as_the_same_are_found(monkeypatch):
    monkeypatch.setattr(Crash, "repeats", lambda self, last: last and self)
    assert "did not fail alike" in first_failure(300)


def test_a_job_that_ends_at_its_second_failure_is_found(monkeypatch):
    numbers = count()

    def count_crash(self, crash):
        self.crash, self.crashes = crash, 3 * (crash is not None and next(numbers) > 0)

    monkeypatch.setattr(RestartBudget, "_count_crash", count_crash)
    assert "did not fail alike" in first_failure()
