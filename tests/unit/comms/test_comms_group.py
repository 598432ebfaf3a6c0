"""The groups of a closed world are destroyed by a thread of their own; one not built says why."""

import queue
import threading

import pytest

from elastane.comms.construction import Construction, Made
from elastane.comms.group import ALONE, WorldGroup
from elastane.errors import PeerLostError

DEADLINE_S = 30.0


class Destroyed:
    """Replaces torch's group, whose destructor may block the thread that drops it last."""

    def __init__(self, seen):
        self._seen = seen

    def __del__(self):
        self._seen.put(threading.current_thread().name)


def test_a_group_that_an_exception_still_refers_to_is_destroyed_by_the_closing_thread():
    destroyed = queue.SimpleQueue()
    world = WorldGroup(ALONE)
    world._made = Made(Destroyed(destroyed), None, None)

    def fails():
        group = world._made.group
        raise RuntimeError(f"a member of {type(group).__name__} was lost")

    try:
        fails()
    except RuntimeError as error:
        held = error
    world.close()
    assert destroyed.empty(), "the frame of the exception refers to it"
    del held
    assert destroyed.get(timeout=DEADLINE_S) == "elastane-close"


def test_a_group_that_is_not_built_says_why_and_which_member_was_not_reached(monkeypatch):
    said = "Gloo connectFullMesh failed with No route to host, remote=[10.0.0.2]:4711\nmore"

    def fail(_):
        raise RuntimeError(said)

    monkeypatch.setattr(Construction, "run", fail)
    with pytest.raises(PeerLostError) as caught:
        WorldGroup(ALONE).build()
    assert caught.value.what == f"world alone has no process group: {said.splitlines()[0]}"
