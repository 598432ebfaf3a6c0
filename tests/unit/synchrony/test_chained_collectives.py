"""Collectives that follow one another by callbacks of futures are refused, not waited for."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from elastane.comms import ddp
from elastane.errors import ConfigurationError
from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.rules import View


@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_a_hook_of_torch_that_chains_collectives_is_refused_before_the_first_pass(name):
    module = SimpleNamespace(_comm_hooks=[(getattr(powerSGD_hook, name), None)])
    group = OrderedGroup(host=None, keeps_ranks=False)
    with pytest.raises(ConfigurationError, match=f"the communication hook {name}: not possible"):
        group.before_forward(module)


def test_a_hook_with_one_collective_is_accepted():
    hooks = default_hooks.fp16_compress_hook, default_hooks.allreduce_hook
    assert not ddp.chained_hook(SimpleNamespace(_comm_hooks=[(each, None) for each in hooks]))


def test_the_thread_that_delivers_results_starts_no_collective():
    group = OrderedGroup(host=None, keeps_ranks=False)
    group._member.begin(View((1, 0), (Identity(1), Identity(2))))
    group._thread = threading.current_thread()
    with pytest.raises(ConfigurationError, match="in a callback of another one's future"):
        group._refuse_delivering_thread("allreduce")
