"""`elastane run`: torchrun's command line, from the words to the launcher."""

from __future__ import annotations

import argparse
import sys

from elastane.launcher.parser import RunParser as Parser
from elastane.launcher.parser import add_options, read

__all__ = ["Parser", "configure", "main"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table."""
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    """Build the configuration and launch; returns the agent's exit code."""
    from elastane.launcher.build import build
    from elastane.runtime import environment

    environ = environment.snapshot()
    config = build(read(args, environ), environ)
    for note in config.notes:
        print(f"elastane: {note}", file=sys.stderr)
    from elastane.launcher.main import launch

    return launch(config)
