"""`should_checkpoint()` on a test's page and clock: which call returns true."""

import multiprocessing.process
import os
from types import SimpleNamespace

import pytest
from waited_clock import WaitedClock

from elastane.process.status_page import (
    MAGIC,
    PAGE_BYTES,
    PAGE_FD_VARIABLE,
    StatusPage,
    before_park,
    finish_before_park,
)
from elastane.worker import drain, world


@pytest.fixture
def clock(monkeypatch):
    clock = WaitedClock()
    monkeypatch.setattr(drain, "time", clock)
    return clock


@pytest.fixture
def page(monkeypatch):
    """Return the agent's side of this worker's page, which no call has opened yet."""
    for name, value in {"_page": None, "_is_open": False, "_gave_up": False}.items():
        monkeypatch.setattr(drain, name, value)
    page = StatusPage.create()
    monkeypatch.setenv(PAGE_FD_VARIABLE, str(page.fd))
    yield page
    page.close()


def calls(count):
    return [drain.should_checkpoint() for _ in range(count)]


def test_without_a_drain_every_call_is_counted_and_none_waits(page, clock):
    assert calls(5) == [False] * 5
    assert page.calls == 5
    assert clock.now_s == 100.0


def test_only_the_agreed_call_checkpoints(page, clock):
    calls(2)
    page.gate()
    clock.after(0.5, lambda: page.aim(5))
    assert calls(3) == [False, False, True]
    assert page.calls == 5
    assert clock.now_s < 101.0, "only the first call waits for the agreement"


def test_the_call_after_it_is_parked_until_the_drain_is_over(page, clock):
    page.gate()
    page.aim(1)
    parked = []
    clock.after(2.0, lambda: parked.append(page.is_parked))
    clock.after(3.0, page.release)
    assert calls(2) == [True, False]
    assert parked == [True]
    assert not page.is_parked
    assert 103.0 <= clock.now_s < 104.0
    assert calls(1) == [False]


def test_a_cancelled_drain_releases_a_waiting_worker(page, clock):
    page.gate()
    clock.after(1.0, page.release)
    assert calls(2) == [False, False]
    page.gate()
    page.aim(3)
    assert calls(1) == [True], "the next drain is heard"


def test_a_missing_agreement_delays_only_one_call(page, clock):
    page.gate()
    assert calls(3) == [False] * 3
    waited_s = clock.now_s - 100.0
    assert drain.AGREEMENT_TIMEOUT_S <= waited_s < drain.AGREEMENT_TIMEOUT_S + 1


def test_a_worker_that_is_not_stopped_continues_after_its_checkpoint(page, clock):
    page.gate()
    page.aim(1)
    assert calls(4) == [True, False, False, False]
    waited_s = clock.now_s - 100.0
    assert drain.PARKED_TIMEOUT_S <= waited_s < drain.PARKED_TIMEOUT_S + 1
    assert not page.is_parked


@pytest.mark.parametrize("value", [None, "", "x", "-1", "99999999999999999999", "1048575"])
def test_without_a_page_no_call_says_so_and_it_is_looked_for_once(page, monkeypatch, value):
    if value is None:
        monkeypatch.delenv(PAGE_FD_VARIABLE)
    else:
        monkeypatch.setenv(PAGE_FD_VARIABLE, value)
    assert calls(2) == [False, False]
    monkeypatch.setenv(PAGE_FD_VARIABLE, str(page.fd))
    assert calls(1) == [False]
    assert page.calls == 0


@pytest.mark.parametrize("content", [b"", bytes(PAGE_BYTES), MAGIC.to_bytes(8, "little") * 512])
def test_an_invalid_status_page_is_ignored(page, monkeypatch, content):
    fd = os.memfd_create("other")
    os.write(fd, content)
    monkeypatch.setenv(PAGE_FD_VARIABLE, str(fd))
    assert calls(2) == [False, False]
    assert os.pread(fd, PAGE_BYTES, 0) == content
    os.close(fd)


def test_a_page_of_another_process_is_not_counted_on(page):
    other = drain.WorkerPage.open(os.dup(page.fd))
    assert other.claim(os.getpid() + 1)
    assert calls(2) == [False, False]
    assert page.calls == 0


def test_a_child_of_the_worker_counts_nothing(page, monkeypatch):
    monkeypatch.setattr(
        multiprocessing.process, "parent_process", lambda: SimpleNamespace(pid=os.getpid())
    )
    assert calls(2) == [False, False]
    assert page.calls == 0


def test_a_fork_of_the_worker_counts_nothing(page):
    calls(1)
    drain._forget()
    assert calls(2) == [False, False]
    assert page.calls == 1


@pytest.mark.parametrize("before", [0, 2])
def test_a_job_whose_steps_count_takes_the_page_and_calls_count_no_more(page, before):
    calls(before)
    taken = drain.take_page()
    taken.reach(40)
    assert calls(3) == [False] * 3
    assert page.calls == 40
    assert drain.take_page() is None


@pytest.fixture
def worlds(page, monkeypatch, clock):
    monkeypatch.setattr(world, "time", clock)
    worlds = world.Worlds(None)
    worlds._page = drain.take_page()
    return worlds


def test_a_worker_in_place_waits_at_the_target_and_saves_nothing(page, clock, worlds):
    page.gate()
    page.aim(3, stops=False)
    saved = []
    worlds.reach(2, lambda: saved.append(2))  # It comes after this one.
    assert clock.now_s == 100.0
    clock.after(0.5, lambda: told.append((page.is_parked, page.has_saved)))
    clock.after(1.0, page.release)
    told = []
    worlds.restarts = (
        "no replica"  # Otherwise it waits for a message, which does not come in this test.
    )
    worlds.reach(3, lambda: saved.append(3))
    assert told == [(True, False)] and not saved


def test_a_worker_saves_once_before_a_stop_that_is_announced_late(page, clock, worlds):
    worlds.restarts = "no replica"
    page.gate()
    page.aim(3, stops=False)
    saved, told = [], []
    clock.after(0.5, lambda: told.append(page.has_saved))
    clock.after(0.6, lambda: page.aim(3, stops=True))
    clock.after(0.9, lambda: told.append(page.has_saved))
    clock.after(1.0, page.release)
    worlds.reach(3, lambda: saved.append(clock.now_s))
    assert len(saved) == 1 and told == [False, True]
    assert not page.is_parked


def test_work_behind_the_training_is_complete_before_the_worker_parks(page, clock):
    """The agent kills a parked worker at once."""
    finished = []
    cancel = before_park(lambda: finished.append(page.is_parked))
    page.gate()
    page.aim(1)
    clock.after(2.0, page.release)
    assert calls(2) == [True, False]
    assert finished == [False]
    cancel()
    finish_before_park()
    assert finished == [False]
