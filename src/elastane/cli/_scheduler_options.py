"""What verbs share that take options of a scheduler beside those of `elastane run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from elastane.options.table import Kind, Option


def own_option(
    group: str, name: str, default: str, text: str, metavar: str = "X", kind: Kind = "text"
) -> Option:
    """Return an option of a scheduler, which is written in full, as elastane's own are."""
    return Option(name, default, text, group, kind, metavar=metavar, ours=True)


def value_of(args: argparse.Namespace, options: Sequence[Option], dest: str) -> str:
    """Return the value of one of these options as it was written, or its default."""
    default = next(option.default for option in options if option.dest == dest)
    return str(getattr(args, dest, default))
