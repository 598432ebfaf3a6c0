"""The zygote imports what workers imported, if it is installed and the same for all of them."""

import os
import site
import sys
import threading

import pytest

from elastane.process.status_page import StatusPage, WorkerPage
from elastane.process.zygote.early import ImportNotes
from elastane.process.zygote.learned import RENEWALS, Renewal, import_learned

PACKAGES = {
    "learned_calm": "import os\nos.environ.get('LEARNED_SETTING')\nos.environ.get('NO_SUCH')",
    "learned_setter": "import os\nos.environ.setdefault('LEARNED_SET', '1')\n"
    "os.environ['LEARNED_SET']\nos.environ.pop('LEARNED_GONE')",
    "learned_renewed": "import os\n__version__ = '1.5'\nrank = os.environ.get('RANK', '0')\n"
    "everything = [*os.environ]",
    "learned_ranked": "import os\nrank = os.getenv('RANK', '-1')",
    "learned_user": "import learned_ranked",
    "learned_all": "import os\nvariables = dict(os.environ)",
    "learned_busy": "import threading\ngo = threading.Event()\n"
    "threading.Thread(target=go.wait, daemon=True).start()",
    "learned_broken": "raise RuntimeError('not here')",
    "learned_last": "",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    for name, text in PACKAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "learned_calm" / "part.py").write_text("")
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = type(os.environ)
    yield
    assert type(os.environ) is kind, "reads are not watched any more"
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


def test_installed_packages_are_imported_and_their_variables_recorded(installed, monkeypatch):
    monkeypatch.setenv("LEARNED_SETTING", "here")
    names = ["learned_broken", "no_such_module", "learned_calm", "learned_calm.part"]
    found = import_learned(names, lambda: "")
    assert "learned_calm.part" in sys.modules and "learned_broken" not in sys.modules
    assert found.unsafe == set() and found.reads["LEARNED_SETTING"] == "here"
    assert found.reads["NO_SUCH"] is None


def test_variables_that_a_package_sets_are_its_own_and_not_read(installed, monkeypatch):
    monkeypatch.setenv("LEARNED_GONE", "here")
    monkeypatch.delenv("LEARNED_SET", raising=False)
    found = import_learned(["learned_setter"], lambda: "")
    monkeypatch.delenv("LEARNED_SET")
    set_by = {"LEARNED_SET": ("learned_setter", "1"), "LEARNED_GONE": ("learned_setter", None)}
    assert found.writes == set_by and found.unsafe == set()
    assert found.reads["LEARNED_SET"] is None


def test_the_users_own_modules_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "learned_own.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_learned(["learned_own"], lambda: "").unsafe == set()
    assert "learned_own" not in sys.modules


@pytest.mark.parametrize("name", ["learned_ranked", "learned_user"])
def test_a_package_that_reads_a_rank_is_unsafe_and_so_is_what_imports_it(installed, name):
    found = import_learned([name, "learned_last"], lambda: "")
    assert found.unsafe == {"learned_ranked", name}
    assert found.ranked == {"learned_ranked": "RANK"} and "learned_last" in sys.modules


@pytest.fixture
def renewal(monkeypatch):
    """Return the renewal of `learned_renewed`, whose parts a test may break."""

    def renew(module):
        module.rank = os.environ.get("RANK", "0")

    parts = {"versions": ("1.",), "renew": renew, "trial": {"RANK": "77"}}
    parts["shows"] = lambda module: module.rank == "77"

    def put(**changes):
        monkeypatch.setitem(RENEWALS, "learned_renewed", Renewal(**{**parts, **changes}))

    put()
    return put


def test_a_package_that_reads_a_rank_and_can_be_renewed_is_safe(installed, renewal, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    found = import_learned(["learned_renewed"], lambda: "")
    assert (found.unsafe, found.renewed) == (set(), {"learned_renewed"})
    assert "RANK" not in found.reads, "each worker has another one"
    assert os.environ["RANK"] == sys.modules["learned_renewed"].rank == "3", "the trial is over"


def fails(module):
    raise AttributeError("rank_zero_only")


@pytest.mark.parametrize(
    "change",
    [
        {"versions": ("2.",)},
        {"renew": fails},
        {"renew": lambda module: None},
        {"shows": lambda module: True},
    ],
    ids=["another version", "it raises", "no effect", "an effect that stays"],
)
def test_a_package_whose_renewal_does_not_work_is_unsafe(installed, renewal, change):
    renewal(**change)
    found = import_learned(["learned_renewed"], lambda: "")
    assert (found.unsafe, found.renewed) == ({"learned_renewed"}, set())


def test_a_package_that_reads_all_variables_is_unsafe(installed):
    assert import_learned(["learned_all"], lambda: "").unsafe == {"learned_all"}


def test_a_package_that_starts_a_thread_is_unsafe_and_the_last_one(installed):
    before = {*threading.enumerate()}
    found = import_learned(["learned_busy", "learned_last"], lambda: "a thread runs")
    assert found.unsafe == {"learned_busy"} and "learned_last" not in sys.modules
    assert len({*threading.enumerate()} - before) == 1
    sys.modules["learned_busy"].go.set()


def test_imports_are_noted_on_the_page_until_it_is_full(installed, monkeypatch):
    page = StatusPage.create()
    worker = WorkerPage.open(os.dup(page.fd))
    try:
        notes = ImportNotes(worker.note_import)
        notes.begin()
        import learned_calm.part  # noqa: F401

        for name in ("json.tool", "elastane.errors"):
            notes.find_spec(name)
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: 1)
            notes.find_spec("learned_last")

        sys.meta_path.remove(notes)
        assert page.imports == ("learned_calm", "learned_calm.part")
        while worker.note_import("a" * 1000):
            pass
        assert len(page.imports) > 10
        worker._memory[4096:4104] = b"\xff/..;\n-c"
        assert page.imports and not any("/" in name for name in page.imports)
    finally:
        worker.close()
        page.close()
