"""The call site of a collective tells which part of a training step issued it."""

import torch
from torch.utils.checkpoint import checkpoint

from elastane.synchrony import callsites


def passes_of(use_reentrant: bool) -> list[bool]:
    """Return whether gradients of a layer, and of a checkpointed one, come in a nested pass."""
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    seen = []
    for layer in layers:
        layer.weight.register_hook(lambda _: seen.append(callsites.is_in_nested_backward()))
    inner = checkpoint(layers[1], torch.ones(1, 2).requires_grad_(), use_reentrant=use_reentrant)
    layers[0](inner).sum().backward()
    return seen


def test_a_backward_pass_within_another_one_is_known():
    assert passes_of(use_reentrant=True) == [False, True]
    assert passes_of(use_reentrant=False) == [False, False]
    assert not callsites.is_in_nested_backward()
