"""When a save is due: by steps, equally on all ranks, or by rank 0's clock."""

import itertools
import random

import pytest

from elastane.checkpoint.schedule import SaveSchedule, WriteThrottle


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def drive(clock, ranks, steps, step_s):
    """Play steps; return the steps at which all ranks saved."""
    saved = []
    for step in range(1, steps + 1):
        clock.now_s += step_s() if callable(step_s) else step_s
        reasons = [rank.is_due(step) for rank in ranks]
        assert len(set(reasons)) == 1, "ranks do not agree that there is something to ask"
        if reasons[0]:
            word = ranks[0].word(step, reasons[0])
            heard = [rank.accept(word) for rank in ranks]
            assert len(set(heard)) == 1
            if heard[0]:
                saved.append(step)
    return saved


def test_a_save_is_due_every_n_steps():
    clock = Clock()
    assert drive(clock, [SaveSchedule(4, None, clock)], 13, 1.0) == [4, 8, 12]


def test_nothing_is_due_without_an_interval():
    clock = Clock()
    assert drive(clock, [SaveSchedule(None, None, clock)], 50, 1.0) == []


@pytest.mark.parametrize("step_s", [0.001, 0.05, 1.0, 20.0])
def test_a_save_is_due_every_n_seconds_within_a_sixteenth(step_s):
    clock = Clock()
    ranks = [SaveSchedule(None, 60.0, clock), SaveSchedule(None, 60.0, Clock())]
    steps = int(700 / step_s)
    saved = drive(clock, ranks, steps, step_s)
    gaps = [(b - a) * step_s for a, b in itertools.pairwise(saved)]
    assert gaps
    assert all(60.0 <= gap <= max(60.0 * 1.13, 60.0 + 2 * step_s) for gap in gaps), gaps
    if step_s < 1:
        assert ranks[0].stride > 1
        assert ranks[0].stride == ranks[1].stride


def test_a_joining_rank_asks_at_the_same_steps():
    clock = Clock()
    old = SaveSchedule(None, 30.0, clock)
    drive(clock, [old], 500, 0.1)
    new = SaveSchedule(None, 30.0, Clock())
    new.resume(old.lived_s, old.failures, old.stride)
    assert [s for s in range(501, 900) if old.is_due(s)] == [
        s for s in range(501, 900) if new.is_due(s)
    ]


def test_auto_saves_more_often_where_saves_are_cheap_and_failures_frequent():
    clock = Clock()
    cheap, dear, failing = (SaveSchedule(None, "auto", clock) for _ in range(3))
    clock.now_s += 3600
    cheap.add_cost(0.05, 1.0)
    dear.add_cost(5.0, 1.0)
    failing.add_cost(5.0, 1.0)
    failing.failures = 20
    assert cheap.interval_s() < dear.interval_s()
    assert failing.interval_s() < dear.interval_s()


def test_auto_logs_the_interval_and_its_reason_once():
    told = []
    clock, rng = Clock(), random.Random(3)
    cadence = SaveSchedule(None, "auto", clock, told.append)
    cadence.add_cost(0.2, 1.0)
    drive(clock, [cadence], 2000, lambda: rng.uniform(0.5, 1.5))
    assert len(told) == 1
    assert "a checkpoint each" in told[0]
    assert "fails every" in told[0]


def given(pace, clock, writes_s, saves_s):
    """Play saves at these times; return when storage got one, with writes of this length."""
    found, until_s = [], 0.0
    for clock.now_s in saves_s:
        busy = clock.now_s < until_s
        if not pace.rests((1, 0), busy=busy) and not busy:
            pace.begun((1, 0))
            found.append(clock.now_s)
            until_s = clock.now_s + writes_s
    return found


def test_storage_pauses_fifteen_times_as_long_as_its_write_took():
    clock = Clock()
    pace = WriteThrottle(clock)
    saves_s = [100 + 0.25 * number for number in range(160)]
    assert given(pace, clock, 0.4, saves_s) == saves_s[::16]


def test_the_pause_of_slow_storage_has_a_bound():
    clock = Clock()
    pace = WriteThrottle(clock)
    assert given(pace, clock, 30.0, range(100, 200)) == [100, 139, 178]


def test_the_first_save_of_a_world_goes_to_storage_once_that_is_free():
    clock = Clock()
    pace = WriteThrottle(clock)
    pace.begun((1, 0))
    clock.now_s = 100.5
    assert pace.rests((1, 0), busy=True)
    assert not pace.rests((2, 0), busy=True), "it waits for storage alone"
    clock.now_s = 101.0
    assert pace.rests((1, 0), busy=False)
    assert not pace.rests((2, 0), busy=False)
    pace.begun((2, 0))
    clock.now_s = 101.5
    assert pace.rests((2, 0), busy=True)
    assert pace.rests((2, 0), busy=False)


def test_storage_that_keeps_up_gets_every_save():
    clock = Clock()
    pace = WriteThrottle(clock)
    assert given(pace, clock, 0.9, range(100, 120)) == [*range(100, 120)]
    assert given(pace, clock, 400.0, range(300, 3000, 300)) == [*range(300, 3000, 600)]
