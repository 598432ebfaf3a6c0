"""An operation between its issue and its delivery: its contribution, and the scale of its sum."""

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from elastane.comms.group import ALONE, WorldGroup
from elastane.comms.works import WorkLog
from elastane.synchrony.calls import Call
from elastane.synchrony.contributions import Copied
from elastane.synchrony.operations import Signature, Site
from elastane.synchrony.pending import OrderedWork, PendingOperation
from elastane.synchrony.rules import Start

NOTHING = Copied([])
SUM = Signature("allreduce", reduction="sum", site=Site.FIRST_SIZE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("first", "left"), [(3, 3), (4, 3), (7, 3), (8, 5), (16, 15)])
@pytest.mark.parametrize("mode", [True, False])
def test_counts_that_a_script_sums_as_floats_stay_whole_numbers(mode, dtype, first, left):
    with torch.inference_mode(mode):
        parts = torch.arange(1000, dtype=dtype)
        tensor = parts.clone()
    call = Call(SUM, [tensor], [tensor], lambda group, root: None)
    pending = PendingOperation(0, call, Copied([tensor]))
    pending.prepare(Start(0, is_repeated=True, divided_by=first, divisor=left))
    with torch.inference_mode(mode):
        for _ in range(left - 1):
            tensor += parts
    pending.scale_sum()
    assert torch.equal(tensor, first * parts)


def test_a_sum_that_runs_again_is_scaled_to_the_last_number_of_members():
    tensor = torch.ones(1)
    pending = PendingOperation(0, Call(SUM, [tensor], [tensor], lambda *_: None), Copied([tensor]))
    pending.prepare(Start(0, divided_by=4, divisor=3))
    tensor.fill_(0.5)  # Its first world has ended in the middle of the sum.
    pending.prepare(Start(0, is_repeated=True, divided_by=4, divisor=2))
    assert tensor.tolist() == [1.0]
    pending.scale_sum()
    assert tensor.tolist() == [2.0]


@pytest.mark.parametrize(("part", "first", "left", "scaled"), [(7, 4, 3, 28), (1, 8, 7, 8)])
def test_a_count_of_a_script_that_trains_is_scaled_to_the_first_size(part, first, left, scaled):
    tensor = torch.tensor([left * part])
    signature = replace(SUM, counts=True, is_tally=True)
    pending = PendingOperation(0, Call(signature, [tensor], [tensor], lambda *_: None), NOTHING)
    pending.prepare(Start(0, divided_by=first, divisor=left))
    pending.scale_sum()
    assert tensor.tolist() == [scaled] and tensor.dtype == torch.int64


@pytest.mark.parametrize(("first", "left"), [(4, 3), (8, 7), (16, 9)])
def test_votes_reach_the_first_size_only_if_all_that_are_left_have_voted(first, left):
    for voted in range(left + 1):
        tensor = torch.tensor(voted)
        signature = replace(SUM, counts=True, is_tally=True)
        pending = PendingOperation(0, Call(signature, [tensor], [tensor], lambda *_: None), NOTHING)
        pending.prepare(Start(0, divided_by=first, divisor=left))
        pending.scale_sum()
        assert (tensor.item() == first) is (voted == left) and (tensor.item() > 0) is (voted > 0)


@pytest.mark.parametrize(
    ("own", "total", "gathers"),
    [
        ([0, 0, 5, 6, 0, 0], [3, 4, 5, 6, 0, 0], True),
        ([0, 0, 5, 6, 0, 0], [3, 4, 5, 9, 0, 0], False),
        ([0, 0, 5, 6, 0, 0], [3, 4, 5, 6, 0, 1], False),
        ([0, 1, 5, 6, 0, 0], [3, 5, 5, 6, 0, 0], False),
        ([0, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], False),
        ([0, 5], [3, 5], False),
    ],
    ids=["slices", "shared", "of the lost one", "of others", "zeros", "of another length"],
)
def test_a_sum_of_slices_with_zeros_elsewhere_is_a_gather(own, total, gathers):
    tensor = torch.tensor(own, dtype=torch.float)
    pending = PendingOperation(0, Call(SUM, [tensor], [tensor], lambda *_: None), Copied([tensor]))
    tensor.copy_(torch.tensor(total))
    pending.prepare(Start(0, divided_by=3, divisor=3))
    assert not pending.gathers(1, 3, [2])  # Nothing is scaled.
    pending.prepare(Start(0, divided_by=3, divisor=2))
    assert pending.gathers(1, 3, [2]) is gathers


class Reader:
    """Collects for which operations the program has waited, and whose members a thread sees."""

    def __init__(self):
        self.waited, self.seen = [], []
        self.has_waited = self.waited.append

    @contextlib.contextmanager
    def seeing(self, number):
        self.seen.append(number)
        yield
        self.seen.pop()


@pytest.fixture
def issued():
    """Return an operation, the program's work of it, and the reader that notes its waits."""
    tensor, reader = torch.ones(1), Reader()
    pending = PendingOperation(7, Call(SUM, [tensor], [tensor], lambda *_: None), NOTHING)
    return pending, OrderedWork(pending, threading.Condition(threading.RLock()), reader), reader


def test_a_wait_for_the_future_of_an_operation_counts_as_a_wait_for_its_work(issued):
    pending, work, reader = issued
    future = work.get_future()
    pending.finish()
    assert future.done() and not reader.waited
    assert future.wait()[0].item() == 1 and reader.waited == [7]


def test_so_does_a_wait_for_what_its_callbacks_make_of_the_result(issued):
    pending, work, reader = issued
    first = work.get_future().then(lambda done: done.value()[0])
    chained = first.then(lambda done: done.value() + 1)
    pending.finish()
    assert chained.done() and not reader.waited
    assert chained.wait().item() == 2 and reader.waited == [7]


def test_callbacks_see_the_members_whose_result_they_get(issued):
    pending, work, reader = issued
    seen = []
    work.get_future().then(lambda _: seen.extend(reader.seen))
    work.get_future().add_done_callback(lambda _: seen.extend(reader.seen))
    pending.finish()
    work.get_future().then(lambda _: seen.extend(reader.seen))
    assert seen == [7, 7, 7] and reader.seen == []


def test_a_callback_that_fails_fails_the_wait_for_its_future(issued):
    pending, work, _ = issued
    chained = work.get_future().then(lambda _: 1 / 0)
    pending.finish()
    with pytest.raises(RuntimeError, match="division by zero"):
        chained.wait()


def test_a_backward_pass_waits_for_the_futures_of_its_hooks(issued):
    pending, work, reader = issued
    gradient = torch.ones(1, requires_grad=True)

    def hook(_):
        work.get_future().then(lambda done: done.value()[0])
        threading.Thread(target=pending.finish).start()

    gradient.register_hook(hook)
    gradient.sum().backward()
    assert reader.waited == [7]


def world_of(*, aborted=False):
    world = WorldGroup(ALONE)
    if aborted:
        world.abort()
    return SimpleNamespace(group=None, aborted=world.aborted, refuses=world.refuses)


@pytest.mark.parametrize("late", [True, False])
def test_the_program_gets_the_error_of_a_call_that_torch_refuses(late):
    refused = RuntimeError("Invalid scalar type")

    def begin(*_):
        if not late:
            raise refused
        return SimpleNamespace(wait=failing(refused), is_completed=lambda: True)

    tensor, world, reader = torch.ones(1), world_of(), Reader()
    log = WorkLog(world.refuses)
    pending = PendingOperation(0, Call(SUM, [tensor], [tensor], begin), Copied([tensor]))
    pending.begin(world, None, log)
    pending.wait(world)
    future = pending.future(reader)
    pending.finish()
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        OrderedWork(pending, threading.Condition(), reader).wait()
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        future.wait()
    assert log.failure is None and reader.waited[0] == 0


def failing(error):
    def wait(*_):
        raise error

    return wait


@pytest.mark.parametrize(
    ("text", "aborted"),
    [("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer", False), ("any", True)],
)
def test_an_error_of_a_lost_member_is_no_refusal(text, aborted):
    tensor, world = torch.ones(1), world_of(aborted=aborted)
    pending = PendingOperation(
        0, Call(SUM, [tensor], [tensor], failing(RuntimeError(text))), Copied([tensor])
    )
    pending.begin(world, None, WorkLog(world.refuses))
    with pytest.raises(RuntimeError, match=r"Connection closed|any"):
        pending.wait(world)
    assert pending.refusal is None
