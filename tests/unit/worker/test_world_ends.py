"""The end of one world, read from the control socket, does not end the next one."""

import pytest

from elastane.worker.unmodified import UnmodifiedWorker
from elastane.worker.world import Worlds


class World:
    """A world that notes whether it was aborted."""

    def __init__(self):
        self.aborted = False

    def abort(self):
        self.aborted = True


class Line:
    """A control socket; `meanwhile` is what the other thread does as this one asks it."""

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
