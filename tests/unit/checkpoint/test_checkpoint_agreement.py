"""Ranks exchange their steps before a save; all get the same error about a differing one."""

import pytest
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.saving import Saver
from elastane.checkpoint.schedule import WriteThrottle
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import Key
from elastane.snapshots.messages import WriteProgress
from elastane.snapshots.writer import _is_gone
from elastane.storage import Repository, open_storage


class Known:
    known = "place"

    def ask(self):
        return True


class Idle:
    id, survives, replica_address = "server", True, ""
    writing = None

    def progress(self, fence):
        return WriteProgress(writing=self.writing)


class Two:
    """Two ranks; the other one sends the same data with its own step."""

    rank, size = 0, 2
    fence = (3, 1)

    def __init__(self, others_step):
        self.others_step = others_step

    def members(self):
        return self

    def numbers(self, said):
        return [list(said), [self.others_step, *list(said)[1:]]]


@pytest.mark.parametrize("other", [7, 8])
def test_ranks_that_save_different_steps_get_an_error(other):
    saver = Saver(Two(other), Idle(), "/nowhere", Known())
    captured = Captured({"x": torch.ones(2)})
    if other == 7:
        assert len(saver.agree(captured, SaveOrder(7, "asked", 3, ""), 1)) == 2
        return
    with pytest.raises(CheckpointError, match="different steps: 7, 8, by rank"):
        saver.agree(captured, SaveOrder(7, "asked", 3, ""), 1)


def test_a_save_abandoned_by_another_writer_is_noticed(tmp_path):
    repository = Repository(open_storage(str(tmp_path)))
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "part").write_text("mine")
    assert not _is_gone(repository, "save/part")
    (tmp_path / "save" / "part").unlink()
    assert _is_gone(repository, "save/part")


@pytest.mark.parametrize("survives", [True, False])
def test_frequent_saves_skip_storage_in_its_pause_but_requested_ones_do_not(survives):
    server, now_s = Idle(), [100.0]
    server.survives = survives
    saver, captured = Saver(Two(7), server, "/nowhere", Known()), Captured({"x": torch.ones(2)})
    saver._throttle = WriteThrottle(lambda: now_s[0])
    saver._throttle.begun(saver._world.fence)

    def busy(reason):
        return bool(saver.agree(captured, SaveOrder(7, reason, 3, ""), 1)[0].busy)

    assert not busy("step")
    server.writing = Key(0, 3, 1, 6)
    now_s[0] += 0.5
    assert busy("step") and busy("asked")
    server.writing = None
    # Without an agent there is no memory to go on from, and what is left out is lost.
    assert busy("step") is busy("time") is survives
    assert not busy("asked") and not busy("leave")
    now_s[0] += 7.4
    assert busy("step") is survives
    now_s[0] += 0.2
    assert not busy("step")
