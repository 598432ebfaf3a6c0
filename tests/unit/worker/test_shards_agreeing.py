"""For which updates the members of a sharded job wait for one another."""

from types import SimpleNamespace

import pytest
import torch

from elastane.worker.shard_healing import Shards
from elastane.worker.shard_plan import OwnChanges

ONE, TWO = object(), object()


@pytest.fixture
def member(monkeypatch):
    """Return one member, and how often it has waited for the others."""
    waits = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: waits.append(1))

    def make(*, sole=False):
        group = SimpleNamespace(check=lambda: None)
        undo = SimpleNamespace(is_whole=False, follow=lambda: None, own_changes=OwnChanges.NONE)
        health = SimpleNamespace(tracked=SimpleNamespace(others=[]))
        mesh = SimpleNamespace(is_sole=sole)
        return Shards(group, mesh, health, undo, came_later=False), undo, waits

    return make


def test_each_optimizer_agrees_once_in_its_turn(member):
    shards, undo, waits = member()
    for optimizer in (ONE, ONE, TWO):
        shards.agree(optimizer)
    undo.is_whole = True
    shards.agree(None)
    assert len(waits) == 2


def test_a_body_in_which_not_all_stepped_waits_at_its_end(member):
    shards, _, waits = member()
    shards.agree(ONE)
    shards.agree(None)
    assert len(waits) == 2


def test_a_single_replica_needs_no_agreement(member):
    shards, _, waits = member(sole=True)
    shards.agree(ONE)
    shards.agree(None)
    assert not waits


def test_sharded_tensors_of_an_object_that_is_no_module_count_as_changed(member):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    shards, _, _ = member()
    kept = {"mean": [torch.zeros(3)]}
    shards._tracked.others.append(SimpleNamespace(state_dict=lambda: kept))
    assert shards._own_changes() is OwnChanges.NONE
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    kept["mean"].append(DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False))
    assert shards._own_changes() is OwnChanges.INSIDE
