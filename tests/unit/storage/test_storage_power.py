"""A loss of power leaves the checkpoints that were acknowledged, whole.

Each test records the file operations of real saves, and restores from each state of the folder that
a loss of power may leave behind any of them.
"""

import contextlib
import errno
import itertools
import os

import pytest
from power_loss import KilledError, Recorder, check_power_loss
from small_saves import key_of, opened, save, write_part

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import folder_name

FILES = {"a": b"weights", ".metadata": b"m"}
# The folder above it does not exist either.
PLACE = "jobs/place"


def restores(top, acknowledged):
    """The newest acknowledged step can be restored, or a later one, and nothing is damaged."""
    repository = opened(top / PLACE)
    point = repository.newest_valid()
    step = point.found.key.step if point.found else 0
    assert step >= max(acknowledged, default=0), f"step {step} is restored"
    damaged = [found.reason for found in repository.published() if found.reason]
    assert not damaged, "a damaged checkpoint counts as one"


def restores_an_older_one(top, acknowledged):
    """The same where a published file may be found damaged, and is skipped."""
    point = opened(top / PLACE).newest_valid() if acknowledged else None
    assert point is None or point.found.key.step >= max(acknowledged)


def saves_and_prunes(recorder, top):
    """Save three steps, and keep one checkpoint."""
    repository = opened(top / PLACE)
    for step in (1, 2, 3):
        save(repository, step, FILES)
        recorder.acknowledge(step)
        repository.prune(1)


@pytest.fixture
def top(tmp_path):
    (tmp_path / "top").mkdir()
    return tmp_path / "top"


def no_links(*args, **kwargs):
    raise OSError(errno.EPERM, "no hard links")


def test_what_was_saved_survives_a_loss_of_power_at_any_operation(top, monkeypatch):
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top)
        saves_and_prunes(recorder, top)
    assert check_power_loss(recorder.operations, restores) > 50


def test_what_was_saved_without_hard_links_survives_a_loss_of_power(top, monkeypatch):
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top)
        patched.setattr(os, "link", no_links)
        saves_and_prunes(recorder, top)
    assert check_power_loss(recorder.operations, restores_an_older_one) > 100


def test_a_large_file_is_durable_before_its_checkpoint_counts(top, monkeypatch):
    """It is written with O_DIRECT, by two threads."""
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top)
        save(opened(top / PLACE), 1, {"large": bytes(range(256)) * 4100 + b"tail"})
        recorder.acknowledge(1)
    check_power_loss(recorder.operations, restores)


def part(repository, folder, number):
    """Write one of two parts; its files may be those that a killed writer has left."""
    with contextlib.suppress(FileExistsError, CheckpointError):
        write_part(repository, folder, key_of(2), number, 2, files={f"f{number}": b"weights"})


def publishes(repository, folder):
    """Publish if all parts are there; return whether they were."""
    try:
        repository.publish_when_whole(folder, 2, wait_s=0)
    except CheckpointError:
        return False
    return True


def survived(top, monkeypatch, *, killed, linked=True, without=()):
    """Kill one of two writers before each of its operations; let the other one end the save.

    Check what a loss of power leaves. `killed` says which of them begins the save.
    """
    folder, acknowledged = folder_name(key_of(2), "00c0ffee"), 0
    at, was_killed, seen = -1, True, set()
    while was_killed:
        at += 1
        place = top / str(at)
        place.mkdir()
        with monkeypatch.context() as patched:
            recorder = Recorder(patched, place, without)
            if not linked:
                patched.setattr(os, "link", no_links)
            survivor = opened(place / PLACE)
            if killed == "second":  # The survivor has an older checkpoint, and its own part.
                save(survivor, 1, FILES)
                recorder.acknowledge(1)
                part(survivor, folder, 1)
            recorder.kill_before = len(recorder.operations) + at
            with contextlib.suppress(KilledError):
                other = opened(place / PLACE)
                part(other, folder, 0)
                publishes(other, folder)
            first, was_killed = len(recorder.operations), recorder.is_killed
            recorder.revive()
            for number in (1, 0):
                part(survivor, folder, number)
            if publishes(survivor, folder):
                recorder.acknowledge(2)
                acknowledged += 1
            survivor.prune(1)
        check = restores if linked else restores_an_older_one
        check_power_loss(recorder.operations, check, first, seen)
    return acknowledged


LINKS = [pytest.param(True, id="links"), pytest.param(False, id="no links", marks=pytest.mark.soak)]


@pytest.mark.parametrize("linked", LINKS)
@pytest.mark.parametrize("killed", ["first", "second"])
def test_a_survivors_save_survives_a_loss_of_power(top, monkeypatch, killed, linked):
    """What the survivor finds may not be durable: its writer was killed before its fsync."""
    assert survived(top, monkeypatch, killed=killed, linked=linked) > 1


def test_files_of_a_killed_writer_that_are_not_made_durable_are_found(top, monkeypatch):
    without = ["FolderStorage.make_durable of a folder"]
    with pytest.raises(AssertionError, match="the power was lost"):
        survived(top, monkeypatch, killed="second", without=without)


def test_an_older_checkpoint_is_removed_once_the_newer_one_is_durable(top, monkeypatch):
    """The writer of the newer one is killed before any of its operations; another one prunes."""
    seen = set()
    for at in itertools.count():
        place = top / str(at)
        place.mkdir()
        with monkeypatch.context() as patched:
            recorder = Recorder(patched, place)
            save(opened(place / PLACE), 1, FILES)
            recorder.acknowledge(1)
            recorder.kill_before = len(recorder.operations) + at
            with contextlib.suppress(KilledError):
                save(opened(place / PLACE), 2, FILES)
            first, was_killed = len(recorder.operations), recorder.is_killed
            recorder.revive()
            opened(place / PLACE).prune(1)
        check_power_loss(recorder.operations, restores, first, seen)
        if not was_killed:
            break
    assert at > 10


CALLS = [
    "AlignedFile.fill of a file",
    "FolderStorage._create of a file",
    "FolderStorage._create of a folder",
    "FolderStorage.remove of a folder",
    "sync_folder of a folder",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_fsync_is_found(top, monkeypatch, call):
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top, without=[call])
        saves_and_prunes(recorder, top)
    with pytest.raises(AssertionError, match="the power was lost"):
        check_power_loss(recorder.operations, restores)
