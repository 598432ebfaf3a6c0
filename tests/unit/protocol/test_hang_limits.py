"""Only a worker that neither waits nor makes progress hangs; the limits are learned."""

import random
from dataclasses import replace

import pytest

from elastane.protocol.hangs import (
    HANG_ANSWER_S,
    HANG_ASK_S,
    HANG_BETWEEN_S,
    HANG_CEILING_S,
    HANG_ENTER_S,
    HANG_FACTOR,
    HANG_LOOK_S,
    HANG_STALL_S,
    HANG_STEPS_FIRST,
    HANG_STOPPED_S,
    HANG_WINDOW_S,
    Activity,
    HangRules,
    Observation,
    waiting_text,
)
from elastane.protocol.limits import REASON_CHARS_MAX
from elastane.protocol.model import WaitPoint

BODY, LOADING, BETWEEN = Activity.BODY, Activity.LOADING, Activity.BETWEEN
MARGIN_S = 2 * HANG_LOOK_S
FLOOR_S, ABORT_S = 5.0, 1.5


class Node:
    """Observed workers: each answers by `waits`, unless it is silent."""

    def __init__(self, *numbers, steps=100, floor_s=FLOOR_S):
        self.watch, self.now_s = HangRules(floor_s, ABORT_S), 0.0
        self.sights = {n: Observation(1, BODY, steps) for n in numbers or (1,)}
        self.waits, self.silent, self.held, self.asked = set(), set(), set(), 0
        self.hung, self.stalled_s, self.waiting = {}, None, ()
        self.traffic = {}  # the bytes that a worker says it has exchanged

    def be(self, number, activity=BODY, steps=None, stopped=False, progress=True):
        sight = self.sights[number]
        steps = sight.steps if steps is None else steps
        self.sights[number] = Observation(sight.mark + progress, activity, steps, stopped)

    def passes(self, span_s, look_s=HANG_LOOK_S):
        """Let time pass; return the workers that were found to hang, and after how long."""
        found, begin_s = {}, self.now_s
        while self.now_s < begin_s + span_s and not found:
            self.now_s += look_s
            findings = self.watch.look(self.sights, self.now_s)
            self.asked += len(findings.ask)
            for number in findings.ask:
                if number not in self.silent:
                    waits, held = number in self.waits, number in self.held
                    at, traffic = WaitPoint(number, "a collective"), self.traffic.get(number)
                    self.watch.answered(number, waits=waits, held=held, at=at, traffic=traffic)
            found = dict.fromkeys(findings.hung, self.now_s - begin_s)
            self.hung.update(findings.hung)
            self.waiting = findings.waiting
            if findings.stalled and self.stalled_s is None:
                self.stalled_s = self.now_s - begin_s
        return found


def test_a_worker_that_neither_waits_nor_progresses_hangs_after_the_floor():
    node = Node()
    assert node.passes(1000) == {1: pytest.approx(FLOOR_S, abs=MARGIN_S)}
    assert "in the body of a step" in node.hung[1] and "limit 5.0 s" in node.hung[1]


def test_a_waiting_worker_never_hangs_and_one_that_cannot_answer_does():
    node = Node(1, 2, 3)
    node.waits, node.silent = {1, 3}, {2}
    assert list(node.passes(1000)) == [2]
    del node.sights[2]
    assert node.passes(HANG_CEILING_S) == {}
    node.silent = {3}  # It waited as long as it said so.
    assert node.passes(1000) == {3: pytest.approx(FLOOR_S + HANG_ANSWER_S, abs=4 * MARGIN_S)}


def test_the_limit_is_a_multiple_of_what_the_same_work_took_at_the_longest():
    node = Node()
    node.passes(3.0)
    node.be(1, LOADING)
    assert node.passes(1000) == {1: pytest.approx(FLOOR_S, abs=MARGIN_S)}
    node.be(1, BODY)
    assert node.passes(1000) == {1: pytest.approx(3.0 * HANG_FACTOR, abs=HANG_FACTOR * MARGIN_S)}


def test_learned_limits_outlive_workers_and_fade():
    node = Node()
    node.passes(3.0)
    node.be(1)
    node.passes(HANG_LOOK_S)
    del node.sights[1]
    node.sights[2] = Observation(1, BODY, 100)
    assert node.passes(20.0) == {}, "a successor has the limit of its predecessor"
    for _ in range(int(2 * HANG_WINDOW_S)):
        node.be(2)
        node.passes(1.0, look_s=1.0)
    assert node.passes(1000)[2] < 2 * HANG_FACTOR


def test_waits_and_interrupted_work_do_not_raise_the_limit():
    node = Node()
    node.waits = {1}
    node.passes(60.0)
    node.waits = set()
    node.be(1)
    node.passes(4.0)
    node.watch.world_ended()
    node.be(1)
    assert node.passes(1000) == {1: pytest.approx(FLOOR_S, abs=MARGIN_S)}


def test_a_worker_in_a_debugger_never_hangs_and_the_others_are_not_stalled():
    node = Node(1, 2)
    node.waits = {1}
    node.held = {2}
    assert node.passes(2 * HANG_BETWEEN_S, look_s=1.0) == {} and node.stalled_s is None
    node.held, node.silent = set(), {2}
    node.sights[2] = replace(node.sights[2], held=True)
    assert node.passes(2 * HANG_BETWEEN_S, look_s=1.0) == {} and node.stalled_s is None
    node.sights[2] = replace(node.sights[2], held=False)
    assert list(node.passes(1000)) == [2]


def test_the_end_of_a_world_restarts_the_time_of_every_worker():
    node = Node()
    node.waits = {1}
    node.passes(60.0)
    node.waits = set()
    node.watch.world_ended()
    assert node.passes(FLOOR_S - MARGIN_S) == {}


@pytest.mark.parametrize(
    ("activity", "steps", "limit_s"),
    [
        (BODY, 0, HANG_CEILING_S),
        (BODY, HANG_STEPS_FIRST - 1, HANG_CEILING_S),
        (Activity.COMPILING, 100, HANG_CEILING_S),
        (BETWEEN, 0, HANG_BETWEEN_S),
        (BETWEEN, 100, HANG_BETWEEN_S),
    ],
)
def test_first_steps_compilation_and_user_code_have_longer_limits(activity, steps, limit_s):
    node = Node(steps=steps)
    node.be(1, activity)
    assert node.passes(2 * limit_s) == {1: pytest.approx(limit_s, abs=MARGIN_S)}


@pytest.mark.parametrize(("activity", "steps"), [(BODY, 0), (BODY, 100), (BETWEEN, 100)])
def test_a_floor_above_the_ceiling_holds_for_all_work(activity, steps):
    floor_s = 2 * HANG_BETWEEN_S
    node = Node(steps=steps, floor_s=floor_s)
    node.be(1, activity)
    assert node.passes(2 * floor_s) == {1: pytest.approx(floor_s, abs=MARGIN_S)}
    assert "hang_floor=SECONDS allows more" in node.hung[1]


@pytest.mark.parametrize("activity", [Activity.APART, Activity.ENTERING])
def test_a_worker_outside_of_steps_or_without_a_world_is_not_judged(activity):
    node = Node()
    node.be(1, activity)
    assert node.passes(2 * HANG_BETWEEN_S, look_s=1.0) == {}


def test_a_worker_that_builds_for_minutes_is_not_blamed_and_those_that_wait_for_it_are_no_stall():
    node = Node(1, 2, steps=0)
    node.be(1, Activity.BUILDING)
    node.be(2, Activity.ENTERING)
    node.waits.add(2)
    assert node.passes(HANG_CEILING_S - 10) == {} and node.stalled_s is None
    assert set(node.passes(20)) == {1}


@pytest.mark.parametrize("activity", list(Activity))
def test_a_worker_stopped_by_a_signal_hangs_in_any_activity(activity):
    node = Node(steps=0)
    node.waits = {1}
    node.be(1, activity, stopped=True)
    assert node.passes(1000) == {1: pytest.approx(HANG_STOPPED_S, abs=MARGIN_S)}
    assert "stopped by a signal" in node.hung[1]
    node.be(1, activity, progress=False)
    assert node.passes(HANG_STOPPED_S) == {}


@pytest.mark.parametrize("activity", [BODY, BETWEEN, Activity.ENTERING])
def test_a_worker_whose_abort_does_not_return_hangs_in_any_activity(activity):
    node = Node(1, 2)
    node.waits = {1, 2}
    node.be(1, activity)
    node.sights[1] = replace(node.sights[1], aborts=True)
    assert node.passes(ABORT_S / 2) == {}
    node.watch.world_ended()
    found = node.passes(1000)
    assert found == {1: pytest.approx(ABORT_S / 2, abs=2 * MARGIN_S)}, "its world ended before"
    assert "in an abort of its process group for 1.5 s" in node.hung[1]
    node.sights[1] = replace(node.sights[1], aborts=True, held=True)
    assert node.passes(10 * ABORT_S) == {}, "a debugger holds it"


def test_after_a_suspension_of_the_host_no_worker_counts_as_hung():
    node = Node()
    node.passes(1.0)
    for _ in range(4):
        assert node.passes(600.0, look_s=600.0) == {}


def test_no_worker_is_asked_while_all_make_progress():
    node = Node(1, 2)
    for _ in range(100):
        node.be(1)
        node.be(2)
        node.passes(HANG_ASK_S - HANG_LOOK_S)
    assert node.asked == 0


def test_all_are_stalled_only_when_each_waits_for_too_long():
    node = Node(1, 2)
    node.waits = {1}
    assert list(node.passes(1000)) == [2] and node.stalled_s is None
    node = Node(1, 2)
    node.waits = {1, 2}
    node.passes(2 * HANG_STALL_S)
    assert node.stalled_s == pytest.approx(HANG_STALL_S, abs=MARGIN_S)
    node = Node(1, 2)
    node.be(1, Activity.ENTERING)
    node.be(2, Activity.ENTERING)
    node.passes(2 * HANG_ENTER_S)
    assert node.stalled_s == pytest.approx(HANG_ENTER_S, abs=MARGIN_S)


@pytest.mark.parametrize("activity", [BODY, BETWEEN, Activity.APART, Activity.COMPILING])
def test_a_stall_is_found_in_any_activity_also_of_new_workers(activity):
    node = Node(1, 2, steps=0)
    node.waits, node.traffic = {1, 2}, {1: 100, 2: 7}
    node.be(1, activity)
    node.passes(HANG_STALL_S - MARGIN_S)
    assert node.stalled_s is None and node.waiting == ()
    node.passes(2 * MARGIN_S)
    assert node.stalled_s is not None
    assert node.waiting == (WaitPoint(1, "a collective"), WaitPoint(2, "a collective"))


def test_earlier_waits_do_not_delay_the_end_of_a_stall():
    node = Node(1, 2)
    node.waits, node.traffic = {1}, {1: 100, 2: 100}
    for _ in range(100):
        node.passes(1.0)
        node.be(2)  # It computes, and the first one waits for it.
    node.waits = {1, 2}
    node.be(1)
    node.passes(2 * HANG_STALL_S)
    assert node.stalled_s == pytest.approx(HANG_STALL_S, abs=2 * MARGIN_S)


def test_workers_that_exchange_bytes_do_not_stand_still():
    node = Node(1, 2, steps=0)
    node.waits, node.traffic = {1, 2}, {1: 100, 2: 100}
    for _ in range(20):
        node.passes(HANG_STALL_S / 2)
        node.traffic[2] += 1  # A first reduction of many gigabytes.
    assert node.stalled_s is None
    node.passes(HANG_STALL_S + MARGIN_S)
    assert node.stalled_s is not None


def test_without_byte_counts_waits_are_shown_before_they_count_as_a_stall():
    node = Node(1, steps=0)
    node.waits = {1}
    node.passes(HANG_STALL_S + MARGIN_S)
    assert node.waiting and node.stalled_s is None
    node.passes(HANG_CEILING_S)
    assert node.stalled_s is not None


def test_ranks_that_wait_at_one_place_are_named_together():
    at = {0: "all_reduce", 1: "all_reduce", 2: "_sync_buffers", 3: "all_reduce", 4: "all_reduce"}
    said = waiting_text(WaitPoint(rank, where) for rank, where in at.items())
    assert said == "ranks 0-1, 3-4 in all_reduce, rank 2 in _sync_buffers"
    assert len(waiting_text(WaitPoint(n, f"{n} " * 50) for n in range(1000))) == REASON_CHARS_MAX
    assert waiting_text([]) == "at places that no worker named"


def test_no_healthy_step_of_ten_thousand_is_taken_for_a_hang():
    rng = random.Random(5)
    node = Node(1, 2, steps=0)
    for step in range(10_000):
        slow = rng.random()
        evaluates = 40.0 if step % 500 == 499 else 0.0
        loads_s = rng.lognormvariate(-2, 1) if slow > 0.01 else rng.uniform(0, 4)
        computes_s = rng.lognormvariate(1, 0.5) * (4 if slow > 0.995 else 1)
        for activity, span_s in (
            (BETWEEN, evaluates),
            (LOADING, loads_s),
            (Activity.COMPILING, 90.0 if step in (0, 4000) else 0.0),
            (BODY, computes_s),
        ):
            if span_s > HANG_LOOK_S:
                node.be(1, activity, step)
                node.waits = {2}  # for the first, in the step before
                assert node.passes(span_s) == {}, (step, activity, span_s, node.hung)
        node.waits = set()
        node.be(2, BODY, step)
        assert node.stalled_s is None


def test_an_answer_of_an_ended_worker_is_dropped():
    node = Node(1)
    node.watch.answered(1, waits=True)
    node.watch.answered(2, waits=True, held=True)
    assert node.passes(FLOOR_S / 2) == {}
    assert list(node.passes(10 * FLOOR_S)) == [1]
