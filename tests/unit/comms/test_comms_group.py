"""The groups of a world that was closed are destroyed by a thread of their own."""

import queue
import threading

from elastane.comms.construction import Made
from elastane.comms.group import ALONE, WorldGroup

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
