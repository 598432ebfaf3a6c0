"""Which blocks of frameworks, that one worker runs first, follow the loss of that worker."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from elastane.integrations.transformers import let_one_go_first


@pytest.mark.parametrize(
    ("local", "nodes", "expected"),
    [(True, "1", "ours"), (True, "2", "theirs"), (False, "2", "ours")],
)
def test_the_block_of_a_trainer_follows_losses_unless_each_node_has_a_first_worker(
    monkeypatch, local, nodes, expected
):
    ran = []

    def noting(word):
        @contextmanager
        def note(*_):
            ran.append(word)
            yield

        return note

    arguments = type("Arguments", (), {"main_process_first": noting("theirs")})
    let_one_go_first(arguments, SimpleNamespace(first_alone=noting("ours")))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    with arguments().main_process_first(local=local, desc="tokenizing"):
        ran.append("block")
    assert ran == [expected, "block"]
