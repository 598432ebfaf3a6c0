"""Modules imported before the script imports them: hidden, and given out if they are its own."""

import atexit
import importlib
import importlib.util
import sys

import pytest

from elastane.process.zygote.early import EarlyModules, Imported

NAMES = ("early_one", "early_two")


@pytest.fixture
def early(tmp_path, monkeypatch):
    """Two packages that were imported early, and how to hide them."""
    for name in NAMES:
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("version = 1")
        (package / "part.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    modules = {name: importlib.import_module(name) for name in NAMES}
    importlib.import_module("early_one.part")
    made = []

    def hide(*bound, env=None, reads=None):
        origins = {name: module.__file__ for name, module in modules.items()}
        made.append(EarlyModules(Imported(origins, frozenset(bound), reads or {}), env or {}))
        made[-1].hide()
        return modules

    yield hide
    for one in made:
        one._forget(NAMES)
        atexit.unregister(one._show)
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def other_version(tmp_path, monkeypatch, name):
    package = tmp_path / "vendored" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("version = 2")
    monkeypatch.syspath_prepend(str(tmp_path / "vendored"))


def test_they_are_hidden_until_one_is_imported(early):
    modules = early()
    specs = {name: module.__spec__ for name, module in modules.items()}
    assert not {*NAMES, "early_one.part"} & set(sys.modules)
    import early_one.part

    assert sys.modules["early_one"] is modules["early_one"] is early_one
    assert "early_two" in sys.modules and early_one.part.value == 1
    assert early_one.__spec__ is specs["early_one"]
    assert not any(isinstance(finder, EarlyModules) for finder in sys.meta_path)


def test_a_look_that_imports_nothing_shows_the_file_and_leaves_them_hidden(early):
    modules = early()
    spec = importlib.util.find_spec("early_one")
    assert spec.origin == modules["early_one"].__file__
    assert "early_one" not in sys.modules


def test_a_package_that_is_first_on_the_path_by_now_is_the_one_that_is_imported(
    early, tmp_path, monkeypatch
):
    modules = early()
    other_version(tmp_path, monkeypatch, "early_one")
    import early_one
    import early_two

    assert early_one.version == 2
    assert early_two is not modules["early_two"], "it may hold the other version"


@pytest.mark.parametrize(("value", "same"), [("1", True), ("2", False)])
def test_a_package_that_would_read_other_variables_now_is_imported_anew(
    early, monkeypatch, value, same
):
    modules = early(reads={"SETTING": "1", "UNSET": None})
    monkeypatch.setenv("SETTING", value)
    import early_one

    assert (early_one is modules["early_one"]) == same


def test_of_what_torch_is_built_on_the_early_one_stays_and_that_is_said(
    early, tmp_path, monkeypatch, capsys
):
    modules = early("early_one")
    other_version(tmp_path, monkeypatch, "early_one")
    import early_one

    assert early_one is modules["early_one"]
    said = capsys.readouterr().err
    assert "vendored/early_one/__init__.py is not used" in said and "--no-zygote" in said


def test_a_variable_that_was_changed_is_said_once_and_only_if_torch_has_read_it(
    early, monkeypatch, capsys
):
    early("early_one", env={"OMP_NUM_THREADS": "1"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    import early_two

    assert early_two.version == 1 and capsys.readouterr().err == ""
    import early_one  # noqa: F401

    said = capsys.readouterr().err
    assert "OMP_NUM_THREADS has no effect" in said and "TOKENIZERS" not in said
