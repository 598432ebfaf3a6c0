"""A state that is taken apart for each save anew, while what it is made of stays the same."""

import torch

from elastane.checkpoint.capture import Captured


def state(lr=0.1, size=3, **more):
    net = torch.nn.Linear(size, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net(torch.ones(size)).sum().backward()
    optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), **more}


def test_the_next_save_has_the_values_of_its_own_time():
    captured, now = Captured(state()), state(lr=0.7)
    names, identity = captured.names, captured.identity()
    assert captured.again(now)
    fresh = Captured(now)
    assert (captured.tree, captured.names, captured.identity()) == (fresh.tree, names, identity)
    assert captured.leaves() == fresh.leaves()
    assert captured.leaves()[0]["optimizer.param_groups.0.lr"] == 0.7
    live = [now["net"]["weight"], now["net"]["bias"]]
    assert [t.data_ptr() for t in captured.tensors[:2]] == [t.data_ptr() for t in live]


def test_another_shape_kind_or_part_is_another_state():
    for other in (state(size=4), state(extra=1), {"net": state()["net"]}):
        assert not Captured(state()).again(other)
    halved = state()
    halved["net"]["weight"] = halved["net"]["weight"].half()
    assert not Captured(state()).again(halved)
