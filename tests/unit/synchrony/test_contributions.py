"""What a member contributes, put back into tensors of the program by another thread."""

import pytest
import torch

from elastane.synchrony.contributions import Copied, overwrite


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
