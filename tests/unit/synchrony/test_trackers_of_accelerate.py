"""Accelerate's trackers after the loss of the main process, with a fake Accelerator."""

import pytest

from elastane.integrations.accelerate import _open_trackers_later, _require_trackers
from elastane.synchrony.visible import VisibleWorld


class RestartedError(Exception):
    """All workers restart."""


def restart(reason):
    """Restart all workers."""
    raise RestartedError(reason)


@pytest.fixture
def make():
    """Return a function that makes world and accelerator of a worker with this first rank."""

    def make(rank):
        world = VisibleWorld(restart)

        class Accelerator:
            """Logs to the trackers that it has opened."""

            log_with = ("tensorboard",)
            is_main_process = property(lambda self: world.rank == 0)

            def __init__(self):
                self.trackers, self.logged = [], []

            def init_trackers(self, name):
                """Open the trackers."""
                self.trackers.append(name)

            def log(self, value):
                """Log to the open trackers."""
                self.logged.append(value)

            def get_tracker(self, name):
                """Return a tracker by name."""
                return name

        _open_trackers_later(Accelerator, world)
        _require_trackers(Accelerator, world)
        world.show(rank, 3)
        return world, Accelerator()

    return make


def test_the_next_main_process_opens_the_trackers_that_it_has_asked_for_once(make):
    world, accelerator = make(1)
    accelerator.init_trackers("project")
    accelerator.log(1)
    assert not accelerator.trackers
    world.show(0, 2)
    accelerator.log(2)
    accelerator.log(3)
    assert accelerator.trackers == ["project"]


def test_the_loss_of_the_only_worker_that_has_asked_for_trackers_is_said_as_another_logs(
    make, capfd
):
    world, accelerator = make(1)
    accelerator.log(1)  # It is not the main process.
    world.show(0, 2)
    accelerator.log(2)
    accelerator.log(3)
    assert capfd.readouterr().err.count("no other has called accelerator.init_trackers") == 1
    assert not accelerator.trackers and accelerator.logged == [1, 2, 3]


def test_all_restart_as_a_script_asks_for_a_tracker_that_was_opened_by_a_lost_worker(make):
    world, accelerator = make(1)
    accelerator.get_tracker("tensorboard")
    world.show(0, 2)
    with pytest.raises(RestartedError, match="no other has called accelerator"):
        accelerator.get_tracker("tensorboard")


def test_a_script_without_trackers_logs_nothing_and_continues(make):
    world, accelerator = make(1)
    type(accelerator).log_with = ()
    world.show(0, 2)
    accelerator.log(1)
    world, first = make(0)
    first.log(1)
    assert accelerator.logged == first.logged == [1]
