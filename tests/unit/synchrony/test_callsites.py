"""The call site of a collective tells which part of a training step issued it."""

import sys
from types import SimpleNamespace

import torch
from accelerate.utils import DistributedType, random
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from elastane.process import collectives
from elastane.synchrony import callsites
from elastane.synchrony.operations import Site


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


def test_the_random_stream_that_accelerate_broadcasts_may_come_from_any_worker(monkeypatch):
    sites = []
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    monkeypatch.setattr(random, "AcceleratorState", lambda: state)
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda *_: sites.append(callsites.site_of(sys._getframe(1)))
    )
    random.synchronize_rng_states(["generator"], torch.Generator())
    assert sites == [Site.AUTHORITY]


def test_a_hook_of_torch_is_known_behind_the_recorder_of_collectives():
    sites = []
    names = {"site_of": lambda frame: sites.append(callsites.site_of(frame)), "sys": sys}
    record = {"__name__": collectives.__name__, **names}
    exec("def all_reduce(): site_of(sys._getframe())", record)
    exec("all_reduce()", {**record, "__name__": default_hooks.__name__})
    assert sites == [Site.HOOK]
