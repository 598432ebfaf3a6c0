"""`elastane completion`: completes verbs, options and files in a shell.

It prints a script for the shell, which shtab makes of the parsers of all verbs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from elastane.errors import missing_extra

SHELLS = ("bash", "zsh", "tcsh")
_FILES = frozenset({"FILE", "SCRIPT", "SCRIPT ...", "DIGEST_LOG", "OTHER_DIGEST_LOG"})
_FOLDERS = frozenset({"DIR", "JOB_OR_DIR"})


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise missing_extra("elastane completion needs shtab", "completion") from None
    print(shtab.complete(_parser_of_all(shtab.FILE, shtab.DIRECTORY), args.shell))
    return 0


def _parser_of_all(
    file: Mapping[str, object], folder: Mapping[str, object]
) -> argparse.ArgumentParser:
    """Return one parser with all verbs; its path arguments are marked for completion by files."""
    from elastane.cli.main import VERBS, make_parser

    def parser_of(prog: str, **_more: Any) -> argparse.ArgumentParser:
        verb = prog.rsplit(maxsplit=1)[-1]
        made = make_parser(
            import_module(f"elastane.cli.{verb.replace('-', '_')}"), prog, VERBS[verb]
        )
        _complete_paths(made, file, folder)
        return made

    whole = argparse.ArgumentParser(prog="elastane")
    whole.add_argument("--version", action="store_true", help="print the version")
    verbs = whole.add_subparsers(parser_class=cast(Any, parser_of))
    for verb, what in VERBS.items():
        verbs.add_parser(verb, help=what)
    return whole


def _complete_paths(
    parser: argparse.ArgumentParser, file: Mapping[str, object], folder: Mapping[str, object]
) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for act in {*action.choices.values()}:
                _complete_paths(act, file, folder)
        elif action.metavar in _FILES:
            action.complete = file  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = folder  # type: ignore[attr-defined]
