"""`elastane run`: parses torchrun's command line and starts the agent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from elastane.errors import ElastaneError, UsageError
from elastane.options.parser import OptionValues, add_options, read
from elastane.options.parser import RunParser as Parser

if TYPE_CHECKING:
    from elastane.options.parser import Options

__all__ = ["Parser", "configure", "main", "read_options", "start", "start_in_step"]


def configure(parser: Parser) -> None:
    """Add the options of the table."""
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    """Build the configuration and launch; returns the agent's exit code."""
    from elastane.process import environment

    environ = environment.snapshot()
    return start_in_step(read_options(args, environ), environ)


def read_options(args: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Return the options from command line, variables and settings file together."""
    named = getattr(args, "config", "") or environ.get("ELASTANE_CONFIG", "")
    return read(args, environ, _settings(named))


def start_in_step(options: Options, environ: Mapping[str, str]) -> int:
    """Launch as `start` does; in a Slurm step, its environment fills in missing options."""
    if "SLURM_JOB_ID" not in environ:
        return start(options, environ)
    from elastane.slurm.secret import token_of
    from elastane.slurm.step import find

    found = find(options, environ)
    if not options.flag("show_config"):
        _print_notes(filter(None, [found.note]))
        if found.step is not None and found.needs_token:
            environ = {**environ, "ELASTANE_TOKEN": token_of(found.step, environ)}
    return start(found.options, environ)


def start(options: Options, environ: Mapping[str, str]) -> int:
    """Show the configuration with --show-config, otherwise launch."""
    if options.flag("show_config"):
        return _show(options, environ)
    if options.flag("json"):
        raise UsageError(
            "--json without --show-config",
            slug="usage",
            expected="--show-config, whose output --json changes",
            next_step="add --show-config; an option of the script comes after the script",
        )
    from elastane.options.build import build
    from elastane.options.show import origin_of, settings_notes

    _print_notes(settings_notes(options))
    try:
        if _is_foreign_handler(options):
            from elastane.cli._handler import run

            for name in ("serve", "metrics_port"):
                option = f"--{name.replace('_', '-')}"
                if options.text(name):
                    raise UsageError(
                        f"{option} {options.text(name)} with another package's rendezvous handler",
                        slug="bad-option-value",
                        expected="a backend of elastane, whose agents write the log that it shows",
                        next_step=f"leave out {option}",
                    )
            return run(options, environ)
        config = build(options, environ)
    except ElastaneError as error:
        error.where = error.where or origin_of(options, error.what)
        raise
    _print_notes(config.notes)
    from elastane.agent.main import launch
    from elastane.cli._beside import servers_beside

    with servers_beside(config):
        return launch(config)


def _is_foreign_handler(options: Options) -> bool:
    """Whether the backend is a handler of another package; elastane's own are known by name."""
    from elastane.options.rendezvous import is_builtin

    if is_builtin(options.text("rdzv_backend")):
        return False
    from elastane.cli._handler import is_wanted

    return is_wanted(options)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"elastane: {note}", file=sys.stderr)


def _settings(named: str) -> OptionValues:
    from elastane.options.settings import load

    return load(named, Path.cwd())


def _show(options: Options, environ: Mapping[str, str]) -> int:
    from elastane.options import show

    if options.flag("json"):
        import json

        print(json.dumps(show.as_object(options, environ), indent=2))
    else:
        print("\n".join(show.as_lines(options, environ)))
    return 0
