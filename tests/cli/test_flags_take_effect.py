"""Options and variables change real workers as documented."""

import os
import sys

import pytest
from command_harness import LIGHT, PLAIN, TELL, end_of, write

RUN = [sys.executable, "-m", "elastane", "run"]
WHERE = "import os, sys\nfrom tell import tell\ntell(warm='wave' in sys.modules, **{})\n"


@pytest.fixture
def here(tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def said(folder):
    return (folder / "node0.log").read_text()


def test_python_exec_runs_the_script(here):
    python = here / "my-python"
    python.write_text(f'#!/bin/sh\nMINE=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    body = "import os\nfrom tell import tell\ntell(mine=os.environ['MINE'])\n"
    told = end_of(here, [*RUN, write(here, body), "-x"], PYTHON_EXEC=str(python))
    assert told[0]["mine"] == "yes"
    assert told[0]["argv"] == ["-x"]


@pytest.mark.parametrize(
    ("options", "is_warm"),
    [
        ((), True),
        (("--start-method", "fork"), True),
        (("--start-method=spawn",), False),
        (("--no-zygote",), False),
    ],
)
def test_run_path_uses_the_start_method(here, options, is_warm):
    script = write(here, WHERE.format("{'main': __name__}"))
    told = end_of(here, [*RUN, "--run-path", *options, "--preload", "wave", script, "-x"])
    assert told[0]["warm"] is is_warm
    assert told[0]["main"] == "__main__"
    assert told[0]["argv"] == ["-x"]


def test_a_start_method_for_a_script_is_ignored_with_a_note(here):
    script = write(here, WHERE.format("{}"))
    told = end_of(here, [*RUN, "--start-method", "spawn", "--preload", "wave", script])
    assert told[0]["warm"] is True
    assert "--start-method has no effect without --run-path" in said(here)


def test_workers_use_the_local_address_for_rendezvous(here):
    body = "import os\nfrom tell import tell\ntell(master=os.environ['MASTER_ADDR'])\n"
    told = end_of(here, [*RUN, "--local-addr", "127.0.0.9", write(here, body)], **LIGHT)
    assert told[0]["master"] == "127.0.0.9"


def test_loglevel_selects_the_messages(here):
    end_of(here, [*RUN, write(here, PLAIN)], LOGLEVEL="ERROR", **LIGHT)
    assert said(here) == ""
    end_of(here, [*RUN, write(here, PLAIN)], LOGLEVEL="INFO", **LIGHT)
    assert len(said(here).splitlines()) > 2


def test_the_value_true_in_a_variable_sets_a_flag(here):
    """torchrun fails with a stack trace on PET_STANDALONE=true."""
    told = end_of(here, [*RUN, write(here, PLAIN)], PET_STANDALONE="true", **LIGHT)
    assert told[0]["WORLD_SIZE"] == "1"
    assert said(here) == ""


def test_the_settings_file_of_the_project_is_applied(here):
    (here / "elastane.toml").write_text("[run]\nnproc-per-node = 2\npreload = ['json']\n")
    folder = here / "src"
    folder.mkdir()
    (folder / "tell.py").write_text(TELL)
    (here / ".git").mkdir()
    told = end_of(folder, [*RUN, write(folder, PLAIN)])
    assert {worker["WORLD_SIZE"] for worker in told.values()} == {"2"}
    assert f"from {here / 'elastane.toml'}: nproc-per-node, preload" in said(folder)


def test_a_local_rank_of_two_digits_can_be_selected(here):
    """torchrun reads one digit only, so that ranks from 10 on cannot be selected."""
    argv = [*RUN, "--nproc-per-node", "11", "--log-dir", "logs", "--redirects", "0:1,10:1"]
    # One write, since the pieces of print() of several workers could mix.
    body = "import os, sys\nsys.stdout.write(f\"I am {os.environ['RANK']}\\n\")\n"
    end_of(here, [*argv, write(here, body)], **LIGHT)
    assert sorted(said(here).split()[2::3], key=int) == [str(rank) for rank in range(1, 10)]
    kept = {path.parent.name: path for path in (here / "logs").glob("*/*/*/*/stdout.log")}
    assert {kept[name].read_text() for name in ("rank_0", "rank_10")} == {"I am 0\n", "I am 10\n"}


def test_the_older_launcher_passes_the_local_rank_first_and_expands_the_macro(here):
    argv = [sys.executable, "-m", "elastane.launch", "--nproc-per-node", "2"]
    told = end_of(here, [*argv, write(here, PLAIN), "${local_rank}", f"--home={os.sep}"], **LIGHT)
    assert told[1]["argv"] == ["--local-rank=1", "1", f"--home={os.sep}"]
