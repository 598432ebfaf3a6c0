"""Object stores whose client fails, lacks features, or loses answers."""

import errno
import itertools
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from small_saves import save, steps

from elastane.errors import ConfigurationError
from elastane.storage import Repository, open_storage
from elastane.storage.objects import ObjectStorage

FOLDER = "step-000000000001.e0000.r000001.a00.00000000"
_numbers = itertools.count()


class OddError(Exception):
    """An error class of some client."""


class Client(MemoryFileSystem):
    """A store in memory; it fails at the calls in `faults`, before or after their effect."""

    cachable = False

    def __init__(self):
        super().__init__()
        self.faults = {}

    def _met(self, name, act):
        when, error = self.faults.get(name, ("", None))
        if when == "before":
            raise error
        result = act()
        if when == "after":
            raise error
        return result

    def pipe_file(self, path, value, **kwargs):
        return self._met("pipe_file", lambda: super(Client, self).pipe_file(path, value, **kwargs))

    def cat_file(self, path, **kwargs):
        return self._met("cat_file", lambda: super(Client, self).cat_file(path, **kwargs))

    def ls(self, path, **kwargs):
        return self._met("ls", lambda: super(Client, self).ls(path, **kwargs))

    def info(self, path, **kwargs):
        return self._met("info", lambda: super(Client, self).info(path, **kwargs))


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def storage(client):
    return ObjectStorage(client, f"/odd/{next(_numbers)}", "odd://place")


ERRORS = [OddError("gone"), OSError(errno.EIO, "gone"), OSError("gone"), TimeoutError("gone")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["ls", "cat_file"])
def test_a_store_that_fails_is_neither_empty_nor_damaged(storage, client, call, error):
    save(Repository(storage), 1)
    client.faults[call] = ("before", error)
    with pytest.raises(OSError, match="gone") as told:
        Repository(storage).newest_valid()
    assert told.value.errno != errno.EIO and not isinstance(told.value, FileNotFoundError)


def test_a_put_whose_answer_was_lost_counts_where_the_object_is_there(storage, client):
    client.faults["pipe_file"] = ("after", OddError("connection reset"))
    assert storage.create("a", b"1")
    assert not storage.create("a", b"2")
    client.faults["pipe_file"] = ("before", OddError("connection reset"))
    with pytest.raises(OSError, match="connection reset"):
        storage.create("b", b"1")
    with pytest.raises(FileNotFoundError):
        storage.read("b")


def test_a_client_that_repeats_its_put_and_meets_itself_has_made_the_object(storage, client):
    put = MemoryFileSystem.pipe_file

    def twice(path, value, **kwargs):
        put(client, path, value, **kwargs)
        put(client, path, value, **kwargs)

    client.pipe_file = twice
    assert storage.create("a", b"1")


def test_a_client_that_knows_no_conditions_is_asked_whether_there_is_one(storage, client):
    put = MemoryFileSystem.pipe_file
    client.pipe_file = lambda path, value: put(client, path, value)
    assert storage.create("a", b"1")
    assert not storage.create("a", b"2")
    assert storage.read("a") == b"1"
    save(Repository(storage), 1)
    assert steps(Repository(storage)) == [1]


def test_a_store_that_ignores_conditions_ends_with_one_manifest_all_the_same(storage, client):
    put = MemoryFileSystem.pipe_file
    client.pipe_file = lambda path, value, mode="": put(client, path, value)
    repository = Repository(storage)
    folder = save(repository, 1)
    before = storage.read(f"{folder}/manifest.json")
    repository.publish_when_whole(folder, 1, wait_s=0)
    assert storage.read(f"{folder}/manifest.json") == before
    assert repository.newest_valid().found.key.step == 1


class Upload:
    """A file whose upload completes when it is garbage collected, as in most clients."""

    def __init__(self, path, fails):
        self.path, self.fails = path, fails
        self.held, self.closed = b"", False

    def write(self, data):
        if self.fails == "write":
            raise OddError("503 slow down")
        self.held += bytes(data)

    def close(self):
        if not self.closed:
            self.closed = True
            content = self.held[:-1] if self.fails == "less" else self.held
            MemoryFileSystem().pipe_file(self.path, content)
            if self.fails == "close":
                raise OddError("503 slow down")

    __del__ = close


@pytest.mark.parametrize("fails", ["write", "close", "less"])
def test_an_upload_that_fails_leaves_no_object(storage, client, fails):
    client.open = lambda path, *_, **__: Upload(path, fails)
    with pytest.raises(OSError, match=r"503 slow down|took 5 of 6 bytes"):
        storage.write(f"{FOLDER}/a", [b"abcdef"])
    assert not client.exists(f"{storage._root}/{FOLDER}/a")


def test_a_password_in_a_url_is_not_shown():
    where = open_storage("memory://user:secret@host/x").where
    assert "secret" not in where and "user@host/x" in where


def test_without_fsspec_a_url_is_refused_with_the_extras_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"elastane\[objects\]") as told:
        open_storage("memory://x")
    assert told.value.slug == "extra-missing"


def test_without_the_client_of_a_scheme_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(ConfigurationError, match="adlfs") as told:
        open_storage("abfs://bucket/x")
    assert told.value.slug == "extra-missing"


def test_without_xxhash_nothing_is_written_and_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigurationError, match=r"elastane\[checkpoints\]"):
        open_storage(str(tmp_path)).write(f"{FOLDER}/a", [b"x"])
