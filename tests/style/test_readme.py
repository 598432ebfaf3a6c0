"""The commands that README.md and docs show exist, with the options they show."""

import re
import shlex

import pytest
from style_sources import ROOT, short

from elastane.cli.main import VERBS

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _commands(page):
    for block in _FENCE.findall(page.read_text("utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ").split(" #")[0].strip()


def _known_options(verb):
    from importlib import import_module

    from elastane.cli.main import make_parser

    module = import_module("elastane.cli." + verb.replace("-", "_"))
    parser = make_parser(module, verb, "")
    acts = [action for action in parser._actions if isinstance(action.choices, dict)]
    parsers = [parser, *(one for action in acts for one in action.choices.values())]
    return {option for one in parsers for option in getattr(one, "_option_string_actions", ())}


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_shown_commands_exist(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in _commands(page):
        if command.startswith("make "):
            words = [word for word in shlex.split(command)[1:] if "=" not in word]
            assert set(words) <= targets, command
        words = command.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] == ["elastane"] and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in VERBS, command
            _check_options(words[1], command)


def _check_options(verb, command):
    known = _known_options(verb)
    words = shlex.split(command, comments=True)
    for word in words[words.index(verb) + 1 :]:
        if word.endswith(".py"):
            return  # what follows is the script's own
        if word.startswith("--"):
            assert word.split("=")[0].replace("_", "-") in known, command
