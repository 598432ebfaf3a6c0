"""Waits for works without a timeout use threads that are reused, and can be given up."""

import threading

import pytest
import torch
from torch.distributed import AllreduceOptions, Work

from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import ALONE, WorldGroup
from elastane.comms.works import Waited, WorkLog


class Step(Work):
    """A work that ends when the test says so, and ignores a timeout."""

    def __init__(self, error=None, over=True):
        super().__init__()
        self.error, self.over = error, threading.Event()
        if over:
            self.over.set()

    def wait(self, timeout=None):
        self.over.wait(30)
        if self.error:
            raise RuntimeError(self.error)
        return True


def waiters():
    return [thread for thread in threading.enumerate() if thread.name == "elastane-wait"]


def end_of(ledger, threads):
    ledger.close()
    for thread in threads:
        thread.join(30)
    assert not {*threads} & {*waiters()}


def test_a_hundred_waits_take_one_thread_which_ends_with_the_world():
    ledger, before = WorkLog(), waiters()
    for _ in range(100):
        assert Waited(Step(), ledger, [], sliced=False).wait()
    own = [thread for thread in waiters() if thread not in before]
    assert len(own) == 1
    end_of(ledger, own)


def test_a_wait_that_ends_after_its_log_was_closed_leaves_no_thread():
    ledger, before = WorkLog(), waiters()
    work = Step(over=False)
    caller = threading.Thread(target=Waited(work, ledger, [], sliced=False).wait)
    caller.start()
    while not (own := [thread for thread in waiters() if thread not in before]):
        assert caller.is_alive()
    ledger.close()
    work.over.set()
    for thread in (caller, *own):
        thread.join(30)
    assert not {*own} & {*waiters()}


def test_waits_at_once_take_a_thread_each():
    ledger, before = WorkLog(), waiters()
    works = [Step(over=False) for _ in range(3)]
    callers = [
        threading.Thread(target=Waited(work, ledger, [], sliced=False).wait) for work in works
    ]
    for caller in callers:
        caller.start()
    while len(own := [thread for thread in waiters() if thread not in before]) < 3:
        assert any(caller.is_alive() for caller in callers)
    for work in works:
        work.over.set()
    for caller in callers:
        caller.join(30)
    end_of(ledger, own)


def test_a_failure_is_raised_once_and_the_next_wait_succeeds():
    ledger, before = WorkLog(), waiters()
    with pytest.raises(RuntimeError, match="connection closed"):
        Waited(Step("connection closed"), ledger, [], sliced=False).wait()
    assert str(ledger.failure) == "connection closed"
    assert Waited(Step(), ledger, [], sliced=False).wait()
    end_of(ledger, [thread for thread in waiters() if thread not in before])


def test_aborting_a_world_ends_its_waits_and_drops_their_threads():
    ledger, before = WorkLog(), waiters()
    stuck = Step(over=False)
    threading.Timer(0.05, ledger.released.set).start()
    with pytest.raises(RuntimeError, match="the world was ended"):
        Waited(stuck, ledger, [], sliced=False).wait()
    (left,) = [thread for thread in waiters() if thread not in before]
    ledger.close()
    stuck.over.set()
    left.join(30)
    assert not left.is_alive()
    assert not [thread for thread in waiters() if thread not in before]


def test_a_work_of_the_former_world_that_fails_late_does_not_fail_the_next():
    group, former = ElasticGroup("late"), WorldGroup(ALONE).build()
    group.replace(former)
    late = Waited(Step("connection closed"), group._works, [], sliced=False)
    following = WorldGroup(ALONE).build()
    group.replace(following)
    with pytest.raises(RuntimeError, match="connection closed"):
        late.wait()
    try:
        assert not group.failed
    finally:
        group.close()


class Pending(Step):
    """A work that never reports its end."""

    def is_completed(self):
        return self.over.is_set()


@pytest.mark.parametrize("sliced", [True, False])
def test_a_work_with_an_unknown_end_is_in_flight_but_not_waited_for(sliced):
    ledger, work = WorkLog(), Pending(over=False)
    waited = Waited(work, ledger, [], sliced=sliced)
    ledger.add(waited)
    assert ledger.in_flight
    assert ledger.is_waited_for is sliced, "a reduce-scatter says nothing before its wait"
    ledger.count_waiting(1)
    assert ledger.is_waited_for
    ledger.count_waiting(-1)
    work.over.set()
    assert not ledger.in_flight and not ledger.is_waited_for


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_torch_refuses_fails_the_program_and_not_the_world(waits):
    group, world = ElasticGroup("refuses"), WorldGroup(ALONE).build()
    group.replace(world)
    work = group.allreduce([torch.zeros(1, dtype=torch.int16)], AllreduceOptions())
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        work.wait() if waits else group.check()
    assert not group.failed
    if waits:
        group.check()
    group.close()
