"""The own part of a step on each node now, and which workers the others wait for."""

import pytest
from view_events import event, play, settled, started

from elastane.observe.step_times import milliseconds, step_times_of

WORLD = (settled(1, "a b", 4, time_s=1.0), started("a", 1, 2), started("b", 3, 4))


def times(at_s, *own_ms, median_ms, **more):
    text = ",".join(map(str, own_ms))
    return event("step-times", time_s=at_s, own_ms=text, median_ms=median_ms, **more)


def shown(*events):
    found = step_times_of(play(*WORLD, *events))
    assert found is not None
    return found


def test_a_node_is_shown_by_its_slowest_worker():
    found = shown(times(10.0, 100, 104, 90, 102, median_ms=101))
    assert [(one.node, one.rank, one.own_ms, one.is_slow) for one in found.nodes] == [
        ("a", 1, 104.03, False),
        ("b", 3, 102.01, False),
    ]
    assert found.waits == "" and found.median_ms == 101


def test_the_newest_measurement_of_the_current_world_counts():
    old, new = times(10.0, 90, 90, 90, 90, median_ms=90), times(40.0, 80, 80, 80, 80, median_ms=80)
    assert shown(old, new).median_ms == 80
    view = play(*WORLD, old, settled(2, "a", 2, time_s=30.0))
    assert step_times_of(view) is None and step_times_of(play(*WORLD)) is None


@pytest.mark.parametrize(
    ("own_ms", "median_ms", "waits"),
    [
        ((100, 100, 150, 100), 100, "3 workers wait 50 ms in each step for rank 2 on b"),
        ((100, 100, 150, 160), 125, "2 workers wait 60 ms in each step for ranks 2-3 on b"),
        ((150, 100, 150, 100), 125, "2 workers wait 50 ms in each step for ranks 0,2"),
        ((100, 100, 119, 100), 100, ""),
        ((3, 3, 4.9, 3), 3, ""),
    ],
    ids=["one", "a-node", "two-nodes", "below-the-ratio", "too-short-to-tell"],
)
def test_the_others_wait_for_workers_that_take_longer(own_ms, median_ms, waits):
    assert shown(times(10.0, *own_ms, median_ms=median_ms)).waits == waits


def test_of_two_workers_the_faster_one_is_the_usual_one():
    view = play(settled(1, "a b", 2, time_s=1.0), started("a", 1), started("b", 2),
                times(10.0, 26, 39, median_ms=32.5))  # fmt: skip
    found = step_times_of(view)
    assert found is not None and found.waits == "1 worker waits 13 ms in each step for rank 1 on b"


def test_of_a_large_world_the_nodes_of_the_slowest_workers_are_known():
    found = shown(
        times(10.0, 300, 110, median_ms=100, ranks="7,912", nodes="n1 n114", workers=1000)
    )
    assert [(one.node, one.rank, one.is_slow) for one in found.nodes] == [
        ("n1", 7, True),
        ("n114", 912, False),
    ]
    assert found.waits == "999 workers wait 200 ms in each step for rank 7 on n1"


def test_workers_whose_nodes_are_not_known_are_named_by_rank():
    found = step_times_of(play(times(10.0, 100, 100, 250, median_ms=100)))
    assert found is not None and found.nodes == []
    assert found.waits == "2 workers wait 150 ms in each step for rank 2"


def test_durations_in_words():
    assert (milliseconds(0.4567), milliseconds(1234.0)) == ("0.457 ms", "1.23 s")
