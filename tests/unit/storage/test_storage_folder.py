"""A folder of checkpoints: atomic creation, and refused paths."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_saves import save, steps

from elastane.errors import ConfigurationError
from elastane.storage import Repository, folder, open_storage
from elastane.storage.folder import PLACE, FolderStorage

FOLDER = "step-000000000001.e0000.r000001.a00.00000000"
OTHER = "step-000000000002.e0000.r000001.a00.00000000"


@pytest.fixture
def storage(tmp_path):
    return FolderStorage(tmp_path / "a" / "b")


def all_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def at_once(count, act):
    """Call `act(number)` in several threads at the same time; return the results."""
    barrier = threading.Barrier(count)

    def one(number):
        barrier.wait()
        return act(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def test_nothing_is_made_by_looking(storage, tmp_path):
    assert storage.folders() == []
    assert Repository(storage).newest_valid().found is None
    for call in (lambda: storage.read("x"), lambda: storage.size(f"{FOLDER}/x")):
        with pytest.raises(FileNotFoundError):
            call()
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_creates_a_file_and_all_read_the_same(storage):
    contents = [bytes([number]) * 5000 for number in range(8)]
    for turn in range(20):
        path = f"{FOLDER}/{turn}"
        made = at_once(8, lambda number, path=path: storage.create(path, contents[number]))
        assert made.count(True) == 1
        assert storage.read(path) == contents[made.index(True)]
    assert len(storage.names(FOLDER)) == 20


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_hard_links_one_still_creates_and_nothing_is_replaced(storage, code, monkeypatch):
    def no_link(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    made = at_once(8, lambda number: storage.create(f"{FOLDER}/a", bytes([number]) * 50))
    assert made.count(True) == 1
    assert storage.read(f"{FOLDER}/a") == bytes([made.index(True)]) * 50
    assert storage.names(FOLDER) == ["a"]


def test_a_place_that_another_thread_learns_meanwhile_is_not_another_place(storage, monkeypatch):
    look = folder._place_in

    def late(at):
        monkeypatch.setattr(folder, "_place_in", look)
        content = look(at)
        storage.place()
        return content

    monkeypatch.setattr(folder, "_place_in", late)
    assert storage.create("a", b"one")
    assert storage.read("a") == b"one"


def test_a_link_whose_answer_was_lost_counts_as_made(storage, monkeypatch):
    link = os.link

    def twice(*args, **kwargs):
        link(*args, **kwargs)
        link(*args, **kwargs)  # the client's repetition: FileExistsError

    monkeypatch.setattr(os, "link", twice)
    assert storage.create("a", b"1")
    monkeypatch.undo()
    assert not storage.create("a", b"1")


def test_a_manifest_comes_into_a_folder_that_is_there_or_not_at_all(storage):
    with pytest.raises(FileNotFoundError):
        storage.create(f"{FOLDER}/manifest.json", b"x")
    assert storage.folders() == []


def test_a_file_that_cannot_be_created_leaves_nothing(storage, monkeypatch):
    storage.place()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.create("a", b"1")
    monkeypatch.undo()
    assert all_files(storage._root) == [PLACE]


def test_all_readers_of_a_folder_get_the_same_id(tmp_path):
    ids = at_once(8, lambda _: FolderStorage(tmp_path / "shared").place())
    assert len(set(ids)) == 1
    assert FolderStorage(tmp_path / "shared").place() == ids[0]
    assert FolderStorage(tmp_path / "other").place() != ids[0]


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000])
def test_a_damaged_place_is_a_place(tmp_path, content, monkeypatch):
    monkeypatch.setattr(folder, "_PLACE_WAIT_S", 0.05)
    (tmp_path / PLACE).write_bytes(content)
    one, other = FolderStorage(tmp_path).place(), FolderStorage(tmp_path).place()
    assert one == other


def test_a_folder_that_was_replaced_takes_and_shows_nothing(tmp_path):
    repository = Repository(FolderStorage(tmp_path / "a"))
    save(repository, 1)
    (tmp_path / "a").rename(tmp_path / "b")
    for replaced in (lambda: None, (tmp_path / "a").mkdir):
        replaced()
        for act in (lambda: save(repository, 2), repository.published, repository.newest_valid):
            with pytest.raises(OSError) as refused:
                act()
            assert refused.value.errno in (errno.ESTALE, errno.ENOENT)
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "a").rmdir()
    (tmp_path / "b").rename(tmp_path / "a")
    save(repository, 3)
    assert steps(repository) == [3, 1]


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", f"{FOLDER}/../x", f"{FOLDER}/a/b", "..", "", f"{FOLDER}/", "a\0"],
)
def test_a_path_that_leads_elsewhere_is_refused(storage, path):
    for act in (
        lambda: storage.read(path),
        lambda: storage.write(path, [b"x"]),
        lambda: storage.create(path, b"x"),
        lambda: storage.open_local(path),
    ):
        with pytest.raises(ValueError, match="no name"):
            act()


def test_a_symbolic_link_is_neither_read_nor_written_through(storage, tmp_path):
    storage.write(f"{FOLDER}/a", [b"ours"])
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (storage._root / FOLDER / "link").symlink_to(secret)
    (storage._root / "top").symlink_to(secret)
    for path in (f"{FOLDER}/link", "top"):
        for act in (
            lambda path=path: storage.read(path),
            lambda path=path: storage.size(path),
            lambda path=path: storage.write(path, [b"x"]),
        ):
            with pytest.raises(OSError) as refused:
                act()
            assert refused.value.errno in (errno.ELOOP, errno.EEXIST)
    assert not storage.create(f"{FOLDER}/link", b"x")
    assert storage.sizes(FOLDER, ["a", "link"]) == {"a": 4}
    assert secret.read_bytes() == b"secret"


def test_a_linked_folder_is_no_save_and_is_not_removed_through(storage, tmp_path):
    storage.write(f"{FOLDER}/a", [b"ours"])
    (storage._root / OTHER).symlink_to(tmp_path / "a" / "b" / FOLDER)
    assert storage.folders() == [FOLDER]
    with pytest.raises(OSError):
        storage.remove(OTHER)
    assert storage.read(f"{FOLDER}/a") == b"ours"


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
def test_a_path_that_is_no_plain_file_is_refused_at_once(storage, kind):
    storage.write(f"{FOLDER}/a", [b"ours"])
    path = storage._root / FOLDER / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, 0o140600)
    with pytest.raises(OSError, match="not a plain file"):
        storage.read(f"{FOLDER}/odd")
    assert "odd" not in storage.sizes(FOLDER, ["a", "odd"])


def test_a_folder_goes_manifest_first(storage, monkeypatch):
    for name in ("manifest.json", "a", "zz"):
        storage.write(f"{FOLDER}/{name}", [b"x"])
    listed = folder._names  # in an order that the file system likes
    monkeypatch.setattr(folder, "_names", lambda at: sorted(listed(at), key="manifest.json".__eq__))
    gone, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name, **kw: (gone.append(name), unlink(name, **kw)))
    storage.remove(FOLDER)
    assert gone[0] == "manifest.json" and storage.folders() == []
    storage.remove(FOLDER)


def test_a_foreign_folder_inside_stays(storage):
    storage.write(f"{FOLDER}/a", [b"x"])
    (storage._root / FOLDER / "mine").mkdir()
    storage.remove(FOLDER)
    assert storage.names(FOLDER) == ["mine"]


def test_files_follow_the_umask(storage):
    before = os.umask(0o027)
    try:
        storage.write(f"{FOLDER}/a", [b"x"])
        storage.create(f"{FOLDER}/b", b"x")
    finally:
        os.umask(before)
    modes = {os.stat(storage._root / FOLDER / name).st_mode & 0o777 for name in "ab"}
    assert modes == {0o640}


@pytest.mark.parametrize(
    "where", ["{}", "file://{}", "local://{}", "{}/", "file://{}/"], ids=lambda word: word[:6]
)
def test_a_path_and_its_url_are_the_same_place(tmp_path, where):
    place = open_storage(str(tmp_path)).place()
    assert open_storage(where.format(tmp_path)).place() == place


def test_an_unknown_url_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="nosuch://bucket/x names no place"):
        open_storage("nosuch://bucket/x")
