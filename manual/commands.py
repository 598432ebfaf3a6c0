"""Every command of elastane as plain data, read from the parsers that read its command lines.

The pages of the command line and the man pages are written from these, so that neither can say
another thing than `--help` does. No verb is run, and torch is not imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from elastane.cli.main import VERBS, make_parser
from elastane.options.parser import RunParser
from elastane.options.table import BY_DEST


@dataclass(frozen=True)
class Argument:
    """An option or an operand: how it is written, what it means, and the variable that sets it."""

    spellings: tuple[str, ...]
    value: str
    meaning: str
    variable: str = ""

    @property
    def written(self) -> str:
        """All spellings, with the value after the last."""
        return " ".join(filter(None, [", ".join(self.spellings), self.value]))


@dataclass(frozen=True)
class Command:
    """One command line: `elastane VERB`, or `elastane VERB ACT` of a verb that has several.

    `usage` begins with the command's name and is one line. `examples` is laid out as typed.
    """

    name: str
    meaning: str
    usage: str
    groups: tuple[tuple[str, tuple[Argument, ...]], ...]
    examples: str
    acts: tuple[Command, ...]


def commands() -> list[Command]:
    """Return all verbs in the order of `elastane --help`."""
    return [command_of(verb) for verb in VERBS]


def command_of(verb: str) -> Command:
    """Return one verb, with its acts."""
    module = import_module(f"elastane.cli.{verb.replace('-', '_')}")
    return _command(make_parser(module, f"elastane {verb}", VERBS[verb]))


def _command(parser: argparse.ArgumentParser) -> Command:
    parser.color = False  # type: ignore[attr-defined]  # of Python 3.14: no escape codes in usage
    found = [
        (str(group.title), tuple(_arguments(parser, group._group_actions)))
        for group in parser._action_groups
    ]
    nested = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    acts = [act for action in nested for act in dict.fromkeys(action.choices.values())]
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    # Where a verb has acts, its epilog only says how to ask for the help of one.
    examples = "" if acts else (parser.epilog or "") % {"prog": parser.prog}
    return Command(
        name=parser.prog,
        meaning=parser.description or "",
        usage=usage,
        groups=tuple((title, arguments) for title, arguments in found if arguments),
        examples=examples,
        acts=tuple(map(_command, acts)),
    )


def _arguments(
    parser: argparse.ArgumentParser, actions: list[argparse.Action]
) -> Iterator[Argument]:
    formatter = argparse.HelpFormatter(parser.prog)
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        meaning = formatter._expand_help(action) if action.help else ""
        names = tuple(action.option_strings)
        metavar = _metavar(action)
        takes_value = bool(names) and action.nargs != 0
        option = BY_DEST.get(action.dest) if isinstance(parser, RunParser) else None
        yield Argument(
            spellings=_shown(names) or (metavar,),
            value=formatter._format_args(action, metavar) if takes_value else "",
            meaning=" ".join(meaning.split()),
            variable=option.env if option else "",
        )


def _metavar(action: argparse.Action) -> str:
    if action.choices and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))


def _shown(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the spelling with underscores; the text above the options speaks of it."""
    dashed = {name for name in names if "_" not in name}
    return tuple(n for n in names if n in dashed or n.replace("_", "-") not in dashed)
