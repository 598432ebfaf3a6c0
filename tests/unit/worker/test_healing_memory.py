"""A joining worker allocates its optimizers' state, and is not changed otherwise."""

import pytest
import torch

from elastane.worker.healing import room_for


def made(kind, **settings):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).requires_grad_(False)]
    net = torch.nn.Sequential(*layers)
    return net, kind(net.parameters(), **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adagrad, {}),
    ],
    ids=["adam", "amsgrad", "sgd", "momentum", "rmsprop", "adagrad"],
)
def test_there_is_memory_for_each_moment(kind, settings):
    net, optimizer = made(kind, **settings)
    if optimizer.state:
        assert room_for([optimizer]) == [], "it is there already"
        return
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = sorted(tuple(each.shape) for each in room_for([optimizer]))
    assert not optimizer.state
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    held = [v for state in optimizer.state.values() for v in state.values()]
    assert found == sorted(tuple(v.shape) for v in held if torch.is_tensor(v) and v.dim())


class Others(torch.optim.SGD):
    made = 0

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        type(self).made += 1


def test_no_twin_is_made_of_others_optimizers():
    _, optimizer = made(Others, lr=0.1, momentum=0.9)
    assert room_for([optimizer]) == []
    assert Others.made == 1


def test_optimizers_that_cannot_be_probed_are_skipped():
    _, optimizer = made(torch.optim.LBFGS)
    assert room_for([optimizer]) == []
