"""The save interval is Young's and Daly's, within bounds, and has a reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.checkpoint.schedule import (
    INTERVAL_MAX_S,
    INTERVAL_MIN_S,
    PRIOR_MTBF_S,
    interval,
    mtbf_s,
)


def waste(every_s, cost_s, mtbf):
    """The share of time that is lost if failures come at random (Daly, equation 13)."""
    segment = every_s + cost_s
    return mtbf * math.expm1(segment / mtbf) / every_s - 1


@pytest.mark.parametrize("cost_s, failures, lived_s", [(1.0, 9, 36000.0), (0.2, 30, 72000.0)])
def test_no_other_interval_wastes_less(cost_s, failures, lived_s):
    found, _ = interval(cost_s, failures, lived_s)
    mtbf = mtbf_s(lived_s, failures)
    best = min(range(10, 1800), key=lambda every_s: waste(every_s, cost_s, mtbf))
    assert waste(found, cost_s, mtbf) == pytest.approx(waste(best, cost_s, mtbf), rel=1e-3)


def test_before_anything_failed_a_job_is_taken_to_fail_once_a_day():
    assert mtbf_s(0.0, 0) == PRIOR_MTBF_S
    assert mtbf_s(9 * PRIOR_MTBF_S, 9) == PRIOR_MTBF_S
    assert mtbf_s(0.0, 3) < mtbf_s(0.0, 2)


@given(st.floats(0, 1e6), st.integers(0, 10**6), st.floats(0, 1e9), st.floats(0, 1e5))
def test_every_interval_is_within_its_bounds_and_leaves_half_the_time_for_writing(
    cost_s, failures, lived_s, write_s
):
    found, why = interval(cost_s, failures, lived_s, write_s)
    least = max(INTERVAL_MIN_S, 2 * write_s)
    assert least <= found <= max(INTERVAL_MAX_S, least)
    assert why


def test_the_reason_names_the_figures():
    found, why = interval(0.5, 3, 4 * 3600.0)
    assert 60 < found < 300
    assert "500 ms of training" in why and "every 7 h" in why
    assert "is the least" in interval(0.0, 0, 0.0).why
    assert "is the most" in interval(60.0, 0, 0.0).why
    assert "40 s" in interval(0.0, 0, 0.0, write_s=40.0).why
