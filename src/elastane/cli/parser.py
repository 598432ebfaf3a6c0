"""The parser of most verbs: argparse with elastane's errors; and the table of acts of a verb."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastane.errors import UsageError

# How argparse names a word that is none of the possible ones; with quotes until Python 3.13.
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
# How argparse names a value that is no number.
_NO_NUMBER = re.compile(r"argument ([\w-]+)(?:/[\w/-]+)?: invalid (int|float) value: '(.*)'")


class VerbParser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are UsageErrors that name the nearest option or choice."""

    def error(self, message: str) -> Any:
        """Raise UsageError instead of exiting."""
        if wrong := _NO_NUMBER.fullmatch(message):
            raise UsageError(
                f"{wrong[1]} {wrong[3]!r}",
                slug="bad-option-value",
                expected="a whole number" if wrong[2] == "int" else "a number",
                next_step=f"{self.prog} --help",
            )
        raise UsageError(
            message,
            slug="unknown-option" if "unrecognized" in message else "usage",
            expected=self._nearest(message),
            next_step=f"{self.prog} --help",
        )

    def _nearest(self, message: str) -> str:
        import difflib

        if chosen := _CHOICE.search(message):
            names = [name.strip("' ") for name in chosen[2].split(",")]
            near = difflib.get_close_matches(chosen[1], names, n=1)
            return f"did you mean {near[0]}?" if near else ""
        known = list(self._option_string_actions)
        for word in message.split():
            if word.startswith("-"):
                name = word.rstrip(":,").partition("=")[0]
                near = difflib.get_close_matches(name, known, n=1)
                if near and near[0] != name:
                    return f"did you mean {near[0]}?"
        return ""


def add_job_options(
    parser: argparse.ArgumentParser, about: str = "name of the job, or its log folder", **more: Any
) -> None:
    """Add the job that a verb is about, by name or log folder, and where its logs are.

    `about` is the help of the job, `more` are arguments of `add_argument` for it.
    """
    parser.add_argument("job", metavar="JOB_OR_DIR", help=about, **more)
    text = "the --log-dir of elastane run"
    parser.add_argument("--log-dir", metavar="DIR", default="", help=text)


def _no_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


@dataclass(frozen=True)
class Act:
    """One act of a verb: what it does, its work, which returns the exit code, and its options."""

    what: str
    run: Callable[[argparse.Namespace], int]
    configure: Callable[[argparse.ArgumentParser], None] = _no_options


def add_acts(
    parser: argparse.ArgumentParser,
    verb: str,
    acts: Mapping[str, Act],
    configure: Callable[[argparse.ArgumentParser, Act], None] = lambda one, act: act.configure(one),
) -> None:
    """Add the acts of a verb; `args.act` is the name of the one that is chosen.

    `configure` adds the options of an act, in a verb whose acts have some in common.
    """
    parsers = parser.add_subparsers(metavar="ACT", dest="act", required=True)
    for name, act in acts.items():
        one = parsers.add_parser(name, help=act.what, description=act.what, allow_abbrev=False)
        configure(one, act)
    parser.epilog = f"elastane {verb} ACT --help explains one act"
