"""An operation between its issue and its delivery: its contribution, and the scale of its sum."""

import pytest
import torch

from elastane.synchrony.calls import Call
from elastane.synchrony.contributions import Copied
from elastane.synchrony.operations import Signature, Site
from elastane.synchrony.pending import PendingOperation
from elastane.synchrony.rules import Start

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
