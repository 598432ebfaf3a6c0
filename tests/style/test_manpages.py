"""The man pages: one for each verb, with every option, in roff that the formatters take."""

import re
import shutil
import subprocess
import sys

import pytest
from style_sources import ROOT

from elastane.cli.main import VERBS
from elastane.errors import ExitCode

sys.path.insert(0, str(ROOT / "manual"))
try:
    from commands import command_of
    from manpages import man_pages
finally:
    sys.path.pop(0)

FORMATTERS = {
    "mandoc": ["mandoc", "-T", "lint", "-W", "warning,stop"],
    # A long list of choices has no place to break at.
    "groff": ["groff", "-man", "-ww", "-W", "break", "-z", "-T", "utf8"],
}


def plain(page):
    return page.replace(r"\-", "-").replace(r"\e", "\\").replace(r"\&", "")


def test_there_is_a_page_for_the_command_and_for_each_verb():
    assert set(man_pages()) == {"elastane.1", *(f"elastane-{verb}.1" for verb in VERBS)}
    assert all(f"elastane {verb}" in plain(man_pages()["elastane.1"]) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_has_every_option_of_its_verb(verb):
    command = command_of(verb)
    page = plain(man_pages()[f"elastane-{verb}.1"])
    for one in command.acts or (command,):
        for _, arguments in one.groups:
            for argument in arguments:
                assert all(rf"\fB{name}\fR" in page for name in argument.spellings)
                assert f"{argument.meaning}" in page and argument.variable in page


def test_every_page_has_the_exit_codes_of_the_code():
    for page in man_pages().values():
        status = page.split(".SH EXIT STATUS\n")[1].split("\n.SH ")[0]
        assert [int(code) for code in re.findall(r"\\fB(\d+)\\fR", status)] == sorted(ExitCode)


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_a_formatter_finds_nothing_wrong(formatter, tmp_path):
    if shutil.which(formatter) is None:
        pytest.skip(f"{formatter} is not installed")
    for name, page in man_pages().items():
        (tmp_path / name).write_text(page)
    words = [*FORMATTERS[formatter], *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
