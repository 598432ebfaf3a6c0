"""How fast a job trains: the rate of each bucket, and the usual one."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_events import event, play

from elastane.observe.rates import USUAL_S, rates_of, series_of

COUNTS = st.lists(
    st.tuples(st.floats(0.01, 60.0), st.integers(-3, 40), st.booleans()), min_size=1, max_size=30
)


def counted(drawn):
    """A view of step counts and paces, each after the one before it."""
    time_s, steps, events = 1000.0, 0, []
    for pause_s, more, is_pace in drawn:
        time_s += pause_s
        steps = max(0, steps + more)
        fields = {"made": abs(more), "seconds": pause_s} if is_pace else {"steps": steps}
        kind = "pace" if is_pace else "progress"
        events.append(event(kind, time_s=time_s, **fields))
    return play(*events)


def steps_within(view, low_s, high_s):
    """The steps of a time, if those of each point were made evenly."""
    return sum(
        one.made
        * max(0.0, min(one.time_s, high_s) - max(one.since_s, low_s))
        / (one.time_s - one.since_s)
        for one in view.steps
        if one.made
    )


@given(COUNTS, st.floats(900.0, 2000.0), st.floats(1.0, 2000.0), st.integers(1, 40))
def test_the_rate_of_a_bucket_is_that_of_the_steps_in_it(drawn, from_s, length_s, buckets):
    view = counted(drawn)
    found = series_of(view, from_s, from_s + length_s, buckets)
    for index, rate in enumerate(found.rate):
        if rate is not None:
            low_s = from_s + index * found.bucket_s
            wanted = steps_within(view, low_s, low_s + found.bucket_s) / found.bucket_s
            assert rate == pytest.approx(wanted, abs=1e-4 + 1e-6 * wanted)


@given(COUNTS)
def test_the_usual_rate_is_the_median_of_the_counts_of_the_last_hour(drawn):
    view = counted(drawn)
    now_s = view.last_s + USUAL_S / 2
    wanted = [
        one.made / (one.time_s - one.since_s)
        for one in [*view.steps][1:]
        if one.since_s >= now_s - USUAL_S
    ]
    assert rates_of(view, now_s).usual == (median(wanted) if wanted else None)
