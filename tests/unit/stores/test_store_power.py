"""A loss of power leaves what the file store has acknowledged, and what a process has read from it.

Each test records the file operations of a real store, and reads each state of the folder that a
loss of power may leave behind any of them.
"""

import asyncio
import contextlib

import pytest
from power_loss import KilledError, Recorder, check_power_loss

from elastane.process.offload import Offload
from elastane.stores.file import FileStore

# The folder above it does not exist either.
PLACE = "jobs/store"
# More than the pages that are kept.
WRITES = 12


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """Run the operations on the folder in this thread."""

    async def run(self, call, timeout_s):
        return call()

    monkeypatch.setattr(Offload, "run", run)


@pytest.fixture
def top(tmp_path):
    (tmp_path / "top").mkdir()
    return tmp_path / "top"


async def versions(store):
    """Return the version of the entry, and the term of the lease."""
    entry = await store.get("a/k")
    assert entry is None or entry.value == b"%d" % entry.version
    page = store.terms("a/seat").latest().page
    return entry.version if entry else 0, page.number if page else 0


def holds(folder, acknowledged):
    """The store has the versions and terms that were acknowledged, or later ones."""
    found = asyncio.run(versions(FileStore(folder / PLACE)))
    for said in acknowledged:
        assert found[0] >= said[0], f"version {found[0]}"
        assert found[1] >= said[1], f"term {found[1]}"


async def writes(store, recorder, first=0, count=WRITES):
    """Write versions of a key, and take and release a lease in between."""
    for version in range(first, first + count):
        await store.compare_and_set("a/k", b"%d" % (version + 1), version)
        recorder.acknowledge((version + 1, 0))
        if version % 4 == 1:
            lease = await store.lease("a/seat", b"node", 60.0)
            recorder.acknowledge((version + 1, lease.term))
            await store.end_lease("a/seat", lease.term)


def test_what_was_acknowledged_survives_a_loss_of_power_at_any_operation(top, monkeypatch):
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top)
        asyncio.run(writes(FileStore(top / PLACE), recorder))
    assert check_power_loss(recorder.operations, holds) > 50


def read(top, monkeypatch, without=()):
    """Kill a writer before each of its operations, and read and write in another process.

    Check what a loss of power leaves of what that process has read.
    """
    at, was_killed, seen = -1, True, set()
    while was_killed:
        at += 1
        folder = top / str(at)
        folder.mkdir()
        with monkeypatch.context() as patched:
            recorder = Recorder(patched, folder, without)
            recorder.kill_before = at
            with contextlib.suppress(KilledError):
                asyncio.run(writes(FileStore(folder / PLACE), recorder, count=2))
            first, was_killed = len(recorder.operations), recorder.is_killed
            recorder.revive()
            other = FileStore(folder / PLACE)
            found = asyncio.run(versions(other))
            recorder.acknowledge(found)
            asyncio.run(writes(other, recorder, found[0], 1))
        check_power_loss(recorder.operations, holds, first, seen)


def test_what_was_read_survives_a_loss_of_power(top, monkeypatch):
    """It may not be durable when it is read: its writer was killed before its fsync."""
    read(top, monkeypatch)


CALLS = [
    "Pages._write of a file",
    "Root.make_durable of a folder",
    "sync_folder of a folder",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_fsync_is_found(top, monkeypatch, call):
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, top, without=[call])
        asyncio.run(writes(FileStore(top / PLACE), recorder))
    with pytest.raises(AssertionError, match="the power was lost"):
        check_power_loss(recorder.operations, holds)
