"""Early modules are hidden until the script imports them, and provided if they are the same."""

import atexit
import importlib
import importlib.util
import os
import sys

import pytest

from elastane.process.zygote.early import EarlyModules, Imported
from elastane.process.zygote.learned import RENEWALS, Renewal

NAMES = ("early_one", "early_two")


@pytest.fixture
def early(tmp_path, monkeypatch):
    """Two packages that were imported early, and a way to hide them."""
    for name in NAMES:
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("version = 1")
        (package / "part.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    modules = {name: importlib.import_module(name) for name in NAMES}
    importlib.import_module("early_one.part")
    made = []

    def hide(*bound, env=None, **more):
        origins = {name: module.__file__ for name, module in modules.items()}
        made.append(EarlyModules(Imported(origins, frozenset(bound), **more), env or {}))
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


def test_early_modules_are_hidden_until_one_is_imported(early):
    modules = early()
    specs = {name: module.__spec__ for name, module in modules.items()}
    loader = specs["early_one"].loader
    assert not {*NAMES, "early_one.part"} & set(sys.modules)
    import early_one.part

    assert sys.modules["early_one"] is modules["early_one"] is early_one
    assert "early_two" in sys.modules and early_one.part.value == 1
    assert early_one.__spec__ is specs["early_one"]
    assert early_one.__spec__.loader is early_one.__loader__ is loader
    assert not any(isinstance(finder, EarlyModules) for finder in sys.meta_path)


def test_find_spec_returns_the_file_and_leaves_the_modules_hidden(early):
    modules = early()
    spec = importlib.util.find_spec("early_one")
    assert spec.origin == modules["early_one"].__file__
    assert "early_one" not in sys.modules


def test_a_package_put_first_on_the_path_is_imported_instead(early, tmp_path, monkeypatch):
    modules = early()
    other_version(tmp_path, monkeypatch, "early_one")
    import early_one
    import early_two

    assert early_one.version == 2
    assert early_two is not modules["early_two"], "it may hold the other version"


def test_a_package_is_imported_again_if_another_of_its_unit_has_another_file(
    early, tmp_path, monkeypatch
):
    modules = early()
    other_version(tmp_path, monkeypatch, "early_two")
    import early_one
    import early_two

    assert early_one is not modules["early_one"], "it may hold the other version"
    assert early_two.version == 2


@pytest.fixture
def kept(monkeypatch):
    """A module that keeps the rank of its import, and its renewal."""

    def renew(module):
        module.rank = int(os.environ["RANK"])

    one = Renewal(("1",), renew, {"RANK": "77"}, lambda module: module.rank == 77)
    monkeypatch.setitem(RENEWALS, "early_one.part", one)
    return frozenset({"early_one.part"})


def test_a_renewed_module_has_the_workers_own_values(early, kept, monkeypatch):
    modules = early(renewed=kept)
    modules["early_one"].part.rank = 0
    monkeypatch.setenv("RANK", "5")
    import early_one.part

    assert early_one is modules["early_one"] and early_one.part.rank == 5


def test_a_worker_without_a_rank_imports_rank_keeping_modules_itself(early, kept, monkeypatch):
    modules = early(renewed=kept)
    monkeypatch.delenv("RANK", raising=False)
    import early_one.part

    assert early_one is not modules["early_one"]


def test_a_worker_has_the_variables_that_packages_set_at_import(early, monkeypatch, capsys):
    writes = {
        "SET": ("early_one", "1"),
        "GONE": ("early_one", None),
        "OMP_SET": ("early_one", "2"),
        "OF_TWO": ("early_two", "1"),
    }
    # What other tests of this process have set is not the script's.
    early("early_two", writes=writes, env=os.environ)
    monkeypatch.setenv("GONE", "here")
    for name in ("SET", "OMP_SET", "OF_TWO"):
        monkeypatch.delenv(name, raising=False)
    import early_one  # noqa: F401

    assert [os.environ.get(name) for name in writes] == ["1", None, "2", None]
    import early_two  # noqa: F401

    assert os.environ["OF_TWO"] == "1"
    assert capsys.readouterr().err == "", "the script itself has set nothing"


@pytest.mark.parametrize(("value", "same"), [("1", True), ("2", False)])
def test_a_package_that_would_read_other_values_is_imported_again(early, monkeypatch, value, same):
    modules = early(reads={"SETTING": "1", "UNSET": None})
    monkeypatch.setenv("SETTING", value)
    import early_one

    assert (early_one is modules["early_one"]) == same


def test_an_early_dependency_of_torch_stays_with_a_warning(early, tmp_path, monkeypatch, capsys):
    modules = early("early_one")
    other_version(tmp_path, monkeypatch, "early_one")
    import early_one

    assert early_one is modules["early_one"]
    said = capsys.readouterr().err
    assert "vendored/early_one/__init__.py is not used" in said and "--no-zygote" in said


def test_a_changed_variable_is_reported_once_and_only_if_torch_reads_it(early, monkeypatch, capsys):
    early("early_one", env={"OMP_NUM_THREADS": "1"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    import early_two

    assert early_two.version == 1 and capsys.readouterr().err == ""
    import early_one  # noqa: F401

    said = capsys.readouterr().err
    assert "OMP_NUM_THREADS has no effect" in said and "TOKENIZERS" not in said
