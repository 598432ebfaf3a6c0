"""A file has the bytes of its regions, whichever way they were written."""

import errno
import mmap
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from elastane.protocol.checkpoints import CHUNK_BYTES
from elastane.storage import aligned
from elastane.storage.folder import FolderStorage

FOLDER = "step-000000000001.e0000.r000001.a00.00000000"
PATH = f"{FOLDER}/data"
MEMORY = mmap.mmap(-1, 3 * CHUNK_BYTES + 10_000)
MEMORY[:] = (b"elastane" * 997)[: 4096 + 17] * (len(MEMORY) // (4096 + 17)) + bytes(
    len(MEMORY) % (4096 + 17)
)


@pytest.fixture(params=["disk", "memory"])
def storage(request, tmp_path):
    """Yield storage on a disk and in memory, with different support for O_DIRECT."""
    if request.param == "disk":
        yield FolderStorage(tmp_path)
        return
    folder = tempfile.mkdtemp(prefix="elastane-test-", dir="/dev/shm")
    yield FolderStorage(Path(folder))
    shutil.rmtree(folder)


def held(storage, path=PATH):
    return storage.read(path)


@contextmanager
def pwrite(replaced):
    """Replace os.pwrite inside this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned.os, "pwrite", replaced)
        yield


@pytest.mark.parametrize("shift", [0, 1, 512], ids=["aligned", "odd", "half"])
@pytest.mark.parametrize(
    "size",
    [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 5, CHUNK_BYTES, CHUNK_BYTES + 1,
     2 * CHUNK_BYTES + 4096, 3 * CHUNK_BYTES - 1],
)  # fmt: skip
def test_one_region_comes_back_with_its_digests(storage, size, shift):
    region = memoryview(MEMORY)[shift : shift + size]
    record = storage.write(PATH, [region])
    assert held(storage) == bytes(region)
    assert (record.name, record.size_bytes) == ("data", size)
    assert record.digests == tuple(
        xxhash.xxh3_128(region[at : at + CHUNK_BYTES]).hexdigest()
        for at in range(0, size, CHUNK_BYTES)
    )


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, CHUNK_BYTES)), max_size=5))
def test_many_regions_are_one_file_lazily_or_not(tmp_path_factory, spans):
    storage = FolderStorage(tmp_path_factory.mktemp("many"))
    regions = [memoryview(MEMORY)[at : at + size] for at, size in spans]
    record = storage.write(PATH, regions)
    lazily = storage.write(f"{FOLDER}/lazily", iter(regions))
    assert held(storage) == held(storage, f"{FOLDER}/lazily") == b"".join(regions)
    assert record.digests == lazily.digests and record.size_bytes == lazily.size_bytes


def test_regions_of_other_elements_are_their_bytes(storage):
    storage.write(PATH, [memoryview(b"abcd" * 2).cast("i"), bytearray(b"xy")])
    assert held(storage) == b"abcdabcdxy"


def test_after_short_writes_the_file_is_complete(storage):
    real = os.pwrite
    with pwrite(lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at)):
        record = storage.write(PATH, [memoryview(MEMORY)[: CHUNK_BYTES + 77]])
    assert held(storage) == MEMORY[: CHUNK_BYTES + 77]
    assert record.digests[1] == xxhash.xxh3_128(MEMORY[CHUNK_BYTES : CHUNK_BYTES + 77]).hexdigest()


@pytest.mark.parametrize("refused", ["at the opening", "at the first block"])
def test_a_file_system_without_o_direct_is_written_by_way_of_its_cache(
    storage, refused, monkeypatch
):
    open_file, pwrite_file, direct = os.open, os.pwrite, set()

    def opening(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and refused == "at the opening":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = open_file(path, flags, *args, **kwargs)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def writing(descriptor, data, at):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite_file(descriptor, data, at)

    storage.place()
    monkeypatch.setattr(aligned.os, "open", opening)
    monkeypatch.setattr(aligned.os, "pwrite", writing)
    storage.write(PATH, [memoryview(MEMORY)[5:], b"tail"])
    monkeypatch.undo()
    assert held(storage) == MEMORY[5:] + b"tail"


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_no_file(storage, code, at):
    real, calls, lock = os.pwrite, [], threading.Lock()

    def failing(fd, data, offset):
        with lock:
            calls.append(offset)
            if len(calls) > at:
                raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with pwrite(failing), pytest.raises(OSError) as failed:
        storage.write(PATH, [memoryview(MEMORY)[: 3 * CHUNK_BYTES]])
    assert failed.value.errno == code
    assert storage.names(FOLDER) == []
    storage.write(PATH, [b"again"])
    assert held(storage) == b"again"


def test_a_failed_fsync_is_a_failed_write(storage, monkeypatch):
    def failing(fd):
        raise OSError(errno.EIO, "I/O error")

    storage.place()
    monkeypatch.setattr(aligned.os, "fsync", failing)
    with pytest.raises(OSError, match="I/O"):
        storage.write(PATH, [b"abc"])
    monkeypatch.undo()
    assert FOLDER not in storage.folders() or storage.names(FOLDER) == []


def test_a_write_that_is_stopped_leaves_nothing(storage):
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(OSError) as stopped:
        storage.write(PATH, [memoryview(MEMORY)], stop)
    assert stopped.value.errno == errno.ECANCELED
    assert storage.names(FOLDER) == []


def test_an_interrupt_waits_for_the_thread_that_still_writes(storage, monkeypatch):
    """Otherwise the thread would write to a descriptor that is closed or reused."""
    real, at_work, go_on, late = os.pwrite, threading.Event(), threading.Event(), []
    join, main = threading.Thread.join, threading.get_ident()

    def slow(fd, data, at):
        if threading.get_ident() != main:
            at_work.set()
            go_on.wait(30)
            late.append(os.readlink(f"/proc/self/fd/{fd}"))
        else:
            at_work.wait(30)
        return real(fd, data, at)

    def interrupted(thread, *args):
        if not go_on.is_set():
            go_on.set()
            raise KeyboardInterrupt
        join(thread, *args)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pwrite(slow), pytest.raises(KeyboardInterrupt):
        storage.write(PATH, [memoryview(MEMORY)])
    assert late and all(path.endswith("/data") for path in late)
    assert storage.names(FOLDER) == []


def test_a_region_that_cannot_be_had_is_a_failed_write(storage):
    def regions():
        yield memoryview(MEMORY)[:CHUNK_BYTES]
        raise RuntimeError("the sender is gone")

    with pytest.raises(RuntimeError, match="the sender is gone"):
        storage.write(PATH, regions())
    assert storage.names(FOLDER) == []


def test_an_iterator_is_advanced_in_the_callers_thread(storage):
    threads = []

    def regions():
        for _ in range(3):
            threads.append(threading.get_ident())
            yield memoryview(MEMORY)[:CHUNK_BYTES]

    storage.write(PATH, regions())
    assert set(threads) == {threading.get_ident()}


def test_a_file_that_is_there_is_never_replaced(storage):
    storage.write(PATH, [b"first"])
    with pytest.raises(FileExistsError):
        storage.write(PATH, [b"second"])
    assert held(storage) == b"first"


def test_no_descriptor_and_no_thread_stays(storage):
    storage.write(PATH, [memoryview(MEMORY)])
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(3):
        storage.write(f"{FOLDER}/{number}", [memoryview(MEMORY)])
        with pytest.raises(FileExistsError):
            storage.write(PATH, [memoryview(MEMORY)])
    # What an earlier test left may have gone.
    assert set(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads
