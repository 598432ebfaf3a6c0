"""The folder of a file store: private, vanished, full, read-only, hanging."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_support import QUICK, asynchronous, elect, poll

from elastane.errors import ConfigurationError, LeaseLostError, StoreError
from elastane.stores.file import FileStore
from elastane.stores.jobs import JobKeys
from elastane.stores.protocol import ConflictError


@asynchronous
async def test_created_files_are_private_and_a_deleted_value_is_removed_from_the_disk(
    tmp_path,
) -> None:
    folder = tmp_path / "a" / "store"
    keys = JobKeys(FileStore(folder), "job")
    election = elect(keys.store, "job", QUICK)
    token = await keys.token()
    await election.campaign()
    for path in [folder, *folder.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert len(bytes.fromhex(token)) == 32
    await keys.tidy()
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if token.encode() in text]


@asynchronous
async def test_a_folder_that_every_user_can_write_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"chmod o-w {tmp_path}"):
        await FileStore(tmp_path).get("k")


@asynchronous
async def test_a_vanished_folder_is_named_and_not_created_again(tmp_path) -> None:
    folder = tmp_path / "shared"
    store = FileStore(folder)
    entry = await store.compare_and_set("k", b"1", 0)
    lease = await store.lease("leadership", b"x", 5.0)
    assert lease
    aside = folder.rename(tmp_path / "aside")
    calls = [
        lambda: store.get("k"),
        lambda: store.compare_and_set("k", b"2", 1),
        lease.renew,
        lambda: store.lease("other", b"x", 5.0),
    ]
    for empty in (False, True):
        if empty:
            folder.mkdir()  # as an unmounted file system leaves it
        for call in calls:
            with pytest.raises(StoreError, match=f"restore or mount {folder}"):
                await call()
        assert folder.exists() == empty
    folder.rmdir()
    aside.rename(folder)
    assert await store.get("k") == entry
    await lease.renew()


@asynchronous
async def test_a_path_that_is_a_file_is_named(tmp_path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreError, match=str(tmp_path / "f")):
        await FileStore(tmp_path / "f").get("k")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)]
    if os.getuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    path.chmod(0o700)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def remount_read_only(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)


@pytest.mark.root
@asynchronous
async def test_a_full_disk_is_named_and_the_holder_keeps_its_lease(small) -> None:
    store = FileStore(small)
    entry = await store.compare_and_set("k", b"1", 0)
    lease = await store.lease("leadership", b"x", 5.0)
    assert lease
    term = lease.term
    ballast = small / "ballast"
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(b"x" * (1 << 20))
    with pytest.raises(StoreError, match=r"No space left(.|\n)*next: free space"):
        await store.compare_and_set("k", b"2" * 10000, entry.version)
    await lease.renew()
    assert lease.term == term
    assert lease.held()
    assert await store.get("k") == entry
    ballast.unlink()
    await store.compare_and_set("k", b"2" * 10000, entry.version)
    assert not [name for name in os.listdir(small / "k" / "@entry") if "tmp" in name]


@pytest.mark.root
@asynchronous
async def test_a_read_only_folder_is_named_and_can_still_be_read(small) -> None:
    store = FileStore(small)
    entry = await store.compare_and_set("k", b"1", 0)
    remount_read_only(small)
    assert await FileStore(small).get("k") == entry
    with pytest.raises(StoreError, match=r"Read-only(.|\n)*next: mount that file system"):
        await store.compare_and_set("k", b"2", entry.version)


@pytest.mark.parametrize("late_s", [0.0, 0.1], ids=["in time", "a thread that begins late"])
@asynchronous
async def test_a_hanging_folder_blocks_neither_the_event_loop_nor_the_caller(
    tmp_path, monkeypatch, late_s
) -> None:
    hanging, release = threading.Event(), threading.Event()
    replace = FileStore._replace

    def replaced(*args: Any) -> Any:
        release.wait(late_s)
        return replace(*args)

    def on_step(step: str) -> None:
        if hanging.is_set() and step == "synced":
            release.wait(30)

    patient, store = FileStore(tmp_path), FileStore(tmp_path, timeout_s=1.0, on_step=on_step)
    entry = await patient.compare_and_set("k", b"1", 0)
    monkeypatch.setattr(FileStore, "_replace", replaced)
    hanging.set()
    begun, turns = time.monotonic(), 0
    writing = asyncio.ensure_future(store.compare_and_set("k", b"2", entry.version))
    while not writing.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(StoreError, match="did not answer within 1 s"):
        await writing
    assert time.monotonic() - begun < 20.0, "the folder hangs for 30 s"
    assert turns > 2, "the write blocked the event loop"
    hanging.clear()
    release.set()
    assert await patient.get("k") == entry
    folder = tmp_path / "k" / "@entry"
    await asyncio.to_thread(poll, lambda: len(os.listdir(folder)) == 1, "the late call ends")
    found = await patient.get("k")
    assert found == entry, "a write took effect after its caller was told it failed"


def test_a_process_ends_while_a_call_hangs() -> None:
    code = (
        "import asyncio, time\nfrom elastane.process.offload import Offload\n"
        "async def main():\n  try:\n    await Offload().run(lambda: time.sleep(60), 0.1)\n"
        "  except TimeoutError: print('bounded')\nasyncio.run(main())"
    )
    begun = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, timeout=90, text=True
    )
    assert output.stdout == "bounded\n"
    assert time.monotonic() - begun < 50


@asynchronous
async def test_a_holder_that_was_purged_is_deposed(tmp_path) -> None:
    store = FileStore(tmp_path)
    lease = await store.lease("job/leadership", b"x", 5.0)
    assert lease
    await store.purge("job")
    with pytest.raises(LeaseLostError):
        await lease.renew()


@asynchronous
async def test_a_conflict_leaves_no_temporary_file(tmp_path) -> None:
    store = FileStore(tmp_path)
    await store.compare_and_set("k", b"1", 0)
    with pytest.raises(ConflictError):
        await store.compare_and_set("k", b"2", 5)
    assert len(os.listdir(tmp_path / "k" / "@entry")) == 1
    shutil.rmtree(tmp_path / "k")
