"""A save becomes a checkpoint atomically, once all its writers are done."""

import os
import random
import threading

import pytest
from small_saves import ABOUT, FILES, begin, key_of, opened, save, steps, write_part

from elastane.errors import CheckpointError, FencedError
from elastane.protocol.checkpoints import MANIFEST, CheckpointPart, folder_name, part_name
from elastane.storage.publishing import Publication, encode

FOLDER = folder_name(key_of(7), "00c0ffee")


@pytest.fixture
def repository(tmp_path):
    return opened(tmp_path)


def part(repository, number, parts=2, folder=FOLDER, **kwargs):
    files = kwargs.pop("files", {f"__{number}_0.distcp": b"x" * (number + 1)})
    write_part(repository, folder, key_of(7), number, parts, files=files, **kwargs)


def refused(slug):
    def matches(error):
        return error.slug == slug

    return pytest.raises(CheckpointError, check=matches)


def test_a_save_is_no_checkpoint_before_its_last_part(repository):
    part(repository, 0)
    with refused("checkpoint-incomplete"):
        repository.publish_when_whole(FOLDER, 2, wait_s=0)
    assert repository.published() == [] and repository.unfinished() == [FOLDER]
    part(repository, 1)
    assert repository.published() == []
    manifest = repository.publish_when_whole(FOLDER, 2, wait_s=0)
    (found,) = repository.published()
    assert found.manifest == manifest and found.reason == "" and repository.unfinished() == []
    assert repository.verify(found) == ""


def test_the_manifest_names_every_file_the_parts_records_too(repository):
    for number in (1, 0):
        part(repository, number)
    manifest = repository.publish_when_whole(FOLDER, 2, wait_s=0)
    named = {file.name for file in manifest.files}
    assert named | {MANIFEST} == set(repository.storage.names(FOLDER))


def test_a_writer_that_does_not_come_is_named(repository):
    part(repository, 1, 4)
    with refused("checkpoint-incomplete") as told:
        repository.publish_when_whole(FOLDER, 4, wait_s=600, stop=lambda: True)
    assert "3 of 4 writers did not finish within 0." in str(told.value), "it was told to stop"
    assert ": part 0, 2, 3" in str(told.value)


def test_writers_of_a_large_save_read_few_records_before_it_is_complete(tmp_path, monkeypatch):
    """Otherwise each of 1,024 writers would read each of 1,024 records."""
    reads, count, repository = [], 40, opened(tmp_path)
    read = type(repository.storage).read
    monkeypatch.setattr(
        type(repository.storage), "read", lambda self, *a: (reads.append(a[0]), read(self, *a))[1]
    )
    for number in random.Random(1).sample(range(count), count):
        part(repository, number, count)
        publication = Publication(repository.storage, FOLDER, count)
        publication._look(count, past_gaps=False)
    assert publication._missing == []
    asked = [name for name in reads if "part-" in name]
    assert count < len(asked) < count * count / 4
    publication._publish()
    assert repository.newest_valid().found.key.step == 7


def test_a_writer_sees_all_records_at_its_last_look(repository):
    """The last writer died between its record and the manifest, so another writes it in time."""
    for number in range(20):
        part(repository, number, 20)
    publication = Publication(repository.storage, FOLDER, 20)
    looks, look = [], publication._look

    def look_at_one(records, *, past_gaps):
        looks.append((records, past_gaps))
        look(records if past_gaps else 1, past_gaps=past_gaps)

    publication._look = look_at_one
    publication.wait(0, sleep=lambda _: None)
    assert looks == [(20, False), (20, True)]
    assert repository.published()[0].reason == ""


def test_looks_that_follow_the_first_are_of_few_records_and_then_of_more(repository):
    part(repository, 0, 100)
    publication = Publication(repository.storage, FOLDER, 100)
    looks = []
    publication._look = lambda records, past_gaps: looks.append((records, past_gaps))
    with refused("checkpoint-incomplete"):
        publication.wait(1e9, stop=lambda: len(looks) > 4, sleep=lambda _: None)
    assert looks == [(100, False), (8, False), (16, False), (32, False), (64, False), (100, True)]


def test_a_wait_can_be_stopped(repository):
    part(repository, 0)
    asked = []
    with refused("checkpoint-incomplete"):
        repository.publish_when_whole(
            FOLDER, 2, wait_s=1e9, stop=lambda: asked.append(1) or len(asked) > 3
        )


def test_all_writers_learn_of_the_manifest_whichever_of_them_makes_it(tmp_path):
    """Repeated for different orders of threads: all get the same manifest, which is published."""
    for turn in range(10):
        folder = folder_name(key_of(turn), "00c0ffee")
        told, begun = [], threading.Barrier(5)

        def writer(number, folder=folder, turn=turn, told=told, begun=begun):
            mine = opened(tmp_path)
            begun.wait()
            about = ABOUT if number == 0 else type(ABOUT)("other", 9, float(number), {}, "time")
            files = {f"__{number}_0.distcp": b"x"}
            write_part(mine, folder, key_of(turn), number, 5, files=files, about=about)
            told.append(mine.publish_when_whole(folder, 5, wait_s=60))

        threads = [threading.Thread(target=writer, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 5
        newest = opened(tmp_path).published()[0]
        assert all(manifest == newest.manifest for manifest in told)
        assert newest.manifest.about == ABOUT and newest.key.step == turn


def test_all_publishers_write_the_same_bytes(repository, tmp_path):
    """On a store without a conditional put, the second manifest replaces the first."""
    for number in range(2):
        part(repository, number)
    contents = []
    storage = repository.storage
    for _ in range(2):
        publication = Publication(storage, FOLDER, 2)
        publication._look(2, past_gaps=True)
        contents.append(encode(publication._manifest()))
    assert contents[0] == contents[1]
    repository.publish_when_whole(FOLDER, 2, wait_s=0)
    assert storage.read(f"{FOLDER}/{MANIFEST}") == contents[0]


def test_a_part_may_be_added_twice_only_with_the_same_record(repository):
    part(repository, 0)
    record = CheckpointPart(0, 2, (), key_of(7), "00c0ffee", ABOUT)
    with refused("checkpoint-conflict"):
        repository.add_part(FOLDER, record)
    other = folder_name(key_of(8), "00c0ffee")
    again = CheckpointPart(0, 2, (), key_of(8), "00c0ffee", ABOUT)
    repository.add_part(other, again)
    repository.add_part(other, again)


def test_a_part_for_another_folder_is_a_mistake_of_the_caller(repository):
    with pytest.raises(ValueError, match="another folder"):
        repository.add_part(FOLDER, CheckpointPart(0, 2, (), key_of(8), "00c0ffee", ABOUT))


def test_parts_that_bring_the_same_file_make_no_checkpoint(repository):
    part(repository, 0, files={"same": b"x"})
    record = CheckpointPart(1, 2, (), key_of(7), "00c0ffee", ABOUT)
    (first,) = Publication(repository.storage, FOLDER, 2)._storage.sizes(FOLDER, ["same"])
    files = repository.storage.write(f"{FOLDER}/other", [b"x"])
    same = type(files)(first, files.size_bytes, files.digests)
    repository.add_part(FOLDER, CheckpointPart(1, 2, (same,), record.key, record.nonce, ABOUT))
    with refused("checkpoint-conflict"):
        repository.publish_when_whole(FOLDER, 2, wait_s=0)
    assert repository.published() == []


def test_a_part_under_another_ones_name_makes_no_checkpoint(repository, tmp_path):
    part(repository, 0, files={})
    record = (tmp_path / FOLDER / part_name(0, 2)).read_bytes()
    (tmp_path / FOLDER / part_name(1, 2)).write_bytes(record)
    with refused("checkpoint-conflict"):
        repository.publish_when_whole(FOLDER, 2, wait_s=0)


def test_a_part_that_is_half_written_is_waited_for(repository, tmp_path):
    part(repository, 0)
    whole = encode(CheckpointPart(1, 2, (), key_of(7), "00c0ffee", ABOUT))
    torn = tmp_path / FOLDER / part_name(1, 2)
    torn.write_bytes(whole[:-5])
    with refused("checkpoint-incomplete") as told:
        repository.publish_when_whole(FOLDER, 2, wait_s=0)
    assert "cut short" in str(told.value)
    torn.write_bytes(whole)
    repository.publish_when_whole(FOLDER, 2, wait_s=0)


@pytest.mark.parametrize(
    "newer", [{"attempt": 1}, {"round": 2}, {"era": 1, "round": 1}], ids=["attempt", "round", "era"]
)
def test_a_writer_behind_the_fence_publishes_nothing(repository, newer):
    save(repository, 3, **newer)
    with pytest.raises(FencedError, match=r"step 900 not published.*has published"):
        save(repository, 900)
    assert steps(repository) == [3]
    assert repository.newest_valid().found.key.step == 3


def test_a_part_removed_by_a_later_round_raises_fenced_error(repository):
    part(repository, 0)
    save(repository, 3, round=2)
    repository.prune(1)
    assert repository.unfinished() == []
    with pytest.raises(FencedError):
        repository.publish_when_whole(FOLDER, 2, wait_s=0)


def test_a_fence_can_be_asked_for_before_anything_is_written(repository):
    repository.check_fence(key_of(900))
    save(repository, 3, round=2)
    repository.check_fence(key_of(1, round=2))
    with pytest.raises(FencedError):
        repository.check_fence(key_of(900))


def test_the_fence_is_that_of_a_damaged_checkpoint_too(repository, tmp_path):
    folder = save(repository, 3, round=2)
    (tmp_path / folder / MANIFEST).write_bytes(b"")
    assert repository.newest_key().fence == (0, 2, 0)
    with pytest.raises(FencedError):
        save(repository, 900)


def test_saves_without_a_manifest_do_not_fence(repository):
    begin(repository, 3, round=2)
    save(repository, 900)
    assert steps(repository) == [900] and repository.newest_key().fence == (0, 1, 0)


def test_one_fence_may_publish_any_step_in_any_order(repository):
    for step in (5, 9, 7):
        save(repository, step)
    assert steps(repository) == [9, 7, 5]


def test_a_late_checkpoint_of_the_past_is_never_the_newest(repository, tmp_path):
    """The two halves of a partition publish at once, and neither sees the other's checkpoint."""
    late = folder_name(key_of(900), "00c0ffee")
    write_part(repository, late, key_of(900), files=FILES)
    publication = Publication(repository.storage, late, 1)
    publication._look(1, past_gaps=True)
    save(repository, 3, round=2)
    content = encode(publication._manifest())
    assert repository.storage.create(f"{late}/{MANIFEST}", content)
    assert steps(repository) == [3, 900]


def test_two_saves_of_one_key_are_two_checkpoints(repository):
    save(repository, 5, {"a": b"1"}, nonce="00000001")
    save(repository, 5, {"a": b"2"}, nonce="00000002")
    newest = repository.newest_valid().found
    assert newest.nonce == "00000002"
    assert repository.storage.read(f"{newest.folder}/a") == b"2"
    assert [found.reason for found in repository.published()] == ["", ""]


def test_a_writer_that_comes_late_finds_it_published_though_it_is_fenced_by_now(repository):
    for number in range(2):
        part(repository, number)
    first = repository.publish_when_whole(FOLDER, 2, wait_s=0)
    save(repository, 8, round=2)
    assert repository.publish_when_whole(FOLDER, 2, wait_s=0) == first


def test_a_save_that_failed_is_removed_and_a_checkpoint_is_not(repository):
    folder = begin(repository, 3)
    repository.abandon(folder)
    repository.abandon(folder)
    assert repository.unfinished() == []
    published = save(repository, 4)
    repository.abandon(published)
    assert steps(repository) == [4]


class Recorder:
    """Records the operations on files and folders, in order, by their real paths."""

    def __init__(self, monkeypatch):
        self.done = []
        for name in ("fsync", "pwrite", "write", "link", "mkdir"):
            real = getattr(os, name)

            def recorded(*args, name=name, real=real, **kwargs):
                result = real(*args, **kwargs)
                self.done.append((name, self._path(name, args, kwargs)))
                return result

            monkeypatch.setattr(os, name, recorded)

    def _path(self, name, args, kwargs):
        if name == "mkdir":
            return self._of(kwargs["dir_fd"]) + "/" + args[0]
        if name == "link":
            return self._of(kwargs["dst_dir_fd"]) + "/" + args[1]
        return self._of(args[0])

    def _of(self, descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def last(self, name, path):
        return max(at for at, one in enumerate(self.done) if one == (name, str(path)))


def test_records_come_after_durable_files_and_the_manifest_after_records(
    repository, tmp_path, monkeypatch
):
    """test_storage_power.py shows what a loss of power leaves; this is the order alone."""
    repository.storage.place()
    recorder = Recorder(monkeypatch)
    files = {"small": b"x", "large": bytes(3 << 20) + b"tail"}
    part(repository, 0, 1, files=files)
    vouched = len(recorder.done)
    repository.publish_when_whole(FOLDER, 1, wait_s=0)
    folder = tmp_path / FOLDER
    record = recorder.last("link", folder / part_name(0, 1))
    for name in files:
        wrote = recorder.last("pwrite", folder / name)
        assert wrote < recorder.last("fsync", folder / name) < record
    durable = [at for at, one in enumerate(recorder.done) if one == ("fsync", str(folder))]
    named = recorder.last("fsync", folder / "large")
    assert any(named < at < record for at in durable)
    made = recorder.last("mkdir", folder)
    roots = [at for at, one in enumerate(recorder.done) if one == ("fsync", str(tmp_path))]
    assert any(made < at < record for at in roots)
    assert any(record < at < vouched for at in durable)
    published = recorder.last("link", folder / MANIFEST)
    assert vouched <= published < durable[-1]
    before = recorder.done[published - 1]
    assert before[0] == "fsync" and ".new-" in before[1]
