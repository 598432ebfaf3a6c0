"""The goodput account sums to the wall time, also of logs with lost and reordered events."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from view_events import event

from elastane.observe.account import Accountant, TimeCause, account_of
from elastane.observe.view import JobView, after_event
from elastane.protocol.log_events import EventKind

NUMBERS = st.integers(-2, 400)
AGES = st.floats(-5.0, 500.0, allow_nan=False) | st.text(max_size=2)
DATA = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(0, 3),
        "min_nodes": NUMBERS,
        "world_size": st.integers(0, 4),
        "rank": NUMBERS,
        "local_rank": st.integers(0, 2),
        "exit_code": st.sampled_from([0, 1, -9]),
        "stopped": st.booleans(),
        "age_s": AGES,
        "built_age_s": AGES,
        "healed_age_s": AGES,
        "steps": NUMBERS,
        "step": NUMBERS,
        "ok": st.booleans(),
        "events": NUMBERS,
    },
)


@st.composite
def logged(draw):
    """Draw events of two nodes, each a coordinator at times, whose clocks may step back.

    The first one is of a coordinator: a log without any has no account.
    """
    now_s = 1000.0
    found = [event(EventKind.NODE_JOINED, "a", time_s=now_s)]
    for _ in range(draw(st.integers(1, 40))):
        now_s = max(0.0, now_s + draw(st.floats(-20.0, 60.0)))
        found.append(
            event(
                draw(st.sampled_from([*EventKind, "kind-of-a-newer-version"])),
                draw(st.sampled_from(["a", "b"])),
                time_s=now_s,
                round=draw(st.sampled_from([None, 1, 2, 3])),
                attempt=draw(st.sampled_from([0, 1])),
                **draw(DATA),
            )
        )
    return found


@settings(max_examples=75, deadline=None)
@given(logged(), st.none() | st.floats(0.0, 5000.0))
def test_intervals_are_contiguous_and_sum_to_the_wall_time(events, now_s):
    account = account_of(events, now_s)
    assume(account is not None)  # Another run may have begun, without such an event yet.
    edges = [account.from_s, *itertools.chain(*((i.from_s, i.to_s) for i in account.intervals))]
    assert edges == sorted(edges), "no interval is negative"
    ends = [account.from_s, *(one.to_s for one in account.intervals)]
    assert [one.from_s for one in account.intervals] == ends[:-1], "no gap, no overlap"
    assert sum(found.seconds for found in account.causes().values()) == pytest.approx(
        account.wall_s, abs=1e-6
    )


@settings(max_examples=50, deadline=None)
@given(logged(), st.floats(0.0, 5000.0))
def test_later_events_do_not_change_the_start_of_the_job(events, now_s):
    first = events[0].time_s
    if EventKind.JOB_ENDED not in {one.kind for one in events}:
        assert account_of(events, now_s).from_s == first


@settings(max_examples=50, deadline=None)
@given(logged())
def test_only_lost_time_refers_to_an_incident(events):
    account = account_of(events)
    assume(account is not None)
    for one in account.intervals:
        if one.cause in (TimeCause.PRODUCTIVE, TimeCause.UNKNOWN):
            assert one.incident == 0, one


@settings(max_examples=150, deadline=None)
@given(logged(), st.none() | st.floats(0.0, 5000.0))
def test_a_view_of_the_same_events_does_not_change_the_account(events, now_s):
    view, accountant = JobView(), Accountant()
    for one in events:
        view = after_event(view, one)
        accountant.add(one, view)
    assert account_of(events, now_s) == accountant.account(view, now_s)
