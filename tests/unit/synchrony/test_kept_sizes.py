"""A script that averages by its own sums asks for the size of each world, or all restart."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import AllreduceOptions, ReduceOp

from elastane.synchrony.operations import Identity, Signature, Site
from elastane.synchrony.ordered import OrderedGroup, watch_futures
from elastane.synchrony.pending import OrderedFuture
from elastane.synchrony.rules import Switch, View
from elastane.synchrony.visible import VisibleWorld

A, B, C = (Identity(number) for number in (1, 2, 3))
NUMBER = 7  # of each operation


class Restarted(Exception):
    """All workers restart."""


def restart(reason):
    raise Restarted(reason)


def group_of_three(monkeypatch, *, keeps_ranks=False, shrinks=True):
    """Return a group of three members; the program sees two of them if it has shrunk."""
    host = SimpleNamespace(follows=False, restart=restart, show=lambda *_: None)
    group = OrderedGroup(host, keeps_ranks=keeps_ranks)
    monkeypatch.setattr(
        group, "_issue", lambda *_: SimpleNamespace(number=NUMBER, is_refused_at_call=False)
    )
    group._member.identity = A
    group._member.begin(View((1, 0), (A, B, C)))
    group._show_if_changed()
    if shrinks:
        shrink(group)
    return group


def shrink(group, waited_for=-1):
    """Let the program see two members, once it has waited for the operation of this number."""
    group._member.visible = (A, B)
    group.has_waited(waited_for)


def add_up(group, tensor=None, reduction=ReduceOp.SUM):
    """Start a sum, or another reduction, as the script does."""
    options = AllreduceOptions()
    options.reduceOp = reduction
    summed = [torch.full((2,), 0.5) if tensor is None else tensor]
    group._operate("allreduce", (summed, options), {})


def step(group):
    """Begin a step of an optimizer."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    group._steps.begin(optimizer, (optimizer,), {})


def ask(group, module="train"):
    exec("group.size()", {"__name__": module, "group": group})


def test_a_step_with_a_sum_whose_size_was_not_asked_for_restarts_all(monkeypatch):
    group = group_of_three(monkeypatch)
    add_up(group)
    ask(group, "torch.utils.data.distributed")
    with pytest.raises(Restarted, match="sums gradients itself, and has not asked"):
        step(group)


@pytest.mark.parametrize("calls", [(add_up, ask), (ask, add_up)], ids=["after", "before"])
def test_a_script_that_asks_before_or_after_each_sum_continues(monkeypatch, calls):
    group = group_of_three(monkeypatch)
    for call in calls:
        call(group)
    step(group)


def test_a_hook_that_sums_gradients_of_ddp_has_to_ask_as_well(monkeypatch):
    group = group_of_three(monkeypatch)
    group._layouts[1] = SimpleNamespace(is_known=True, has=lambda _: False)
    gradient = torch.ones(1, requires_grad=True)
    gradient.register_hook(lambda _: add_up(group))
    gradient.sum().backward()
    with pytest.raises(Restarted, match="sums gradients itself, and has not asked"):
        step(group)


def count(group):
    """Sum a count of tokens."""
    add_up(group, torch.tensor([5]))


def reduce_gradients(group):
    """Reduce a bucket of DistributedDataParallel."""
    group._call("allreduce", ([torch.ones(2)], AllreduceOptions()), {}, Site.REDUCER)


COUNTS = [torch.tensor([5]), torch.tensor(5.0), torch.ones(8, dtype=torch.int32)]


@pytest.mark.parametrize("tensor", COUNTS, ids=["integer", "whole float", "eight"])
@pytest.mark.parametrize("later", [reduce_gradients, step])
def test_gradients_of_a_loss_over_a_count_are_not_reduced_without_a_question(
    monkeypatch, tensor, later
):
    group = group_of_three(monkeypatch)
    group._layouts[1] = SimpleNamespace()
    add_up(group, tensor)
    with pytest.raises(Restarted, match="sums counts itself, and has not asked"):
        later(group)


@pytest.mark.parametrize("asks_after", [True, False])
def test_a_question_before_a_count_in_which_the_world_shrinks_is_of_the_old_size(
    monkeypatch, asks_after
):
    group = group_of_three(monkeypatch, shrinks=False)
    group._layouts[1] = SimpleNamespace()
    ask(group)
    count(group)
    shrink(group, NUMBER)
    if asks_after:
        ask(group)
        reduce_gradients(group)
        step(group)
    else:
        with pytest.raises(Restarted, match="ask for the size after the sum"):
            reduce_gradients(group)


def test_a_question_for_the_next_pass_comes_too_late_for_an_interrupted_count(monkeypatch):
    group = group_of_three(monkeypatch, shrinks=False)
    count(group)
    shrink(group, NUMBER)
    torch.nn.Identity()(torch.ones(1))  # no reduction of gradients shows it, as in no_sync()
    ask(group)
    with pytest.raises(Restarted, match="sums counts itself"):
        step(group)


def test_a_count_that_was_complete_before_the_world_shrank_is_of_the_size_before_it(monkeypatch):
    group = group_of_three(monkeypatch, shrinks=False)
    ask(group)
    count(group)
    group.has_waited(NUMBER)
    shrink(group, NUMBER + 1)
    step(group)


@pytest.mark.parametrize("is_trainer", [False, True])
def test_a_loop_of_the_scripts_own_has_to_ask_a_framework_that_follows(monkeypatch, is_trainer):
    group = group_of_three(monkeypatch, keeps_ranks=True, shrinks=False)
    group._host.follows, group._host.has_own_loop = True, not is_trainer
    shrink(group)
    count(group)
    if is_trainer:
        reduce_gradients(group)
        return
    with pytest.raises(Restarted, match="the size before: ask for the size after the sum"):
        reduce_gradients(group)
    exec("group.asked_size()", {"__name__": "accelerate.scheduler", "group": group})
    with pytest.raises(Restarted, match="sums counts itself"):
        reduce_gradients(group)
    exec("group.asked_size()", {"__name__": "train", "group": group})
    reduce_gradients(group)


GATHERED = [
    (torch.tensor([5]), True),
    (torch.tensor(5.0), True),
    (torch.tensor(2.0, dtype=torch.bfloat16), False),
    (torch.tensor(0.0), False),
    (torch.tensor(0.7), False),
    ([torch.tensor(1), torch.tensor(2)], False),
]


@pytest.mark.parametrize(("data", "is_count"), GATHERED)
def test_one_number_of_each_member_is_a_count_unless_it_may_be_a_loss(monkeypatch, data, is_count):
    group = group_of_three(monkeypatch)
    group._layouts[1] = SimpleNamespace()
    monkeypatch.setattr(c10d, "_get_default_group", lambda: group)
    assert VisibleWorld(restart).gathered(lambda: "gathered", data) == "gathered"
    if is_count:
        with pytest.raises(Restarted, match="sums counts itself"):
            reduce_gradients(group)
    else:
        reduce_gradients(group)


NO_COUNTS = [
    (torch.ones(9, dtype=torch.int64), ReduceOp.SUM),
    (torch.full((2,), 0.5), ReduceOp.SUM),
    (torch.ones(2), ReduceOp.MAX),
]


@pytest.mark.parametrize(("tensor", "reduction"), NO_COUNTS, ids=["many", "a loss", "a maximum"])
def test_reductions_that_divide_no_loss_restart_none(monkeypatch, tensor, reduction):
    group = group_of_three(monkeypatch)
    group._layouts[1] = SimpleNamespace()
    add_up(group, tensor, reduction)
    reduce_gradients(group)
    step(group)


def test_a_count_of_an_evaluation_restarts_none(monkeypatch):
    group = group_of_three(monkeypatch)
    with torch.no_grad():
        count(group)
    step(group)


def test_a_gather_of_a_framework_that_is_made_as_a_sum_restarts_none(monkeypatch):
    group = group_of_three(monkeypatch)
    with group.members_left():
        count(group)
    step(group)


class Stream:
    """A shared state without a length."""

    def __len__(self):
        raise TypeError


@pytest.mark.parametrize("exempt", ["sees its first world", "has a DDP module", "shares its state"])
def test_sums_that_are_scaled_or_of_no_gradients_restart_none(monkeypatch, exempt):
    group = group_of_three(monkeypatch, keeps_ranks=exempt == "sees its first world")
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


class Waits:
    """Records which operations a program waits for."""

    def __init__(self):
        self.numbers = []

    def has_waited(self, *numbers):
        self.numbers.append(numbers)

    def seeing(self, number):
        return nullcontext()


def done_future(number, reader):
    future = OrderedFuture((number,), reader)
    future.set_result([torch.tensor(number)])
    return future


@pytest.fixture
def _watched_futures(monkeypatch):
    for name in ("collect_all", "wait_all"):
        monkeypatch.setattr(torch.futures, name, getattr(torch.futures, name))
    watch_futures()


@pytest.mark.usefixtures("_watched_futures")
def test_a_wait_for_several_futures_is_one_for_their_operations():
    waits = Waits()
    futures = [done_future(number, waits) for number in (6, 4)]
    assert torch.futures.wait_all(futures) == [[torch.tensor(6)], [torch.tensor(4)]]
    both = torch.futures.collect_all([*futures, torch.futures.Future()])
    assert waits.numbers == [(4, 6)] and not both.done()
    torch.futures.collect_all(futures).then(lambda done: len(done.value())).wait()
    assert waits.numbers == [(4, 6), (4, 6)]


@pytest.mark.usefixtures("_watched_futures")
def test_a_failed_future_fails_a_wait_for_several():
    failed = OrderedFuture((7,), Waits())
    failed.set_exception(ValueError("refused"))
    with pytest.raises(Exception, match="refused"):
        torch.futures.wait_all([done_future(6, Waits()), failed])


def test_counts_that_are_waited_for_together_and_are_of_two_worlds_restart_all(monkeypatch):
    group = group_of_three(monkeypatch, shrinks=False)
    group._member._pending, group._member.delivered = [Switch(5, (A, B))], 7
    sums = Signature("allreduce", reduction="sum", counts=True)
    group._member._unread = dict.fromkeys((5, 6), sums)
    group.has_waited(5, 6)
    assert group.members == (A, B)
    group._member._pending, group._member.delivered = [Switch(8, (A,))], 9
    group._member._unread = dict.fromkeys((7, 8), sums)
    with pytest.raises(Restarted, match="was started before the world shrank"):
        group.has_waited(7, 8)
