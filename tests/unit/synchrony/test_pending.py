"""An operation between its issue and its delivery: its contribution, and the scale of its sum."""

import threading
from dataclasses import replace

import pytest
import torch

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


def test_a_wait_for_the_future_of_an_operation_counts_as_a_wait_for_its_work():
    tensor, waited = torch.ones(1), []
    pending = PendingOperation(7, Call(SUM, [tensor], [tensor], lambda *_: None), NOTHING)
    work = OrderedWork(pending, threading.Condition(threading.RLock()), waited.append)
    future = work.get_future()
    chained = future.then(lambda done: done.value()[0])
    pending.finish()
    assert chained.wait().item() == 1 and future.done() and not waited
    assert future.wait()[0].item() == 1 and waited == [7]
