"""The status page that agent and worker share, and should_checkpoint() on top of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from process_harness import until

from elastane.process.status_page import StatusPage, WorkerPage

CALLER = """
import os, sys
from elastane.worker.drain import should_checkpoint
for line in sys.stdin:
    print(should_checkpoint(), flush=True)
"""
# A DataLoader's worker calls before and after its parent does.
FORKING = """
import multiprocessing, sys
from elastane.worker import drain
def child(q): q.put([drain.should_checkpoint() for _ in range(5)])
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
for _ in range(2):
    process = context.Process(target=child, args=(queue,))
    process.start(); process.join()
    assert queue.get() == [False] * 5
    drain.should_checkpoint()
"""


class Caller:
    """A process that calls once for each line that it receives."""

    def __init__(self, page: StatusPage | None, variable: str | None = None) -> None:
        env = {
            name: value for name, value in os.environ.items() if name != "ELASTANE_STATUS_PAGE_FD"
        }
        fds = () if page is None else (page.fd,)
        if page is not None or variable is not None:
            env["ELASTANE_STATUS_PAGE_FD"] = variable if page is None else str(page.fd)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLER],
            env=env,
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> bool:
        assert self.process.stdout is not None
        return {"True\n": True, "False\n": False}[self.process.stdout.readline()]

    def __call__(self) -> bool:
        self.ask()
        return self.answer()


@pytest.fixture
def page() -> Iterator[StatusPage]:
    one = StatusPage.create()
    yield one
    one.close()


@pytest.fixture
def callers() -> Iterator[list[Caller]]:
    found: list[Caller] = []
    yield found
    for caller in found:
        caller.process.kill()
        caller.process.communicate()


def test_calls_are_counted_and_false_without_a_drain(
    page: StatusPage, callers: list[Caller]
) -> None:
    callers.append(Caller(page))
    assert [callers[0]() for _ in range(3)] == [False] * 3
    assert page.calls == 3


def test_past_its_deadline_a_worker_begins_no_step_before_a_new_deadline(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    sleep, here = time.sleep, threading.current_thread()

    def pause(seconds: float) -> None:
        if threading.current_thread() is not here:
            sleep(seconds)  # of another test
            return
        waited_s.append(seconds)
        if len(waited_s) == 3:
            page.allow_until(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 600 * 10**9)

    monkeypatch.setattr(time, "sleep", pause)
    worker = WorkerPage.open(os.dup(page.fd))
    assert worker.count() == (1, 0) and not waited_s, "without a bound"
    page.allow_until(1)
    assert worker.reach(2) == 0 and len(waited_s) == 3
    assert worker.count() == (3, 0) and len(waited_s) == 3
    worker.close()


def test_all_workers_hear_true_at_the_same_call_and_park_at_the_next(
    page: StatusPage, callers: list[Caller]
) -> None:
    ahead, behind = page, StatusPage.create()
    callers += [Caller(ahead), Caller(behind)]
    assert [callers[0]() for _ in range(3)] + [callers[1]()] == [False] * 4
    for one in (ahead, behind):
        one.gate()
    callers[0].ask()
    until(lambda: ahead.calls == 4, "the gated call is counted")
    target = max(ahead.calls, behind.calls) + 1
    for one in (ahead, behind):
        one.aim(target)
    answers = [[callers[0].answer(), callers[0]()], [callers[1]() for _ in range(4)]]
    assert answers == [[False, True], [False, False, False, True]]
    assert ahead.calls == behind.calls == target
    assert not ahead.is_parked
    for caller in callers:
        caller.ask()
    until(lambda: ahead.is_parked and behind.is_parked, "both wait to be stopped")
    behind.close()


def test_a_gate_that_is_released_lets_the_worker_continue(
    page: StatusPage, callers: list[Caller]
) -> None:
    callers.append(Caller(page))
    assert not callers[0]()
    page.gate()
    callers[0].ask()
    until(lambda: page.calls == 2, "the gated call is counted")
    page.release()
    assert callers[0].answer() is False
    assert callers[0]() is False
    page.gate()
    page.aim(4)
    assert callers[0]() is True


def test_a_parked_worker_continues_when_released(page: StatusPage, callers: list[Caller]) -> None:
    callers.append(Caller(page))
    page.gate()
    page.aim(1)
    assert callers[0]() is True
    callers[0].ask()
    until(lambda: page.is_parked, "parked")
    page.release()
    assert callers[0].answer() is False
    assert not page.is_parked


@pytest.mark.parametrize("variable", ["", "x", "-1", "99", "0", str(1 << 80), "3.5", None])
def test_garbage_in_the_variable_means_false(variable: str | None, callers: list[Caller]) -> None:
    callers.append(Caller(None, variable))
    assert callers[0]() is False
    assert callers[0]() is False


def test_a_page_of_another_layout_is_left_alone(page: StatusPage, callers: list[Caller]) -> None:
    os.pwrite(page.fd, b"\xff" * 8, 8)
    callers.append(Caller(page))
    assert callers[0]() is False
    assert page.calls == 0


def test_a_forked_child_does_not_count(page: StatusPage) -> None:
    env = dict(os.environ, ELASTANE_STATUS_PAGE_FD=str(page.fd))
    subprocess.run([sys.executable, "-c", FORKING], env=env, pass_fds=(page.fd,), check=True)
    assert page.calls == 2


def test_a_second_process_with_the_page_does_not_count(
    page: StatusPage, callers: list[Caller]
) -> None:
    callers.append(Caller(page))
    callers[0]()
    callers.append(Caller(page))
    callers[1]()
    assert page.calls == 1


def test_waiting_for_a_target_is_bounded_and_not_repeated(page: StatusPage) -> None:
    code = (
        "from elastane.worker import drain\ndrain.AGREEMENT_TIMEOUT_S = 0.2\n"
        "print([drain.should_checkpoint() for _ in range(500)].count(False))"
    )
    page.gate()
    env = dict(os.environ, ELASTANE_STATUS_PAGE_FD=str(page.fd))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        pass_fds=(page.fd,),
        check=True,
        capture_output=True,
        timeout=90,  # less than 500 waits take
    )
    assert done.stdout == b"500\n"
    assert time.monotonic() - begun >= 0.2
