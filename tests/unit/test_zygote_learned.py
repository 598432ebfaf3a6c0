"""What the zygote imports because workers did: what is installed, and is alike for all of them."""

import os
import site
import sys
import threading

import pytest

from elastane.process.status_page import StatusPage, WorkerPage
from elastane.process.zygote.early import ImportNotes
from elastane.process.zygote.learned import import_learned

PACKAGES = {
    "learned_calm": "import os\nsetting = os.environ.get('LEARNED_SETTING')",
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


def test_what_is_installed_is_imported_and_its_variables_are_known(installed, monkeypatch):
    monkeypatch.setenv("LEARNED_SETTING", "here")
    names = ["learned_broken", "no_such_module", "learned_calm", "learned_calm.part"]
    found = import_learned(names, lambda: "")
    assert "learned_calm.part" in sys.modules and "learned_broken" not in sys.modules
    assert found.unsafe == set() and found.reads["LEARNED_SETTING"] == "here"


def test_the_users_own_modules_are_not(tmp_path, monkeypatch):
    (tmp_path / "learned_own.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_learned(["learned_own"], lambda: "").unsafe == set()
    assert "learned_own" not in sys.modules


@pytest.mark.parametrize("name", ["learned_ranked", "learned_user"])
def test_a_package_that_reads_a_rank_is_unsafe_whoever_imports_it(installed, name):
    assert import_learned([name], lambda: "").unsafe == {"learned_ranked"}


def test_a_package_that_reads_all_variables_is_unsafe(installed):
    assert import_learned(["learned_all"], lambda: "").unsafe == {"learned_all"}


def test_a_package_that_starts_a_thread_is_unsafe_and_the_last_one(installed):
    before = threading.active_count()
    found = import_learned(["learned_busy", "learned_last"], lambda: "a thread runs")
    assert found.unsafe == {"learned_busy"} and "learned_last" not in sys.modules
    assert threading.active_count() == before + 1
    sys.modules["learned_busy"].go.set()


def test_imports_are_noted_on_the_page_until_it_is_full(installed):
    page = StatusPage.create()
    worker = WorkerPage.open(os.dup(page.fd))
    try:
        notes = ImportNotes(worker.note_import)
        notes.begin()
        import learned_calm.part  # noqa: F401

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
