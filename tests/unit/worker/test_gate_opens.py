"""A worker of an unmodified script waits at a boundary; then the agent opens its gate."""

import os
from types import SimpleNamespace

import pytest
from waited_clock import WaitedClock

from elastane.agent.worker import LocalWorker
from elastane.process.status_page import StatusPage, WorkerPage
from elastane.worker import unmodified
from elastane.worker.unmodified import UnmodifiedWorker

BOUNDARY, TARGET = 7, 7
LATE_S = 30.0


def place(number):
    return SimpleNamespace(fence=SimpleNamespace(round=number))


@pytest.fixture
def clock(monkeypatch):
    clock = WaitedClock(now_s=0.0)
    monkeypatch.setattr(unmodified, "time", clock)
    return clock


@pytest.fixture
def page():
    page = StatusPage.create()
    page.gate()
    page.aim(TARGET, stops=False)
    yield page
    page.close()


@pytest.fixture
def worker(page):
    line = SimpleNamespace(world_has_ended=False)
    worker = UnmodifiedWorker(
        line, SimpleNamespace(is_saving=False, watch_distributed=lambda: None), keeps_ranks=True
    )
    worker._page, worker._place = WorkerPage.open(os.dup(page.fd)), place(3)
    yield worker
    worker._page.close()


def test_a_worker_that_gets_a_place_waits_for_it_however_late_it_is(worker, page, clock):
    clock.after(1.0, lambda: page.assign(4))
    clock.after(LATE_S, lambda: setattr(worker._line, "world_has_ended", True))
    worker.reach(BOUNDARY)
    assert clock.now_s >= LATE_S, "a step before would leave newcomers out"


def test_a_place_that_another_thread_has_taken_is_not_waited_for(worker, page, clock):
    clock.after(1.0, lambda: page.assign(4))
    clock.after(LATE_S, lambda: setattr(worker, "_place", place(4)))
    worker.reach(BOUNDARY)
    assert LATE_S <= clock.now_s < LATE_S + 1


def test_a_worker_whose_drain_is_called_off_continues_at_once(worker, page, clock):
    clock.after(1.0, page.release)
    worker.reach(BOUNDARY)
    assert clock.now_s < 1.1


def test_the_agent_stores_the_round_of_a_place_before_it_opens_the_gate(worker, page):
    assignment = SimpleNamespace(rank_base=4, index_of=lambda _: 1, **vars(place(4)))
    local = LocalWorker(local_rank=1, rank=0, streams=None, files=None, page=page)
    local.take_place(assignment)
    assert (worker._page.assigned_round, worker._page.gated, local.rank) == (4, False, 5)
