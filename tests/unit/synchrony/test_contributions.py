"""A member's contribution to a sum, and the module of a bucket's gradients."""

from types import SimpleNamespace

import pytest
import torch

from elastane.synchrony.contributions import BucketLayout, Copied, overwrite, slices_among


def layout(*lengths, hooked=False, sparse=False):
    """Return a module's layout with buckets of these lengths; unknown with hooks or sparse ones."""
    buckets = []
    for length in lengths:
        parameter = torch.nn.Parameter(torch.zeros(length))
        bucket = SimpleNamespace(
            buffer=lambda length=length: torch.zeros(length),
            parameters=lambda parameter=parameter: [parameter],
            gradients=lambda length=length: [torch.zeros(length)],
        )
        buckets.append(bucket)

    def buckets_of_torch():
        assert not sparse, "torch refuses a sparse parameter here"
        return buckets

    module = SimpleNamespace(
        static_graph=False,
        _has_rebuilt_buckets=False,
        gradient_as_bucket_view=False,
        mixed_precision=None,
        _delay_all_reduce_params=(),
        _comm_hooks=[None] if hooked else [],
        _build_params_for_reducer=lambda: ([None], [sparse]),
        reducer=SimpleNamespace(_get_zeros_like_grad_buckets=buckets_of_torch),
    )
    found = BucketLayout()
    found.refresh(module)
    return found


def test_a_bucket_is_known_by_its_length_among_modules_of_different_shapes():
    layouts = [layout(4, 6), layout(5)]
    for length in (4, 5, 6):
        is_bucket, slices = slices_among(layouts, torch.zeros(length))
        assert is_bucket and slices[0].parameter.numel() == length
    assert slices_among(layouts, torch.zeros(7)) == (False, None)


@pytest.mark.parametrize("other", [layout(6, 4), layout(hooked=True), layout(sparse=True)])
def test_a_bucket_that_two_modules_may_have_is_copied(other):
    layouts = [layout(4, 6), other]
    for length in (4, 6, 6, 4):
        assert slices_among(layouts, torch.zeros(length)) == (True, None)


def made_in(mode):
    with torch.inference_mode(mode):
        return torch.tensor([3.0, 6.0])


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(("divided_by", "divisor", "factor"), [(0, 0, 1), (3, 3, 1), (3, 2, 1.5)])
def test_a_contribution_is_restored_scaled_whatever_mode_its_tensor_was_made_in(
    mode, divided_by, divisor, factor
):
    tensor = made_in(mode)
    contribution = Copied([tensor])
    overwrite(tensor, torch.zeros(2))
    contribution.restore(divided_by, divisor)
    assert tensor.tolist() == [3 * factor, 6 * factor]


def test_a_parameter_is_overwritten_where_gradients_are_recorded():
    parameter = torch.nn.Parameter(torch.zeros(2))
    overwrite(parameter, made_in(True))
    assert parameter.tolist() == [3.0, 6.0] and parameter.is_leaf
