"""A worker's records of its steps on the page, and the agent's reading of them."""

import os
import threading
from types import SimpleNamespace

import pytest

from elastane.agent.step_paces import StepPaces
from elastane.process import step_meter
from elastane.process.status_page import TIMES_MAX, StatusPage, WorkerPage
from elastane.process.step_meter import AWAY_MARKS, Loading, StepMark, Waiting
from elastane.protocol.stragglers import WINDOW_STEPS


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(ns=1_000)
    monkeypatch.setattr(step_meter.time, "monotonic_ns", lambda: now.ns)
    return now


@pytest.fixture
def page():
    page = StatusPage.create()
    worker = WorkerPage.open(os.dup(page.fd))
    step_meter.begin(worker)
    yield page
    step_meter._process.forget()
    worker.close()
    page.close()


def steps(count, clock, kind=StepMark.STEP, marker=0):
    for _ in range(count):
        clock.ns += 10
        step_meter.mark(kind, marker)


def test_a_step_has_its_length_and_what_it_waited_for(page, clock):
    step_meter.mark(StepMark.STEP)
    with Loading():
        clock.ns += 5
        with Waiting():
            clock.ns += 20
    with Waiting():
        clock.ns += 100
        with Waiting():
            clock.ns += 200
    clock.ns += 1_000
    step_meter.mark(StepMark.STEP)
    assert page.step_times(4) == [(1_325, 320, 5)]


def test_overlapping_waits_are_counted_once(page, clock):
    step_meter.mark(StepMark.BACKWARD, 1)
    first, second = Waiting(), Waiting()
    first.__enter__()
    clock.ns += 7
    second.__enter__()
    clock.ns += 100
    first.__exit__(None, None, None)
    step_meter.mark(StepMark.BACKWARD, 1)
    second.__exit__(None, None, None)
    step_meter.mark(StepMark.BACKWARD, 2)
    clock.ns += 10
    step_meter.mark(StepMark.BACKWARD, 1)
    assert page.step_times(4) == [(107, 107, 0), (10, 0, 0)]


def test_the_last_steps_are_kept(page, clock):
    steps(TIMES_MAX + 5, clock)
    assert page.steps_timed == TIMES_MAX + 4
    assert page.step_times(1_000) == [(10, 0, 0)] * TIMES_MAX


def test_a_better_mark_replaces_the_others_and_their_steps(page, clock):
    steps(9, clock, StepMark.BATCH)
    steps(1, clock, StepMark.BACKWARD)
    steps(9, clock, StepMark.BATCH)
    assert page.step_times(30) == []
    steps(1, clock, StepMark.BACKWARD)
    assert page.step_times(30) == [(100, 0, 0)]


def test_another_model_counts_once_it_makes_all_of_the_marks(page, clock):
    steps(3, clock, StepMark.BACKWARD, marker=1)
    for _ in range(2 * AWAY_MARKS):
        steps(1, clock, StepMark.BACKWARD, marker=2)
        steps(1, clock, StepMark.BACKWARD, marker=1)
    assert page.step_times(2) == [(20, 0, 0)] * 2
    steps(AWAY_MARKS + 2, clock, StepMark.BACKWARD, marker=2)
    assert page.step_times(2) == [(10, 0, 0)] * 2


def test_other_threads_do_not_change_the_measurement(page, clock):
    def other():
        with Waiting():
            clock.ns += 50
        step_meter.mark(StepMark.STEP)

    steps(1, clock)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    steps(1, clock)
    assert page.step_times(4) == [(60, 0, 0)]


def test_an_agent_reads_paces_once_all_of_its_workers_show_enough_steps(page, clock):
    process = SimpleNamespace(pid=os.getpid())
    worker = SimpleNamespace(rank=3, page=page, process=process, is_alive=True)
    paces = StepPaces()
    steps(WINDOW_STEPS, clock)
    assert paces.look([worker]) == ()
    steps(1, clock)
    [pace] = paces.look([worker])
    assert (pace.rank, pace.step, pace.share, pace.whole_s) == (3, WINDOW_STEPS, 1.0, 1e-8)
    assert pace.runs_s >= 0.0
    empty = StatusPage.create()
    parent = SimpleNamespace(pid=os.getppid())
    other = SimpleNamespace(rank=4, page=empty, process=parent, is_alive=True)
    assert paces.look([worker, other]) == ()
    empty.close()
