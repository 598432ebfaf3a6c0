"""The end of one world, read from the control socket, does not end the next one."""

import pytest

from elastane.protocol.diagnosis import is_state_lost
from elastane.protocol.model import Failure
from elastane.worker import unmodified
from elastane.worker.unmodified import UnmodifiedWorker
from elastane.worker.world import Worlds


class World:
    """A world that records whether it was aborted."""

    def __init__(self):
        self.aborted = False

    def abort(self):
        self.aborted = True


class Line:
    """A control socket; `meanwhile` runs during a read, in place of another thread."""

    def __init__(self):
        self.ended = False
        self.meanwhile = None

    @property
    def world_has_ended(self):
        ended = self.ended
        if self.meanwhile is not None:
            self.meanwhile()
        return ended


def building(kind, line):
    """Return a worker in a world, the world, and a function that takes it to another one."""
    worker = Worlds(line) if kind is Worlds else UnmodifiedWorker(line, None, keeps_ranks=True)

    def enter(world):
        line.ended = False
        worker._building = (world,) if kind is Worlds else world

    world = World()
    enter(world)
    return worker, world, enter


@pytest.mark.parametrize("kind", [Worlds, UnmodifiedWorker])
def test_a_world_that_has_ended_is_aborted(kind):
    line = Line()
    worker, world, _ = building(kind, line)
    worker._end_world()
    assert not world.aborted
    line.ended = True
    worker._end_world()
    assert world.aborted


@pytest.mark.parametrize("kind", [Worlds, UnmodifiedWorker])
def test_the_next_world_is_left_alone_if_it_is_entered_meanwhile(kind):
    line = Line()
    worker, former, enter = building(kind, line)
    line.ended, following = True, World()
    line.meanwhile = lambda: enter(following)
    worker._end_world()
    assert former.aborted
    assert not following.aborted


@pytest.mark.parametrize("state_lost", [True, False])
def test_an_unmodified_worker_says_whether_the_state_of_the_job_was_lost(
    monkeypatch, capsys, state_lost
):
    """The coordinator reads it in the worker's last words, and then charges no second restart."""
    worker, *_ = building(UnmodifiedWorker, Line())
    monkeypatch.setattr(unmodified.os, "_exit", lambda code: None)
    worker.restart("no worker is left", state_lost=state_lost)
    said = Failure(local_rank=0, rank=0, pid=7, exit_code=75, message=capsys.readouterr().err)
    assert is_state_lost(said) == state_lost
