"""What verbs share that take options of a scheduler beside those of `elastane run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from elastane.options.parser import Names, RunParser, add_options
from elastane.options.table import TABLE, Kind, Option


def own_option(
    group: str, name: str, default: str, text: str, metavar: str = "X", kind: Kind = "text"
) -> Option:
    """Return an option of a scheduler, which is written in full, as elastane's own are."""
    return Option(name, default, text, group, kind, metavar=metavar, ours=True)


def value_of(args: argparse.Namespace, options: Sequence[Option], dest: str) -> str:
    """Return the value of one of these options as it was written, or its default."""
    default = next(option.default for option in options if option.dest == dest)
    return str(getattr(args, dest, default))


def parser_with(options: Sequence[Option]) -> type[RunParser]:
    """Return the parser of `elastane run` that also takes these options."""

    class SchedulerParser(RunParser):
        names = Names((*options, *TABLE))

    return SchedulerParser


def add_run_options(parser: RunParser, examples: str) -> None:
    """Add the options of the parser, with `examples` below them; {prog} is the command."""
    add_options(parser)
    parser.epilog = examples.format(prog=parser.prog)
