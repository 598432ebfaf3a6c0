"""Which checkpoints are restored, and which are removed."""

import errno
import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from small_saves import begin, key_of, opened, save, steps

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import CHUNK_BYTES, FORMAT, MANIFEST, folder_name
from elastane.storage.digest import digest_of
from elastane.storage.folder import FolderStorage
from elastane.storage.repository import Inspection
from elastane.storage.retention import LITTER_S


@pytest.fixture
def repository(tmp_path):
    return opened(tmp_path)


def damage(tmp_path, folder, name="__0_0.distcp"):
    path = tmp_path / folder / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def write_newer(tmp_path, step):
    """Write a checkpoint of a newer elastane."""
    folder = folder_name(key_of(step), "00c0ffee")
    (tmp_path / folder).mkdir()
    body = msgspec.json.encode({"format": FORMAT + 1, "new": True})
    content = b'{"digest":"%s","body":%s}' % (digest_of([body]).encode(), body)
    (tmp_path / folder / MANIFEST).write_bytes(content)
    return folder


def removed(repository, keep, **kwargs):
    return sorted(int(one.folder[5:17]) for one in repository.prune(keep, **kwargs))


def test_the_newest_is_by_key_and_not_by_time(repository, tmp_path):
    folders = [save(repository, step) for step in (10, 20)]
    os.utime(tmp_path / folders[0], (2e9, 2e9))
    os.utime(tmp_path / folders[1], (1e9, 1e9))
    assert steps(repository) == [20, 10]


def test_a_checkpoint_of_a_newer_elastane_is_named_and_skipped(repository, tmp_path):
    save(repository, 1)
    write_newer(tmp_path, 2)
    choice = repository.newest_valid()
    assert choice.found.key.step == 1
    (skipped,) = choice.skipped
    assert skipped.newer and "of format 2, from a newer elastane" in skipped.reason
    with pytest.raises(CheckpointError, match="newer elastane"):
        repository.newest_valid(strict=True)


def test_a_checkpoint_of_a_newer_elastane_is_not_pruned(repository, tmp_path):
    newer = write_newer(tmp_path, 0)
    for step in (1, 2):
        save(repository, step)
    assert removed(repository, 1) == [1]
    assert newer in repository.storage.folders()


def test_the_last_valid_one_stays_though_a_damaged_one_is_newer(repository, tmp_path):
    folders = [save(repository, step) for step in (1, 2, 3)]
    damage(tmp_path, folders[2])
    damage(tmp_path, folders[1])
    for keep in (1, 2, 1):
        assert removed(repository, keep) == []
    assert repository.newest_valid().found.key.step == 1
    save(repository, 4)
    assert removed(repository, 1) == [1, 2, 3]


def test_nothing_is_pruned_if_all_are_damaged(repository, tmp_path):
    for step in (1, 2, 3):
        damage(tmp_path, save(repository, step))
    assert removed(repository, 1) == []


def test_nothing_is_read_if_nothing_may_be_pruned(repository, monkeypatch):
    read = []
    run = Inspection.run
    monkeypatch.setattr(
        Inspection, "run", lambda self, *a: (read.append(self._folder), run(self, *a))[1]
    )
    save(repository, 1)
    assert removed(repository, 2) == [] and read == []
    folders = [save(repository, step) for step in (2, 3)]
    assert removed(repository, 2) == [1] and read == [folders[1]]
    assert removed(repository, 1) == [2] and len(read) == 1


def test_without_reading_sizes_are_believed_and_nothing_else(repository, tmp_path, monkeypatch):
    folders = [save(repository, step) for step in (1, 2, 3)]
    (tmp_path / folders[2] / "__0_0.distcp").write_bytes(b"short")
    monkeypatch.setattr(Inspection, "run", None)
    assert removed(repository, 1, read=False) == [1]
    assert steps(repository) == [3, 2]


def test_a_dry_run_removes_nothing(repository):
    for step in (1, 2, 3):
        save(repository, step)
    assert removed(repository, 1, dry_run=True) == [1, 2]
    assert steps(repository) == [3, 2, 1]


def test_protected_checkpoints_stay(repository):
    folders = [save(repository, step) for step in (1, 2, 3)]
    assert removed(repository, 1, protect=folders[:1]) == [2]


def test_a_save_that_goes_on_stays(repository):
    save(repository, 1)
    folder = begin(repository, 2)
    older = begin(repository, 0)
    assert repository.prune(1) == []
    assert set(repository.unfinished()) == {folder, older}


def test_a_save_of_a_round_that_is_over_goes(repository):
    begin(repository, 9)
    save(repository, 1, round=2)
    (one,) = repository.prune(1)
    assert "its round is over" in one.why and repository.unfinished() == []


def test_a_save_that_was_silent_for_long_goes_by_the_places_own_clock(repository, tmp_path):
    folder = begin(repository, 9)
    old = time.time() - LITTER_S - 60
    for path in (*(tmp_path / folder).iterdir(), tmp_path / folder):
        os.utime(path, (old, old))
    (one,) = repository.prune(1)
    assert one.folder == folder and "silent" in one.why
    assert repository.storage.folders() == []


def test_a_failed_removal_is_no_error(repository, monkeypatch, caplog):
    for step in (1, 2, 3):
        save(repository, step)

    def busy(self, folder):
        raise PermissionError(1, "Operation not permitted", folder)

    monkeypatch.setattr(FolderStorage, "remove", busy)
    assert repository.prune(1) == []
    assert "could not be removed" in caplog.text
    monkeypatch.undo()
    assert removed(repository, 1) == [1, 2]


def test_readers_never_see_half_while_others_save_and_prune(tmp_path):
    """A reader only finds whole checkpoints, and never an older one than before."""
    writer, done, seen = opened(tmp_path), threading.Event(), []
    save(writer, 0)
    failures = []

    def read():
        mine = opened(tmp_path)
        last = 0
        try:
            while not done.is_set():
                choice = mine.newest_valid()
                assert not choice.skipped and choice.found.key.step >= last
                last = choice.found.key.step
                seen.append(last)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(1, 60):
        save(writer, step, {"a": bytes(5000), "b": b"x" * step})
        writer.prune(1)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures and len(set(seen)) > 3


@pytest.mark.parametrize("moment", ["listed", "verified"])
def test_a_place_whose_only_checkpoint_is_replaced_meanwhile_is_not_empty(
    repository, tmp_path, monkeypatch, moment
):
    save(repository, 1)
    other, happened = opened(tmp_path), []

    def replaced_once():
        if not happened:
            happened.append(save(other, 2))
            other.prune(1)

    folders, verify = repository.storage.folders, repository.verify

    def list_folders():
        names = folders()
        if moment == "listed":
            replaced_once()
        return names

    def verified(found, *args, **kwargs):
        replaced_once()
        return verify(found, *args, **kwargs)

    monkeypatch.setattr(repository.storage, "folders", list_folders)
    monkeypatch.setattr(repository, "verify", verified)
    choice = repository.newest_valid()
    assert happened == [choice.found.folder] and not choice.skipped


def test_a_place_that_never_comes_to_rest_is_an_error_and_not_empty(repository, monkeypatch):
    number = [0]

    def listed():
        number[0] += 1
        return [folder_name(key_of(number[0]), "00c0ffee")]

    monkeypatch.setattr(repository.storage, "folders", listed)
    with pytest.raises(OSError, match="changed during") as told:
        repository.newest_valid()
    assert told.value.errno == errno.EAGAIN


def test_verifying_reports_progress(repository):
    save(repository, 1, {"a": b"x" * 500, "b": b"y" * 500})
    (found,) = repository.published()
    told = []
    assert repository.verify(found, lambda done, whole: told.append((done, whole))) == ""
    size = found.manifest.size_bytes
    assert told[-1] == (size, size) and sorted(told) == told and len(told) == 3


@pytest.mark.parametrize("fresh", [False, True], ids=["cached", "fresh"])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_files_of_any_size_are_verified_by_way_of_the_cache_and_past_it(tmp_path, where, fresh):
    with tempfile.TemporaryDirectory(dir=tmp_path if where == "disk" else "/dev/shm") as folder:
        repository = opened(folder)
        sizes = (0, 1, 511, 4095, 4096, 4097, 100_000, CHUNK_BYTES, CHUNK_BYTES + 5)
        files = {str(size): os.urandom(64) * (size // 64 + 1) for size in sizes}
        files = {name: content[: int(name)] for name, content in files.items()}
        save(repository, 1, files)
        (found,) = repository.published()
        assert repository.verify(found, fresh=fresh) == ""
        path = Path(folder) / found.folder / str(CHUNK_BYTES + 5)
        with path.open("r+b") as file:
            file.seek(CHUNK_BYTES + 4)
            file.write(bytes([files[path.name][-1] ^ 1]))
        reason = repository.verify(found, fresh=fresh)
        assert reason.startswith(f"{path.name}: bytes {CHUNK_BYTES} to {CHUNK_BYTES + 4} differ")


def test_a_disk_of_larger_blocks_is_read_by_way_of_the_cache(repository, monkeypatch):
    preadv, refused = os.preadv, []

    def picky(descriptor, buffers, at):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, at)

    save(repository, 1)
    (found,) = repository.published()
    monkeypatch.setattr(os, "preadv", picky)
    assert repository.verify(found, fresh=True) == "" and refused


def test_cycles_of_saving_restoring_and_pruning_leave_nothing_behind(repository, tmp_path):
    for step in range(3):
        save(repository, step)
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    for step in range(3, 103):
        save(repository, step)
        assert repository.newest_valid().found.key.step == step
        repository.prune(2)
    # Fewer is what other tests of this process left behind, and is gone by now.
    assert set(os.listdir("/proc/self/fd")) <= before[0]
    assert threading.active_count() <= before[1]
    assert len(list(tmp_path.iterdir())) == 3  # two checkpoints, and the place's id
    assert not list(tmp_path.rglob(".new-*"))


def test_verifying_can_be_stopped(repository):
    save(repository, 1)
    (found,) = repository.published()
    with pytest.raises(OSError, match="stopped"):
        repository.verify(found, stop=lambda: True)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_named(repository):
    save(repository, 1)
    (found,) = repository.published()
    repository.storage.remove(found.folder)
    assert "missing" in repository.verify(found)
