"""A script that reads its rank before `init()` gets a warning at the job's start."""

import logging
import sys
from types import ModuleType

import pytest

from elastane.worker.early_read import warn_of_early_read

HEAD = "import os\nfrom os import environ, getenv\n"


@pytest.fixture
def warned(tmp_path, monkeypatch, caplog):
    """Run a script as `__main__`; return the log records of its `init()` call."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    path = tmp_path / "train.py"
    main = ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(body):
        path.write_text(HEAD + body)
        with caplog.at_level(logging.WARNING):
            code = compile(path.read_text(), str(path), "exec")
            exec(code, {"init": lambda: warn_of_early_read(sys._getframe(1))})
        return caplog.text

    return run


@pytest.mark.parametrize(
    ("body", "line", "name"),
    [
        ("rank = int(os.environ['RANK'])\ninit()", 3, "RANK"),
        ("rank = int(environ.get('RANK', 0))\ninit()", 3, "RANK"),
        ("size = os.getenv('WORLD_SIZE')\ninit()", 3, "WORLD_SIZE"),
        ("size = getenv('WORLD_SIZE')\ninit()", 3, "WORLD_SIZE"),
        ("def main():\n    if True:\n        os.environ['RANK']\n    init()\nmain()", 5, "RANK"),
        ("def main():\n    init()\nos.environ['MASTER_ADDR']\nmain()", 5, "MASTER_ADDR"),
    ],
)
def test_a_read_on_the_way_to_init_is_warned_of_with_its_line(warned, body, line, name):
    said = warned(body)
    assert f"train.py:{line} reads {name} before elastane.init()" in said
    assert "[variable-before-place]" in said


@pytest.mark.parametrize(
    "body",
    [
        "init()\nrank = os.environ['RANK']",
        "def later():\n    return os.environ['RANK']\ninit()\nlater()",
        "os.environ['RANK'] = '0'\ninit()",
        "local = os.environ['LOCAL_RANK'] if 'LOCAL_RANK' in os.environ else 0\ninit()",
        "'RANK' in os.environ\ninit()",
        "settings = {'RANK': 1}\nsettings['RANK']\nsettings.get('RANK')\ninit()",
    ],
)
def test_other_reads_are_not(warned, body):
    assert warned(body) == ""


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "1")])
def test_one_worker_warns_once_for_the_job(warned, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert warned("os.environ['RANK']\ninit()") == ""


def test_a_worker_without_a_script_that_can_be_read_is_left_alone(warned, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "gone.py"))
    assert warned("os.environ['RANK']\ninit()") == ""
