"""The registry of stores: every backend has an entry of the same form, elastane's too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memory_store import MemoryStore

from elastane.errors import ConfigurationError, UsageError
from elastane.options import rendezvous as options_backend
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.options.rendezvous import read_conf
from elastane.stores import registry
from elastane.stores.file import FileStore

MODULE = """
from elastane.stores import ConfKey, StoreBackend
from memory_store import MemoryBackend, MemoryStore

BACKEND = StoreBackend(
    name="shelf",
    make=lambda place: MemoryStore(MemoryBackend()),
    endpoint="the number of a shelf",
    example="7",
    keys=(ConfKey("shelf_colour", "what it is painted with", "blue"),),
)
OTHER_NAME = StoreBackend(name="rack", make=BACKEND.make, endpoint="x", example="x")
NO_BACKEND = "a text"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs packages with one entry each in the group."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def installed(name: str, entry: str, module: str = MODULE) -> None:
        (tmp_path / f"{name}.py").write_text(module)
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{entry}\n")
        registry._installed.cache_clear()

    yield installed
    monkeypatch.undo()
    registry._installed.cache_clear()
    for name in ("shelves", "racks"):
        sys.modules.pop(name, None)


def refused(name: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        registry.backend(name)
    assert caught.value.slug == "store-backend"
    return caught.value


@pytest.mark.parametrize("name", registry.names())
def test_every_store_of_elastane_is_an_entry_of_the_same_form(name: str) -> None:
    found = registry.backend(name)
    assert found.name == name and found.endpoint and found.example
    assert found.default_port is None or str(found.default_port) in found.example
    assert len({key.name for key in found.keys}) == len(found.keys)
    assert all(key.meaning for key in found.keys)


def test_making_a_store_does_no_io(tmp_path: Path) -> None:
    assert isinstance(registry.make_store("file", str(tmp_path / "new"), {}), FileStore)
    assert not (tmp_path / "new").exists()


def test_a_missing_endpoint_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry.backend("file").place("", {}, {})
    assert caught.value.slug == "endpoint-missing"
    assert "--rdzv-endpoint /shared/folder" in str(caught.value.next_step)


def test_an_unknown_name_is_refused_with_the_nearest_one_and_all_that_there_are() -> None:
    error = refused("etdc")
    assert "did you mean etcd?" in str(error.expected)
    assert all(name in str(error.expected) for name in registry.names())


def test_a_store_of_another_package_is_chosen_by_the_command_line(install) -> None:
    install("shelves", "shelf = shelves:BACKEND")
    words = ["--nnodes", "2", "--rdzv-id", "j", "--rdzv-backend", "shelf", "--rdzv-endpoint", "7"]
    config = build(parse([*words, "--rdzv-conf", "shelf_colour=red", "train.py"], {}), {})
    rendezvous = config.rendezvous
    assert (rendezvous.backend, rendezvous.store) == ("shelf", "7")
    assert rendezvous.store_conf == {"shelf_colour": "red"}
    store = registry.make_store(rendezvous.backend, rendezvous.store, rendezvous.store_conf)
    assert isinstance(store, MemoryStore)
    assert options_backend.is_builtin("shelf") and "shelf" in options_backend.names()


def test_its_keys_are_refused_with_another_backend(install) -> None:
    install("shelves", "shelf = shelves:BACKEND")
    assert read_conf("shelf_colour=red").store == {"shelf_colour": "red"}
    words = ["--nnodes=2", "--rdzv-endpoint", "h", "--rdzv-conf", "shelf_colour=red"]
    with pytest.raises(ConfigurationError, match="is for shelf, and the backend is elastane"):
        build(parse([*words, "train.py"], {}), {})
    with pytest.raises(UsageError) as caught:
        read_conf("shelf_color=red")
    assert "shelf_colour" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("shelf = shelves:MISSING", "cannot be loaded: AttributeError"),
        ("shelf = nowhere_at_all:BACKEND", "cannot be loaded: ModuleNotFoundError"),
        ("shelf = shelves:NO_BACKEND", "it is str, not a StoreBackend"),
        ("shelf = shelves:OTHER_NAME", "its backend is named 'rack'"),
    ],
)
def test_a_broken_entry_is_an_error_that_names_the_package(install, entry, fault) -> None:
    install("shelves", entry)
    error = refused("shelf")
    assert fault in error.what and "shelves 1.2" in error.what
    assert "elastane.stores" in str(error.where)


def test_a_broken_entry_harms_no_other_backend(install) -> None:
    install("shelves", "shelf = nowhere_at_all:BACKEND")
    assert registry.backend("file").name == "file"
    with pytest.raises(UsageError, match="no such key"):
        read_conf("shelf_colour=red")


def test_two_packages_with_one_name_are_both_named(install) -> None:
    install("shelves", "shelf = shelves:BACKEND")
    install("racks", "shelf = racks:BACKEND")
    error = refused("shelf")
    assert "shelves 1.2" in error.what and "racks 1.2" in error.what


def test_a_package_cannot_replace_a_store_of_elastane(install) -> None:
    install("shelves", "file = shelves:BACKEND")
    assert isinstance(registry.make_store("file", "/nowhere", {}), FileStore)
