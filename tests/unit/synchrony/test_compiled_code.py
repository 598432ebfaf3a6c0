"""Code of torch.compile under --in-place and in job.steps(): what it does in each call."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastane.comms.elastic import ElasticGroup
from elastane.comms.untraced import skipped
from elastane.process import collectives
from elastane.synchrony.ordered import OrderedGroup, watch_forwards


@pytest.fixture
def shown():
    """Make a group the default one, with a world of `size` members."""

    def show(group, size):
        dist.GroupMember.WORLD = group
        group._outside = 0, size
        group._world = SimpleNamespace(rank=0, size=size)

    torch._dynamo.reset()  # Code that an earlier test has compiled counts for all tests.
    yield show
    dist.GroupMember.WORLD = None


def test_a_compiled_module_waits_for_its_buckets_before_each_forward(monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "_pre_forward", lambda self, inputs: inputs + 1)
    watch_forwards()
    group, waited = OrderedGroup(host=None, keeps_ranks=True), []
    group.before_forward = waited.append
    module = SimpleNamespace(process_group=group, _use_python_reducer=False)

    def forward(inputs):
        return 2 * DistributedDataParallel._pre_forward(module, inputs)

    compiled = torch.compile(forward, backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [4, 4]
    assert waited == [module] * 2


def test_a_module_that_reduces_in_compiled_code_is_compiled_without_a_break(monkeypatch):
    for name in ("_pre_forward", "_post_forward"):
        monkeypatch.setattr(DistributedDataParallel, name, lambda self, tensor: tensor + 1)
    monkeypatch.setattr(DistributedDataParallel, "_elastane_records", False, raising=False)
    watch_forwards()
    collectives._watch_backwards()
    module = SimpleNamespace(_use_python_reducer=True)

    def forward(inputs):
        prepared = DistributedDataParallel._pre_forward(module, inputs)
        return DistributedDataParallel._post_forward(module, 2 * prepared)

    whole = torch.compile(forward, backend="eager", fullgraph=True)
    assert whole(torch.ones(1)).item() == 5


def test_a_backward_pass_in_compiled_code_asks_for_its_divisor(shown):
    group = OrderedGroup(host=SimpleNamespace(follows=False), keeps_ranks=True)
    shown(group, 3)
    engine = torch.autograd.Variable._execution_engine

    @skipped
    def ask(_gradient):  # from C++, as a reducer does
        engine.queue_callback(group.getSize)

    loss = torch.ones(1, requires_grad=True).sum()
    loss.register_hook(ask)
    torch.compile(torch.Tensor.backward, backend="eager")(loss)
    assert [*group._divisors.values()] == [3]


def part(total):
    """Divide a sum by the world size, as a script does."""
    return total / dist.get_world_size() + 0 * dist.get_rank()


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrderedGroup(host=SimpleNamespace(follows=False), keeps_ranks=False),
        lambda: OrderedGroup(host=SimpleNamespace(follows=True), keeps_ranks=True),
        ElasticGroup,
    ],
    ids=["--ranks-may-change", "a framework that follows", "job.steps()"],
)
def test_compiled_code_asks_for_the_world_size_in_each_call(shown, make):
    group = make()
    compiled = torch.compile(part, backend="eager")
    means = []
    for size in (3, 2):
        shown(group, size)
        means.append(compiled(torch.full((1,), 6.0)).item())
    assert means == [2, 3]


def test_compiled_code_without_breaks_cannot_ask_for_a_size_that_may_change(shown):
    shown(OrderedGroup(host=SimpleNamespace(follows=False), keeps_ranks=False), 3)
    whole = torch.compile(part, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="the world size inside of"):
        whole(torch.ones(1))


def test_compiled_code_may_keep_a_world_size_that_never_changes(shown):
    shown(OrderedGroup(host=SimpleNamespace(follows=False), keeps_ranks=True), 3)
    whole = torch.compile(part, backend="eager", fullgraph=True)
    assert whole(torch.full((1,), 6.0)).item() == 2


@pytest.mark.parametrize("compiles_first", [True, False])
def test_code_that_was_compiled_before_a_state_is_shared_asks_for_the_size_afterwards(
    shown, compiles_first
):
    host = SimpleNamespace(follows=False, shared=lambda: None)
    group = OrderedGroup(host=host, keeps_ranks=True)
    compiled = torch.compile(part, backend="eager")
    shown(group, 3)
    if compiles_first:
        assert compiled(torch.full((1,), 6.0)).item() == 2
    group.share(SimpleNamespace())
    for size in (3, 2):
        shown(group, size)
        assert compiled(torch.full((1,), 6.0)).item() == 6 / size
