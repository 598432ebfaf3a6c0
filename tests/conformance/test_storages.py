"""The same tests for every storage of checkpoints: folders, object stores, an S3 server."""

import itertools
import os
import threading
import uuid

import pytest
import s3_server
from small_saves import FILES, begin, key_of, save, steps, write_part

from elastane.errors import CheckpointError, FencedError
from elastane.protocol.checkpoints import MANIFEST, folder_name
from elastane.storage import Repository, objects, open_storage
from elastane.storage.digest import record_of
from elastane.storage.folder import FolderStorage

FOLDER = "step-000000000001.e0000.r000001.a00.00000000"
PATH = f"{FOLDER}/data"
# More places (`gs://bucket/tests`), separated by spaces. Their files are not removed.
GIVEN = os.environ.get("ELASTANE_TEST_STORAGES", "").split()
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    log = tmp_path_factory.mktemp("s3") / "server.log"
    with s3_server.serving(log) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment(server.url).items():
            patch.setenv(name, value)
        yield f"s3://{s3_server.BUCKET}"


@pytest.fixture(params=["folder", "file", "memory", "s3", *GIVEN])
def where(request, tmp_path):
    number = next(_numbers)
    if request.param in GIVEN:
        return f"{request.param}/{uuid.uuid4()}"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/run/{number}"
    return {
        "folder": str(tmp_path / "place"),
        "file": f"file://{tmp_path}/place",
        "memory": f"memory://conformance/{os.getpid()}/{number}",
    }[request.param]


@pytest.fixture
def storage(where):
    return open_storage(where)


@pytest.fixture
def repository(storage):
    return Repository(storage)


def replace(storage, path, content):
    """Replace the bytes of a file, as damage or another program would."""
    if isinstance(storage, FolderStorage):
        (storage._root / path).write_bytes(content)
    else:
        storage._client.pipe_file(f"{storage._root}/{path}", content)


def take_away(storage, path):
    if isinstance(storage, FolderStorage):
        (storage._root / path).unlink()
    else:
        storage._client.rm_file(f"{storage._root}/{path}")


def test_an_empty_place_has_nothing(storage):
    assert storage.folders() == []
    for act in (storage.read, storage.size):
        with pytest.raises(FileNotFoundError):
            act(PATH)
    with pytest.raises(FileNotFoundError):
        storage.names(FOLDER)


def test_a_written_file_can_be_read_whole_and_in_ranges(storage):
    content = bytes(range(256)) * 30
    record = storage.write(PATH, [content[:1000], memoryview(content)[1000:]])
    assert record == record_of("data", [content])
    assert storage.read(PATH) == content and storage.size(PATH) == len(content)
    assert storage.read(PATH, 100, 50) == content[100:150]
    assert storage.read(PATH, 7600, 500) == content[7600:]
    assert storage.read(PATH, 7000) == content[7000:]
    assert storage.read(PATH, len(content), 10) == storage.read(PATH, len(content) + 5, 10) == b""
    assert storage.folders() == [FOLDER] and storage.names(FOLDER) == ["data"]
    assert dict(storage.sizes(FOLDER, ["data", "other"])) == {"data": len(content)}


def test_an_empty_file_exists_and_is_listed(storage):
    assert storage.write(PATH, []) == record_of("data", [])
    assert storage.read(PATH) == storage.read(PATH, 0, 100) == b""
    assert dict(storage.sizes(FOLDER, ["data"])) == {"data": 0}


def test_a_file_of_several_chunks_and_uploads_is_read_back(storage, monkeypatch):
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 5 << 20)
    content = os.urandom(1 << 20) * 18
    view = memoryview(content)
    record = storage.write(PATH, (view[at : at + 700_001] for at in range(0, len(view), 700_001)))
    assert record == record_of("data", [content]) and len(record.digests) == 2
    assert storage.read(PATH) == content
    descriptor = storage.open_local(PATH)
    if descriptor is not None:
        assert os.pread(descriptor, 100, 1 << 24) == content[1 << 24 :][:100]
        os.close(descriptor)


def test_an_existing_file_is_not_written_again(storage):
    storage.write(PATH, [b"first"])
    with pytest.raises(FileExistsError):
        storage.write(PATH, [b"second"])
    assert storage.read(PATH) == b"first"


def test_a_failed_write_to_a_place_leaves_no_file(storage, monkeypatch):
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 5 << 20)

    def regions():
        yield bytes(12 << 20)
        yield bytes(12 << 20)
        raise RuntimeError("the sender is gone")

    with pytest.raises((RuntimeError, OSError), match="the sender is gone"):
        storage.write(PATH, regions())
    with pytest.raises(OSError, match="stopped"):
        storage.write(PATH, [bytes(5)], lambda: True)
    assert dict(storage.sizes(FOLDER, ["data"]) if storage.folders() else {}) == {}
    storage.write(PATH, [b"again"])
    assert storage.read(PATH) == b"again"


def test_a_file_is_created_once_and_never_replaced(storage):
    assert storage.create(PATH, b"first")
    assert not storage.create(PATH, b"second")
    assert storage.read(PATH) == b"first"


def test_of_concurrent_creations_of_a_file_one_succeeds(storage):
    storage.place()
    told, contents = {}, [bytes([number]) * 100 for number in range(4)]

    def one(number):
        told[number] = storage.create(PATH, contents[number])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = storage.read(PATH)
    assert found in contents and told[contents.index(found)]
    assert storage.names(FOLDER) == ["data"]


def test_a_folder_is_removed_with_its_contents(storage):
    for name in ("manifest.json", "a", ".metadata"):
        storage.write(f"{FOLDER}/{name}", [b"x"])
    other = FOLDER.replace("0001.e", "0002.e")
    storage.write(f"{other}/a", [b"x"])
    storage.remove(FOLDER)
    storage.remove(FOLDER)
    assert storage.folders() == [other]


def test_all_clients_of_a_place_read_the_same_id(storage, where):
    assert storage.place() == storage.place() == open_storage(where).place()
    assert open_storage(f"{where}/deeper").place() != storage.place()
    assert storage.folders() == []


def test_the_clock_of_a_place_gives_the_age_of_the_last_write_to_a_folder(storage):
    storage.write(PATH, [b"x"])
    silent_s = storage.now_s() - storage.changed_s(FOLDER)
    assert -2 <= silent_s <= 120
    assert storage.names(FOLDER) == ["data"]


def test_saves_are_found_newest_first_and_verified(repository):
    for step in (1, 3, 2):
        save(repository, step)
    begin(repository, 9)
    assert steps(repository) == [3, 2, 1]
    assert [repository.verify(found) for found in repository.published()] == ["", "", ""]
    assert repository.newest_valid().found.key.step == 3
    assert len(repository.unfinished()) == 1


def test_saves_and_removals_by_other_clients_are_seen_in_the_next_listing(where):
    """Clients of object stores cache their listings."""
    mine, other = (Repository(open_storage(where)) for _ in range(2))
    for step in (1, 2, 3):
        save(mine, step)
        assert steps(other) == steps(mine)
    other.prune(1)
    assert steps(mine) == [3] and mine.newest_valid().found.key.step == 3
    folder = begin(mine, 4)
    assert other.unfinished() == [folder]
    assert other.storage.names(folder) == mine.storage.names(folder)
    other.storage.remove(folder)
    assert mine.unfinished() == [] and mine.storage.folders() == other.storage.folders()


def test_several_writers_make_one_checkpoint(where):
    key, told = key_of(5), []
    folder = folder_name(key, "00c0ffee")

    def writer(number):
        mine = Repository(open_storage(where))
        write_part(mine, folder, key, number, 3, files={f"__{number}_0.distcp": b"x" * number})
        told.append(mine.publish_when_whole(folder, 3, wait_s=60))

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3 and told[0] == told[1] == told[2]
    repository = Repository(open_storage(where))
    (found,) = repository.published()
    assert found.manifest == told[0] and repository.verify(found) == ""


def test_a_writer_with_an_older_fence_publishes_nothing(repository):
    save(repository, 3, round=2)
    with pytest.raises(FencedError):
        save(repository, 900)
    assert steps(repository) == [3]


DAMAGED = ["__0_0.distcp", ".metadata", MANIFEST, "part-00000-of-00001.json"]


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_is_reported_and_the_older_one_restored(repository, harm):
    oldest = save(repository, 1)
    folders = {name: save(repository, step) for step, name in enumerate(DAMAGED, 2)}
    for name, folder in folders.items():
        path = f"{folder}/{name}"
        content = repository.storage.read(path)
        if harm == "gone":
            take_away(repository.storage, path)
        else:
            flipped = bytes([content[0] ^ 1]) + content[1:]
            harmed = {"flipped": flipped, "cut": content[:-1], "empty": b""}[harm]
            replace(repository.storage, path, harmed)
    choice = repository.newest_valid()
    assert choice.found.folder == oldest
    named = {one.folder: one.reason for one in choice.skipped}
    if harm == "gone":
        assert repository.unfinished() == [folders.pop(MANIFEST)]
    assert named.keys() == set(folders.values())
    assert all(name in named[folder] for name, folder in folders.items())
    take_away(repository.storage, f"{oldest}/__0_0.distcp")
    with pytest.raises(CheckpointError, match="is missing"):
        repository.newest_valid()


def test_retention_keeps_the_newest_valid_ones_and_removes_dead_saves(repository):
    for step in (1, 2, 3):
        save(repository, step)
    dead, alive = begin(repository, 9, round=0), begin(repository, 4)
    newest = repository.published()[0].folder
    replace(repository.storage, f"{newest}/__0_0.distcp", bytes(len(FILES["__0_0.distcp"])))
    gone = repository.prune(1)
    assert gone[0].folder == dead and [one.folder[5:17] for one in gone[1:]] == ["0" * 11 + "1"]
    assert steps(repository) == [3, 2] and repository.unfinished() == [alive]
    assert repository.newest_valid().found.key.step == 2
