"""A script that averages by its own sums asks for the size of each world, or all restart."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import AllreduceOptions, ReduceOp

from elastane.synchrony.operations import Identity
from elastane.synchrony.ordered import OrderedGroup
from elastane.synchrony.rules import Switch, View

A, B, C = (Identity(number) for number in (1, 2, 3))


class Restarted(Exception):
    """All workers restart."""


def restart(reason):
    raise Restarted(reason)


def group_that_has_shrunk(monkeypatch, *, keeps_ranks=False):
    """Return a group whose program sees two members after three."""
    host = SimpleNamespace(follows=False, restart=restart, show=lambda *_: None)
    group = OrderedGroup(host, keeps_ranks=keeps_ranks)
    monkeypatch.setattr(group, "_issue", lambda *_: None)
    group._member.identity = A
    group._member.begin(View((1, 0), (A, B, C)))
    group._show_if_changed()
    group._member.visible = (A, B)
    group._show_if_changed()
    return group


def add_up(group, tensor=None, reduction=ReduceOp.SUM):
    """Start a sum, or another reduction, as the script does."""
    options = AllreduceOptions()
    options.reduceOp = reduction
    group._operate("allreduce", ([torch.ones(2) if tensor is None else tensor], options), {})


def step(group):
    """Begin a step of an optimizer."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    group._steps.begin(optimizer, (optimizer,), {})


def ask(group, module="train"):
    exec("group.size()", {"__name__": module, "group": group})


def test_a_step_with_a_sum_whose_size_was_not_asked_for_restarts_all(monkeypatch):
    group = group_that_has_shrunk(monkeypatch)
    add_up(group)
    ask(group, "torch.utils.data.distributed")
    with pytest.raises(Restarted, match="has not asked"):
        step(group)


@pytest.mark.parametrize("calls", [(add_up, ask), (ask, add_up)], ids=["after", "before"])
def test_a_script_that_asks_before_or_after_each_sum_continues(monkeypatch, calls):
    group = group_that_has_shrunk(monkeypatch)
    for call in calls:
        call(group)
    step(group)


def test_a_hook_that_sums_gradients_of_ddp_has_to_ask_as_well(monkeypatch):
    group = group_that_has_shrunk(monkeypatch)
    group._layouts[1] = SimpleNamespace(is_known=True, has=lambda _: False)
    gradient = torch.ones(1, requires_grad=True)
    gradient.register_hook(lambda _: add_up(group))
    gradient.sum().backward()
    with pytest.raises(Restarted, match="has not asked"):
        step(group)


@pytest.mark.parametrize(
    ("tensor", "reduction"),
    [(torch.ones(2, dtype=torch.int64), ReduceOp.SUM), (torch.ones(2), ReduceOp.MAX)],
    ids=["counts", "a maximum"],
)
def test_reductions_that_are_not_divided_restart_none(monkeypatch, tensor, reduction):
    group = group_that_has_shrunk(monkeypatch)
    add_up(group, tensor, reduction)
    step(group)


class Stream:
    """A shared state without a length."""

    def __len__(self):
        raise TypeError


@pytest.mark.parametrize("exempt", ["sees its first world", "has a DDP module", "shares its state"])
def test_sums_that_are_scaled_or_of_no_gradients_restart_none(monkeypatch, exempt):
    group = group_that_has_shrunk(monkeypatch, keeps_ranks=exempt == "sees its first world")
    if exempt == "has a DDP module":
        group._layouts[1] = SimpleNamespace()
    if exempt == "shares its state":
        group._shared = Stream()
    add_up(group)
    step(group)


@pytest.mark.parametrize(("keeps_ranks", "sizes"), [(False, (3, 2, 2, 3)), (True, (3, 3, 3, 3))])
def test_a_callback_sees_the_size_that_belongs_to_its_result(monkeypatch, keeps_ranks, sizes):
    group = OrderedGroup(SimpleNamespace(follows=False), keeps_ranks=keeps_ranks)
    group._member.identity = A
    group._member.begin(View((1, 0), (A, B, C)))
    group._shown = group._first = (A, B, C)
    group._member._pending = [Switch(5, (A, B))]
    seen = []
    for number in (4, 5, 6):
        with group.seeing(number):
            group.has_waited(number)  # Not the program: it may be at any place meanwhile.
            seen.append(group.size())
    assert (*seen, group.size()) == sizes
