"""A joining worker whose first worlds end while they are built enters the next one."""

import pytest

from elastane.errors import PeerLostError
from elastane.synchrony.ordered import OrderedGroup


class Entered(Exception):
    """Raised when the joining worker reaches the world that can be built."""


class Host:
    """A worker whose first worlds end while they are built."""

    def __init__(self, worlds):
        self.broken = [PeerLostError(f"world {number}", slug="test") for number in range(worlds)]
        self.reported = []

    def show(self, rank, size):
        pass

    def shared(self):
        pass

    def enter(self, error):
        self.reported.append(error)
        if self.broken:
            raise self.broken.pop(0)
        raise Entered


class State:
    """A shared state that no world hands over."""

    def state(self):
        raise AssertionError("nobody has met")

    def load(self, state):
        raise AssertionError("nobody has met")


def test_a_joining_worker_continues_after_worlds_that_end_while_built():
    host = Host(worlds=2)
    first, second = host.broken
    group = OrderedGroup(host, keeps_ranks=False)
    group.begin_outside(0, 1)
    group.share(State())
    with pytest.raises(Entered):
        group.pass_boundary()
    assert host.reported == [None, first, second]
