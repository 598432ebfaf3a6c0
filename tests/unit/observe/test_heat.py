"""The own parts of steps by worker and time, as the page shows them."""

import pytest
from view_events import event, play, settled, started

from elastane.observe.heat import CELLS_MAX, ROWS_MAX, ROWS_SLOWEST, heat_of
from elastane.observe.recent import Recent
from elastane.observe.view import OWN_PARTS_MAX


def times(at_s, *own_ms, median_ms=100.0, **more):
    text = ",".join(map(str, own_ms))
    return event("step-times", time_s=at_s, own_ms=text, median_ms=median_ms, **more)


WORLD = (settled(1, "a b", 3, time_s=1.0), started("a", 1, 2), started("b", 3))


def rows(heat):
    return {(row.node, row.local_rank, row.rank): row.ratios for row in heat.rows}


def test_each_worker_has_a_row_of_multiples_of_the_median():
    view = play(*WORLD, times(10.0, 100, 90, 150), times(40.0, 100, 110, 250.5))
    heat = heat_of(view, 0.0, 60.0)
    assert (heat.from_s, heat.cell_s, heat.is_whole) == (0.0, 30.0, True)
    assert rows(heat) == {
        ("a", 0, None): [1.0, 1.0, None],
        ("a", 1, None): [0.9, 1.1, None],
        ("b", 0, None): [1.5, 2.5, None],
    }


def test_a_worker_keeps_its_row_under_another_rank_and_a_lost_one_has_no_cells_later():
    later = (settled(2, "b", 1, time_s=30.0), times(40.0, 120))
    heat = heat_of(play(*WORLD, times(10.0, 100, 100, 100), *later), 0.0, 59.0)
    assert rows(heat) == {
        ("b", 0, None): [1.0, 1.2],
        ("a", 0, None): [1.0, None],
        ("a", 1, None): [1.0, None],
    }


def test_a_long_time_has_a_bounded_number_of_cells_with_the_means_of_their_points():
    points = [times(30.0 * at, 100, 100, 200 if at % 2 else 100) for at in range(1, 1001)]
    heat = heat_of(play(*WORLD, *points), 0.0, 30_000.0)
    ratios = rows(heat)["b", 0, None]
    assert len(ratios) == CELLS_MAX and all(1.4 < ratio < 1.6 for ratio in ratios)


def test_of_a_large_world_the_slowest_have_rows_and_are_usual_where_they_are_not_listed():
    ranks, nodes = "7,912", "n1 n114"
    view = play(
        times(10.0, 150, 130, ranks=ranks, nodes=nodes),
        times(40.0, 300, ranks="5", nodes="n0"),
        *(times(70.0, *([110] * 10), ranks=",".join(map(str, range(20 + at, 30 + at))), nodes="")
          for at in (0, 10)),
    )  # fmt: skip
    heat = heat_of(view, 0.0, 89.0)
    assert not heat.is_whole and len(heat.rows) == ROWS_SLOWEST
    assert rows(heat)["n0", None, 5] == [1.0, 3.0, 1.0]
    assert rows(heat)["n1", None, 7] == [1.5, 1.0, 1.0]
    assert ("", None, 30) in rows(heat)


def test_measurements_in_an_undocumented_form_are_left_out():
    bad = [
        times(10.0, "x", 1, 1), times(10.0, -1, 1, 1), times(10.0, 1, 1, 1, median_ms=0.0),
        times(10.0, 1, 1, 1, median_ms="1"), times(10.0, 1, 2, ranks="1"), times(10.0, "nan"),
        event("step-times", time_s=10.0),
    ]  # fmt: skip
    assert play(*WORLD, *bad).own_parts == Recent(OWN_PARTS_MAX)
    assert heat_of(play(*WORLD, *bad), 0.0, 60.0).rows == []


def test_a_world_whose_nodes_are_not_known_has_rows_by_rank():
    heat = heat_of(play(times(10.0, *range(1, 65))), 0.0, 60.0)
    assert len(heat.rows) == ROWS_MAX and heat.rows[63].rank == 63


@pytest.mark.parametrize("count", [OWN_PARTS_MAX, 3 * OWN_PARTS_MAX])
def test_points_have_a_bound_and_the_newest_stay_whole(count):
    view = play(*WORLD, *(times(30.0 * at, 100, 100, 100) for at in range(1, count + 1)))
    found = view.own_parts
    assert OWN_PARTS_MAX // 2 < len(found) <= OWN_PARTS_MAX
    assert found[-1].time_s == 30.0 * count and found[-2].time_s == 30.0 * (count - 1)
    assert all(point.workers is found[0].workers for point in found), "names are held once"
