"""Every flipped byte and every cut of a checkpoint is found, and is never restored."""

import errno
import shutil

import pytest
from small_saves import begin, key_of, opened, save, steps, write_part

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import folder_name
from elastane.storage.folder import FolderStorage

FILES = {"__0_0.distcp": b"weights" * 5, ".metadata": b"\x80meta", "state.msgpack": b"\x81"}


@pytest.fixture
def place(tmp_path):
    """Return a folder with a valid checkpoint, and a newer one of two writers to damage."""
    repository = opened(tmp_path)
    save(repository, 1)
    key = key_of(2)
    folder = folder_name(key, "00c0ffee")
    write_part(repository, folder, key, 0, 2, files=FILES)
    write_part(repository, folder, key, 1, 2, files={"__1_0.distcp": b"more" * 5})
    repository.publish_when_whole(folder, 2, wait_s=30)
    return repository, tmp_path / folder


def restored(repository):
    """Return the step that would be restored, and why the newer one would not be."""
    choice = repository.newest_valid()
    assert [one.key.step for one in choice.skipped] == [2] * len(choice.skipped)
    return choice.found.key.step, "".join(one.reason for one in choice.skipped)


def judged(repository):
    """Return why the newer checkpoint is not valid."""
    return repository.verify(repository.published()[0])


def harmed(path, content):
    path.write_bytes(content)


def test_every_byte_flipped_is_found_and_the_older_one_restored(place):
    repository, folder = place
    assert restored(repository) == (2, "")
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 7
    for name in names:
        whole = (folder / name).read_bytes()
        for at in range(len(whole)):
            changed = bytearray(whole)
            changed[at] ^= 1 << at % 8
            harmed(folder / name, bytes(changed))
            assert name in judged(repository), (name, at)
        assert restored(repository)[0] == 1
        harmed(folder / name, whole)
    assert restored(repository) == (2, "")


def test_every_cut_is_found_and_the_older_one_restored(place):
    repository, folder = place
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for length in range(len(whole)):
            harmed(path, whole[:length])
            assert path.name in judged(repository), (path.name, length)
        harmed(path, whole + b"\0")
        step, reason = restored(repository)
        assert step == 1 and path.name in reason
        harmed(path, whole)
    assert restored(repository) == (2, "")


def test_every_file_missing_is_found_and_without_a_manifest_it_is_no_checkpoint(place):
    repository, folder = place
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.unlink()
        step, reason = restored(repository)
        expected = "" if path.name == "manifest.json" else f"{path.name} is missing"
        assert step == 1 and reason.startswith(expected) and bool(reason) == bool(expected)
        harmed(path, whole)


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_file_that_is_something_else_now_is_found(place, kind):
    repository, folder = place
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.rename(folder / "aside")
        path.symlink_to("aside") if kind == "link" else path.mkdir()
        step, reason = restored(repository)
        assert step == 1 and path.name in reason
        path.unlink() if kind == "link" else path.rmdir()
        (folder / "aside").rename(path)
        assert path.read_bytes() == whole


def test_two_chunks_that_changed_places_are_found(tmp_path, monkeypatch):
    from elastane.protocol import checkpoints
    from elastane.storage import aligned, digest, repository

    for module in (checkpoints, aligned, digest, repository):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    repository = opened(tmp_path)
    folder = save(repository, 2, {"a": b"1" * 4096 + b"2" * 4096 + b"3" * 4096})
    (tmp_path / folder / "a").write_bytes(b"1" * 4096 + b"3" * 4096 + b"2" * 4096)
    (found,) = repository.published()
    assert repository.verify(found) == "a: bytes 4096 to 8191 differ from what was saved"


def test_a_checkpoint_under_another_ones_name_is_found(place, tmp_path):
    repository, folder = place
    later = folder_name(key_of(9), "00c0ffee")
    shutil.copytree(folder, tmp_path / later)
    choice = repository.newest_valid()
    assert choice.found.key.step == 2
    assert "lies in another folder" in choice.skipped[0].reason


def test_if_no_checkpoint_is_valid_it_is_an_error(place):
    repository, folder = place
    for file in folder.parent.rglob("*.distcp"):
        file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoints is valid") as refused:
        repository.newest_valid()
    assert refused.value.slug == "checkpoint-none-valid"
    assert "bytes" in str(refused.value)


def test_strict_refuses_if_the_newest_is_invalid(place):
    repository, folder = place
    assert repository.newest_valid(strict=True).found.key.step == 2
    (folder / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 1 bytes, not 35") as refused:
        repository.newest_valid(strict=True)
    assert refused.value.slug == "checkpoint-invalid"


def test_a_file_that_the_disk_cannot_read_is_of_that_checkpoint_alone(place, monkeypatch):
    repository, _ = place
    reads = FolderStorage.open_local

    def bad_sector(self, path):
        if path.endswith("__1_0.distcp"):
            raise OSError(errno.EIO, "I/O error", path)
        return reads(self, path)

    monkeypatch.setattr(FolderStorage, "open_local", bad_sector)
    assert restored(repository) == (1, "__1_0.distcp cannot be read (I/O error)")


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EACCES])
@pytest.mark.parametrize("call", ["folders", "open_local", "sizes"])
def test_a_place_that_cannot_be_reached_is_not_taken_for_damage(place, monkeypatch, code, call):
    repository, _ = place

    def away(*_, **__):
        raise OSError(code, "away")

    monkeypatch.setattr(FolderStorage, call, away)
    with pytest.raises(OSError, match="away") as told:
        repository.newest_valid()
    assert told.value.errno == code


def test_litter_of_saves_is_not_looked_at(place):
    repository, _ = place
    begin(repository, 9)
    assert steps(repository) == [2, 1]
    assert restored(repository) == (2, "")
