"""A save reuses the structure of the previous one, and still notices every change."""

from __future__ import annotations

import threading

import pytest
import torch
from process_harness import DEADLINE_S
from snapshot_server_support import Node

import elastane
from elastane.checkpoint.checkpointer import Checkpointer


class Trained:
    def __init__(self, size: int = 4) -> None:
        self.net = torch.nn.Linear(size, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def objects(self) -> dict:
        return {"net": self.net, "optimizer": self.optimizer}

    def step(self) -> None:
        self.net(torch.ones(self.net.weight.shape[1])).sum().backward()
        self.optimizer.step()

    @property
    def momentum(self) -> torch.Tensor:
        return self.optimizer.state[self.net.weight]["momentum_buffer"]


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


@pytest.mark.parametrize("asked", [False, True])
def test_a_shape_changed_in_place_drops_an_automatic_save(tmp_path, caplog, node, asked):
    one, ck = Trained(), Checkpointer(tmp_path / "ck", every_steps=1)
    ck.restore(one.objects())
    for step in (1, 2, 3):
        one.step()
        ck.maybe_save(step)
    one.step()
    one.momentum.resize_(2, 2)
    if asked:
        ck.save(4)
    else:
        ck.maybe_save(4)
    ck._finish_copies()
    assert ("changed in place" in caplog.text) is not asked
    if not asked:
        ck.save(5)
    ck.wait()
    ck.close()
    found = elastane.load_checkpoint(tmp_path / "ck")
    assert found.step == (4 if asked else 5)
    assert torch.equal(found.state["optimizer"]["state"][0]["momentum_buffer"], one.momentum)


def test_weights_replaced_during_a_save_are_not_in_it(tmp_path, node):
    one = Trained()
    with Checkpointer(tmp_path / "ck", every_steps=1) as ck:
        ck.restore(one.objects())
        copier = ck._saver.copier
        copy_rest, exchanged = copier._copy_rest, threading.Event()

        def late(*args):
            assert exchanged.wait(DEADLINE_S)
            copy_rest(*args)

        copier._copy_rest = late
        for step in (1, 2, 3):
            one.step()
            weights = one.net.weight.data
            exchanged.clear()
            ck.save(step)
            one.net.weight.data = torch.full((2, 4), 7.0)
            exchanged.set()
            ck.wait()
            one.net.weight.data = weights
            found = elastane.load_checkpoint(tmp_path / "ck").state
            assert torch.equal(found["net"]["weight"], weights)


class Own(torch.nn.Linear):
    """A module with its own state_dict(), which takes no options."""

    def state_dict(self):
        return {"twice": self.weight.detach() * 2}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.weight.copy_(state["twice"] / 2)


def test_a_module_with_its_own_state_dict_is_respected(tmp_path, node):
    torch.manual_seed(1)
    own, other = Own(3, 2), Own(3, 2)
    with Checkpointer(tmp_path / "ck") as ck:
        ck.restore({"own": own})
        for step in (1, 2):
            with torch.no_grad():
                own.weight.mul_(1.5)
            ck.save(step)
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore({"own": other}).step == 2
    assert torch.equal(own.weight, other.weight)


def test_replaced_parameters_are_saved_as_they_are(tmp_path, node):
    one = Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        ck.restore(one.objects())
        for step in (1, 2, 3):
            one.step()
            ck.save(step)
            one.net.weight.data = torch.full((2, 4), float(step))
        one.net.bias = torch.nn.Parameter(torch.full((2,), 9.0))
        ck.save(4)
    other = Trained()
    with Checkpointer(tmp_path / "ck") as ck:
        assert ck.restore(other.objects()).step == 4
    assert other.net.weight.tolist() == [[3.0] * 4] * 2
    assert other.net.bias.tolist() == [9.0, 9.0]
