"""The range of nodes that the job's owner changes while it runs."""

import msgspec
import pytest
from coordinator_driver import Driver, job_spec

from elastane.protocol.events import Resized
from elastane.protocol.log_events import EventKind
from elastane.protocol.messages import Able, Drain, Refused, Stop
from elastane.protocol.model import Fence, PortOffer


def resize(job, minimum, maximum):
    job.handle(Resized(min_nodes=minimum, max_nodes=maximum))


def told(job, kind):
    return [event for event in job.events if event.kind is kind]


@pytest.fixture
def three(driver):
    job = driver(job_spec(1, 3), store_backed=True)
    for name in "abc":
        job.join(name)
    assert job.ranks() == ["a", "b", "c"]
    return job


def drained(job, *names):
    for name in names:
        job.marks(name, 7)
    for name in names:
        job.drains(name)
    job.stops(*names)


def test_a_higher_maximum_admits_a_spare(pair):
    pair.join("c")
    pair.passes(2.0, alive="abc")
    assert pair.phase == "running" and not pair.got("a", Drain)
    resize(pair, 2, 3)
    pair.passes(1.2, alive="abc")
    assert pair.phase == "draining"
    drained(pair, "a", "b")
    assert pair.ranks() == ["a", "b", "c"]


def test_a_lower_maximum_makes_the_highest_ranks_spares_after_a_moment(three):
    resize(three, 1, 2)
    three.passes(4.5, alive="abc")
    assert three.phase == "running"
    three.passes(1.0, alive="abc")
    assert three.phase == "draining" and three.got("c", Drain)
    drained(three, "a", "b", "c")
    assert three.ranks() == ["a", "b"] and three.fence == {"round": 2, "attempt": 0}
    three.passes(30.0, alive="abc")
    assert three.phase == "running" and three.fence == {"round": 2, "attempt": 0}


def test_nodes_that_are_taken_away_with_the_maximum_interrupt_the_others_once(three):
    resize(three, 1, 2)
    three.passes(1.0, alive="abc")
    three.leaves("a")
    assert three.phase == "draining"
    drained(three, "a", "b", "c")
    assert three.ranks() == ["b", "c"]
    three.passes(30.0, alive="bc")
    assert three.fence == {"round": 2, "attempt": 0}


def test_a_higher_minimum_stops_no_worker(three):
    resize(three, 5, 6)
    three.passes(30.0, alive="abc")
    assert three.phase == "running" and not three.got("a", Stop)
    three.breaks("c")
    three.passes(0.2, alive="ab")
    three.stops("a", "b")
    assert three.phase == "forming"
    for name in "cde":
        three.join(name)
    three.passes(3.5, alive="abcde")
    assert three.ranks() == ["a", "b", "c", "d", "e"]


def test_a_range_is_durable_logged_once_and_part_of_the_record(three, driver):
    resize(three, 2, 5)
    resize(three, 2, 5)
    (note,) = told(three, EventKind.RESIZED)
    assert note.reason == "2 to 5 nodes, in place of 1 to 3"
    record = three.persisted[-1]
    assert (record.spec.min_nodes, record.spec.max_nodes, record.resized) == (2, 5, True)
    later = driver(job_spec(1, 3), record=record, store_backed=True)
    report = later.machine.report()
    assert (report.min_nodes, report.max_nodes) == (2, 5)


def test_without_authority_a_range_waits(three):
    three.authority(False)
    written = len(three.persisted)
    resize(three, 2, 5)
    assert len(three.persisted) == written
    three.authority(True)
    assert three.persisted[-1].spec.max_nodes == 5


@pytest.mark.parametrize("nodes", [(1, 3), (2, 5), (7, 9)])
def test_agents_of_older_and_newer_command_lines_are_of_one_job_once_it_was_resized(three, nodes):
    spec = job_spec(*nodes)
    resize(three, 2, 5)
    three.join("d", spec=spec)
    assert not three.got("d", Refused)
    three.join("e", spec=msgspec.structs.replace(spec, max_restarts=99))
    assert "max_restarts" in three.got("e", Refused)[0].what


def test_a_range_that_is_confirmed_lets_agents_of_another_command_line_in(three):
    three.join("d", spec=job_spec(1, 4))
    assert "max_nodes" in three.got("d", Refused)[0].what
    resize(three, 1, 3)
    three.join("e", spec=job_spec(1, 4))
    assert not three.got("e", Refused) and not told(three, EventKind.RESIZED)


def test_static_ranks_keep_their_number():
    job = Driver(job_spec(2, 2, static=True))
    resize(job, 1, 3)
    assert job.machine.report().max_nodes == 2


def test_a_job_below_its_new_maximum_is_not_touched(three):
    resize(three, 1, 3)
    three.passes(30.0, alive="abc")
    assert three.fence == {"round": 1, "attempt": 0}


def in_place_of(count):
    job = Driver(job_spec(1, count), store_backed=True)
    names = "abcde"[:count]
    for name in names:
        job.join(name)
    for name in names:
        job.says(name, Able(workers=(0, 1), offer=PortOffer(8000, True), fence=Fence(1, 0)))
    return job


def test_a_fault_in_place_drops_no_survivor_for_a_lower_maximum():
    job = in_place_of(3)
    resize(job, 1, 1)
    job.breaks("a")
    job.passes(0.2, alive="bc")
    assert job.ranks() == ["b", "c"] and job.phase == "running"
    job.passes(5.0, alive="bc")
    assert job.phase == "draining" and "c leave the world" in job.machine.report().reason


def test_the_next_drain_for_surplus_nodes_has_twice_the_time_if_they_did_not_leave():
    job = in_place_of(3)
    resize(job, 1, 2)
    times = []
    for number in (1, 2):
        job.passes(5.5, alive="abc")
        assert job.phase == "draining" and job.got("c", Drain)[-1].drain == number
        times.append(job.got("c", Drain)[-1].timeout_s)
        job.passes(times[-1] + 0.1, alive="abc")  # no worker reaches a boundary
        assert job.phase == "running" and job.ranks() == ["a", "b", "c"]
    assert times[1] == 2 * times[0]
    resize(job, 1, 1)  # another order begins with the usual time
    job.passes(5.5, alive="abc")
    assert job.got("c", Drain)[-1].timeout_s == times[0]


def test_in_place_the_highest_ranks_leave_at_a_boundary():
    job = in_place_of(3)
    resize(job, 1, 2)
    job.passes(5.5, alive="abc")
    assert job.phase == "draining"
    for name in "abc":
        job.marks(name, 3)
    for name in "abc":
        job.drains(name)
    assert job.ranks() == ["a", "b"] and job.phase == "running"
    assert job.machine.report().max_nodes == 2 and not job.got("c", Stop)
    resize(job, 1, 3)
    job.passes(6.0, alive="abc")
    assert job.phase == "draining"
