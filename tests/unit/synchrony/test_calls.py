"""The data of a torch call: whether it is a count by which a script may divide."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import AllreduceOptions, ReduceOp

from elastane.synchrony.calls import ProgramStage, bucket_call, call_of
from elastane.synchrony.operations import Identity, Rule, Site
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.rules import View

MEMBERS = tuple(map(Identity, range(4)))


def signature_of(tensor, stage, site=Site.FIRST_SIZE):
    """Return the signature of a sum."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM
    return call_of("allreduce", ([tensor], options), {}, MEMBERS, site, stage).signature


@pytest.mark.parametrize(
    ("tensor", "stage"),
    [
        (torch.tensor(3), ProgramStage.TRAINING),
        (torch.tensor([3], dtype=torch.int32), ProgramStage.TRAINING),
        (torch.ones(1000, dtype=torch.int64), ProgramStage.TRAINING),
        (torch.tensor(3), ProgramStage.EVALUATION),
        (torch.tensor([2, 3]), ProgramStage.EVALUATION),
        (torch.ones(1, dtype=torch.uint8), ProgramStage.TRAINING),
    ],
)
def test_counts_that_a_script_sums_are_scaled_to_the_size_that_it_sees(tensor, stage):
    signature = signature_of(tensor, stage)
    assert signature.is_scaled and signature.rule is Rule.REPEAT and not signature.may_be_divided


@pytest.mark.parametrize(
    ("tensor", "stage", "site"),
    [
        (torch.ones(3, 3, dtype=torch.int64), ProgramStage.EVALUATION, Site.FIRST_SIZE),
        (torch.ones(100, dtype=torch.uint8), ProgramStage.TRAINING, Site.FIRST_SIZE),
        (torch.tensor(3), ProgramStage.TRAINING, Site.SCRIPT),
    ],
)
def test_other_integers_are_summed_over_the_survivors(tensor, stage, site):
    signature = signature_of(tensor, stage, site)
    assert not signature.is_scaled and signature.rule is Rule.REPEAT


def test_integers_in_a_backward_pass_are_gradients_that_may_be_divided():
    integers = torch.ones(100, dtype=torch.int8)
    signature = signature_of(integers, ProgramStage.BACKWARD, Site.SCRIPT)
    assert signature.rule is Rule.REFUSED and signature.may_be_divided
    assert signature_of(integers, ProgramStage.BACKWARD).is_scaled
    assert signature_of(integers, ProgramStage.BACKWARD, Site.AUTHORITY).rule is Rule.REPEAT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", [ReduceOp.SUM, ReduceOp.AVG])
def test_a_bucket_has_the_signature_of_any_other_call_of_the_reducer(dtype, reduction):
    options = AllreduceOptions()
    options.reduceOp = reduction
    args = ([torch.zeros(12, dtype=dtype)], options)
    call = bucket_call(*args)
    assert call.signature == call_of("allreduce", args, {}, MEMBERS, Site.REDUCER).signature
    assert call.outputs[0] is call.inputs[0] is args[0][0]


@pytest.mark.parametrize(("is_sparse", "word"), [(True, "sparse gradients"), (False, "")])
def test_a_loss_restarts_all_once_sparse_gradients_were_reduced(monkeypatch, is_sparse, word):
    group = OrderedGroup(host=SimpleNamespace(follows=False), keeps_ranks=True)
    group._member.begin(View((1, 0), MEMBERS))
    monkeypatch.setattr(group, "_start", lambda *_: None)
    tensor = torch.eye(3).to_sparse() if is_sparse else torch.eye(3)
    call = call_of("allreduce", ([tensor], AllreduceOptions()), {}, MEMBERS, Site.REDUCER)
    group._issue(call, None)
    assert group._member.refused.startswith(word) and bool(group._member.refused) is is_sparse
