"""The coordinator's clock stands still while its process does."""

from __future__ import annotations

import pytest

from elastane.coordinator import clock
from elastane.coordinator.clock import READ_S, STEP_MAX_S, SteadyClock


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Time:
    real = Time()
    monkeypatch.setattr(clock, "time", real)
    return real


def test_a_clock_that_is_read_often_runs_like_real_time(real: Time) -> None:
    steady = SteadyClock()
    for _ in range(10):
        real.now_s += READ_S
        assert steady.read_s() == real.now_s


def test_a_stop_of_the_process_counts_for_no_more_than_a_step(real: Time) -> None:
    steady = SteadyClock()
    real.now_s += 60.0
    assert steady.read_s() == 100.0 + STEP_MAX_S
    real.now_s += READ_S
    assert steady.read_s() == 100.0 + STEP_MAX_S + READ_S


def test_a_reading_that_is_late_by_a_little_loses_no_time() -> None:
    assert READ_S < STEP_MAX_S
