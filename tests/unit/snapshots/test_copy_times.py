"""The age of the newest copy of a state, and the usual time between two."""

from elastane.protocol.checkpoints import Key
from elastane.snapshots.rules.copy_times import GAPS_MAX, CopyTime, CopyTimes
from elastane.snapshots.rules.slot_table import Name


def name(step):
    return Name(Key(0, 1, 0, step), f"{step:08x}")


def test_the_newest_copy_that_is_still_there_counts():
    times = CopyTimes()
    assert times.newest([]) is None
    times.add(name(1), 100.0, 0.5)
    assert times.newest([name(1)]) == CopyTime(1, 100.0, 0.5)
    times.add(name(2), 110.0, 0.7)
    assert times.newest([name(1), name(2)]) == CopyTime(2, 110.0, 0.7, 10.0)
    assert times.newest([name(1)]) == CopyTime(1, 100.0, 0.5, 10.0), "the newer one was withdrawn"
    assert times.newest([]) is None


def test_a_copy_that_is_late_does_not_change_the_usual_time_between_two():
    times, began_s = CopyTimes(), 0.0
    for step in range(3 * GAPS_MAX):
        began_s += 500.0 if step == 2 * GAPS_MAX else 10.0
        times.add(name(step), began_s, 1.0)
        newest = times.newest([name(step)])
    assert newest.every_s == 10.0
