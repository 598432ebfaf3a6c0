"""Write the man pages: `python manual/manpages.py FOLDER`.

elastane.1 lists the commands, and each verb has a page of its own, elastane-VERB.1, as git's have.
Their text is that of the parsers, and of the exit codes in docs/errors.md. The date is today's, or
that of SOURCE_DATE_EPOCH, as in other reproducible builds.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from commands import Argument, Command, commands

from elastane.cli.main import VERBS
from elastane.version import __version__

ROOT = Path(__file__).parent.parent
SECTION = 1
_ABOUT = "elastic, fault-tolerant distributed training for PyTorch"
_EXIT_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@cache
def man_pages() -> dict[str, str]:
    """Return the source of each man page by its file name."""
    found = commands()
    made = {f"elastane.{SECTION}": _page_of_all()}
    made |= {f"{_hyphenated(one.name)}.{SECTION}": _page_of(one) for one in found}
    return made


def _page_of_all() -> str:
    lines = _head("elastane", _ABOUT, ["elastane VERB [options]", "elastane --help | --version"])
    lines += [".SH COMMANDS"]
    for verb, what in VERBS.items():
        lines += [".TP", rf"\fBelastane {_text(verb)}\fR", _text(what)]
    lines += [*_exit_status(), *_see_also(VERBS)]
    return "\n".join(lines) + "\n"


def _page_of(command: Command) -> str:
    lines = _head(command.name, command.meaning, [one.usage for one in command.acts or [command]])
    lines += [".SH OPTIONS", *_options(command)] if not command.acts else []
    for act in command.acts:
        name = act.name.split()[-1]
        lines += [f".SH {_text(name.upper())}", _text(f"{act.meaning}.")]
        lines += [".PP", rf"\fB{_text(act.usage)}\fR", *_options(act)]
    if command.examples:
        lines += _laid_out(command.examples)
    return "\n".join([*lines, *_exit_status(), *_see_also([])]) + "\n"


def _head(name: str, meaning: str, usages: list[str]) -> list[str]:
    name = _hyphenated(name)
    day = time.strftime(
        "%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    )
    return [
        '.\\" Made by manual/manpages.py from the parsers of elastane.',
        f'.TH "{_text(name.upper())}" {SECTION} "{day}" "elastane {__version__}" "elastane manual"',
        ".ad l",
        ".nh",
        ".SH NAME",
        rf"{_text(name)} \- {_text(meaning)}",
        ".SH SYNOPSIS",
        ".nf",
        *(line for usage in usages for line in _usage(usage)),
        ".fi",
    ]


def _usage(usage: str) -> list[str]:
    """Return a usage in lines of a terminal, the first word of each command bold."""
    broken = textwrap.wrap(
        usage, 72, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [rf"\fB{_text(broken[0])}\fR", *map(_text, broken[1:])]


def _options(command: Command) -> list[str]:
    lines: list[str] = []
    for title, arguments in command.groups:
        lines += [f".SS {_text(title)}"]
        for argument in arguments:
            lines += [".TP", _written(argument), _meaning(argument)]
    return lines


def _written(argument: Argument) -> str:
    names = ", ".join(rf"\fB{_text(name)}\fR" for name in argument.spellings)
    return f"{names} \\fI{_text(argument.value)}\\fR" if argument.value else names


def _meaning(argument: Argument) -> str:
    variable = f"; variable {argument.variable}" if argument.variable else ""
    return _text(argument.meaning + variable) or r"\&"


def _laid_out(examples: str) -> list[str]:
    title, _, rest = examples.partition("\n")
    return [".SH " + _text(title.rstrip(":").upper()), ".nf", *map(_text, rest.splitlines()), ".fi"]


def _exit_status() -> list[str]:
    """Return the table of docs/errors.md, which a test compares with the code."""
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    lines = [".SH EXIT STATUS"]
    for code, advice, meaning in _EXIT_ROW.findall(text):
        lines += [".TP", rf"\fB{code}\fR", _text(f"{meaning}; what to do: {advice}")]
    return lines


def _see_also(verbs: Iterable[str]) -> list[str]:
    names = [f"elastane-{verb}" for verb in verbs] or ["elastane"]
    return [".SH SEE ALSO", ",\n".join(rf"\fB{_text(name)}\fR({SECTION})" for name in names)]


def _hyphenated(name: str) -> str:
    return name.replace(" ", "-")


def _text(text: str) -> str:
    """Return text as roff prints it: with hyphens that can be copied, and never a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    """Write all pages into the folder of the command line, and nothing else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
