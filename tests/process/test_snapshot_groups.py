"""Two Checkpointers of one process: one snapshot server, and two separate states."""

from __future__ import annotations

import pytest
import torch
from snapshot_server_support import Node

import elastane


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as one:
        yield one


def begun(where, model):
    checkpoint = elastane.Checkpointer(where, every_steps=1)
    return checkpoint, checkpoint.restore({"model": model})


def test_each_of_two_checkpointers_gets_its_own_state_back(node, tmp_path):
    models = {"generator": torch.nn.Linear(7, 5), "critic": torch.nn.Linear(2, 3)}
    steps = {"generator": 2, "critic": 9}
    held = {name: begun(tmp_path / name, model)[0] for name, model in models.items()}
    for name, checkpoint in held.items():
        for step in range(1, steps[name] + 1):
            checkpoint.save(step)
        checkpoint.close()
    for name, model in models.items():
        fresh = torch.nn.Linear(model.in_features, model.out_features)
        checkpoint, restored = begun(tmp_path / name, fresh)
        assert restored.step == steps[name]
        assert torch.equal(fresh.weight, model.weight)
        checkpoint.close()
