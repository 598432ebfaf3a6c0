"""How long processes live on after an error has ended their program."""

from elastane.agent.hang_monitor import ERROR_TOLD_S, EndingWatch
from elastane.process.status_page import StatusPage, WorkerPage

LOOK_S = 0.25


def looks(watch, errors_ns, seconds, from_s=100.0):
    """Look at these processes for some seconds; return the last finding."""
    found = watch.look(errors_ns, from_s)
    for look in range(1, int(seconds / LOOK_S) + 1):
        found = watch.look(errors_ns, from_s + look * LOOK_S)
    return found


def test_a_process_is_reported_once_it_has_outlived_its_error_and_ended_at_the_limit():
    watch = EndingWatch(10.0)
    assert looks(watch, {7: 5}, ERROR_TOLD_S - LOOK_S) == []
    assert watch.to_tell([7]) is None, "an end takes a while"
    assert looks(watch, {7: 5}, LOOK_S, 101.75) == []
    assert watch.to_tell([7]) == 7 and watch.lived_s(7) == ERROR_TOLD_S
    assert watch.to_tell([7]) is None
    assert looks(watch, {7: 5}, 7.75, 102.0) == []
    assert watch.look({7: 5}, 110.0) == [7]


def test_the_first_error_among_the_members_is_reported():
    watch = EndingWatch(10.0)
    looks(watch, {7: 50, 8: 40, 9: 30}, 3.0)
    assert watch.to_tell([6, 7, 8]) == 8, "9 has no place in this world, and 6 has no error"
    watch.world_ended()
    assert watch.to_tell([6]) is None and watch.to_tell([7]) == 7


def test_time_without_a_look_counts_little_since_the_host_may_have_been_suspended():
    watch = EndingWatch(10.0)
    watch.look({7: 5}, 100.0)
    assert watch.look({7: 5}, 4000.0) == [] and watch.to_tell([7]) is None


def test_the_page_keeps_the_first_error():
    page = StatusPage.create()
    worker = WorkerPage.open(page.fd)
    assert page.error_ns == 0
    worker.note_error(12)
    worker.note_error(15)
    assert page.error_ns == 12
