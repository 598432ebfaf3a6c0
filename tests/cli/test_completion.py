"""`elastane completion`: the completions of its script in bash."""

import subprocess
import sys

import pytest

from elastane.cli import completion
from elastane.cli import main as cli

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_elastane elastane "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "elastane.bash"
    words = [sys.executable, "-m", "elastane", "completion", "bash"]
    with path.open("w") as file:
        subprocess.run(words, stdout=file, check=True, timeout=60)
    return path


def completed(script, *words):
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_all_verbs_are_offered(script):
    assert set(cli.VERBS) <= set(completed(script, "elastane", ""))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ru"], ["run"]),
        (["run", "--nno"], ["--nnodes"]),
        (["kubernetes", "inst"], ["install"]),
        (["checkpoint", "verify", "--js"], ["--json"]),
        (["completion", "b"], ["bash"]),
    ],
)
def test_verbs_subcommands_options_and_choices_are_completed(script, words, offered):
    assert completed(script, "elastane", *words) == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_is_printed_for_every_shell(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "dashboard" in capsys.readouterr().out
