"""A reused state dict is equal to the one that torch would make, after any change."""

import copy

import pytest
import torch
from torch import nn

from elastane.checkpoint.registered import ModuleState, OptimizerState


class Own(nn.Linear):
    """A module with its own state."""

    def get_extra_state(self):
        return {"times": 1}

    def set_extra_state(self, state):
        pass


class Spelled(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.ones(1)


def made():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ParameterList([nn.Parameter(torch.ones(2))])
    )
    net.register_buffer("kept", torch.ones(2))
    net.register_buffer("unsaved", torch.ones(3), persistent=False)
    net.register_buffer("none", None)
    net.register_parameter("nothing", None)
    return net


def insist_on_torchs(state, right):
    """Assert the same keys in the same order, with the same objects."""
    assert [*state] == [*right]
    for key, value in right.items():
        assert state[key] is value, key


def another_parameter(net):
    net[0].weight = nn.Parameter(torch.zeros(4, 3))


def another_buffer(net):
    net[1].running_mean = torch.zeros(4)


def another_part(net):
    net.add_module("new", nn.Linear(2, 2))


def another_part_in_its_place(net):
    net[0] = nn.Linear(3, 4)


def one_less(net):
    del net[2]


def another_name(net):
    net[0]._parameters["other"] = net[0]._parameters.pop("weight")
    net[0]._parameters["bias"] = net[0]._parameters.pop("bias")


def saved_from_now_on(net):
    net._non_persistent_buffers_set.clear()


def others_saved(net):
    net._non_persistent_buffers_set.clear()
    net._non_persistent_buffers_set.add("kept")


def there_from_now_on(net):
    net.none = torch.ones(1)


def other_mappings(net):
    net[0]._parameters = {name: nn.Parameter(torch.ones(1)) for name in net[0]._parameters}


def a_hook(net):
    def without_bias(_module, state, prefix, _metadata):
        del state[f"{prefix}bias"]

    net[1].register_state_dict_post_hook(without_bias)


def a_hook_before(net):
    net[1].register_state_dict_pre_hook(lambda module, *_: module.register_buffer("late", None))


CHANGES = [
    *(another_parameter, another_buffer, another_part, another_part_in_its_place, one_less),
    *(another_name, saved_from_now_on, others_saved, there_from_now_on, other_mappings),
    *(a_hook, a_hook_before),
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_modules_state_dict_is_rebuilt_when_its_contents_change(change):
    net = made()
    state = ModuleState(net)
    first = state()
    insist_on_torchs(first, net.state_dict(keep_vars=True))
    assert state() is first, "it was looked through"
    change(net)
    for _ in range(2):
        insist_on_torchs(state(), net.state_dict(keep_vars=True))


@pytest.mark.parametrize("kind", [Own, Spelled])
def test_a_module_with_extra_state_is_asked_each_time(kind):
    net = nn.Sequential(nn.Linear(2, 2), kind(2, 2))
    state = ModuleState(net)
    first, second = state(), state()
    assert [*first] == [*second] == [*net.state_dict()]
    assert first is not second


def test_a_part_that_occurs_twice_is_saved_twice():
    part = nn.Linear(2, 2)
    net = nn.Sequential(part, part)
    state = ModuleState(net)
    for _ in range(3):
        insist_on_torchs(state(), net.state_dict(keep_vars=True))


def trained(kind=torch.optim.AdamW, steps=1, **more):
    net = made()
    tensors = [each for each in net.parameters() if each is not None]
    optimizer = kind([{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.5}], lr=0.1, **more)
    for _ in range(steps):
        for each in tensors:
            each.grad = torch.ones_like(each)
        optimizer.step()
    return net, optimizer


def insist_on_optimizers(state, optimizer):
    right = optimizer.state_dict()
    assert [*state] == [*right]
    insist_on_torchs(state["state"], right["state"])
    assert state["param_groups"] == right["param_groups"]
    assert [[*g] for g in state["param_groups"]] == [[*g] for g in right["param_groups"]]


def a_rate(net, optimizer):
    optimizer.param_groups[1]["lr"] = 0.25


def a_new_setting(net, optimizer):
    optimizer.param_groups[0]["initial_lr"] = 1.0


def one_more_group(net, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def one_more_parameter(net, optimizer):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def another_optimizers_parameter(net, optimizer):
    former = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 3))
    optimizer.state.pop(former, None)


def a_step(net, optimizer):
    for each in net.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()


def what_was_loaded(net, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def nothing_any_more(net, optimizer):
    optimizer.state.clear()


def another_state(net, optimizer):
    optimizer.state[net[0].weight] = {"step": torch.ones(())}


def a_hook_of_the_optimizer(net, optimizer):
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})


OF_OPTIMIZERS = [
    *(a_rate, a_new_setting, one_more_group, one_more_parameter, another_optimizers_parameter),
    *(a_step, what_was_loaded, nothing_any_more, another_state, a_hook_of_the_optimizer),
]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("change", OF_OPTIMIZERS, ids=[each.__name__ for each in OF_OPTIMIZERS])
def test_an_optimizers_state_dict_is_rebuilt_when_its_contents_change(change, kind, steps):
    net, optimizer = trained(kind, steps)
    state = OptimizerState(optimizer)
    first = state()
    insist_on_optimizers(first, optimizer)
    assert state()["state"] is first["state"], "it was looked through"
    change(net, optimizer)
    for _ in range(2):
        insist_on_optimizers(state(), optimizer)


def test_a_returned_state_dict_keeps_its_groups_options():
    _, optimizer = trained()
    state = OptimizerState(optimizer)
    state()
    before = state()
    optimizer.param_groups[0]["lr"] = 7.0
    assert before["param_groups"][0]["lr"] == 0.1 and state()["param_groups"][0]["lr"] == 7.0
