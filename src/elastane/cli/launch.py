"""`python -m elastane.launch`: the older command line, of torch.distributed.launch.

It is `elastane run` with one difference: unless `--use-env` is given, the script gets
`--local-rank=N` before its own arguments. Scripts that are older than LOCAL_RANK expect that.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from elastane.cli.run import configure, read_options, start_in_step
from elastane.errors import UsageError
from elastane.options.parser import Names, Options, RunParser
from elastane.options.table import SCRIPT, TABLE, Option

__all__ = ["LaunchParser", "Parser", "configure", "legacy", "main"]

USE_ENV = Option(
    "use-env",
    "0",
    "give the script its local rank in the variable LOCAL_RANK only, not as --local-rank",
    SCRIPT,
    kind="flag",
    variable=False,
    setting=False,
)


class LaunchParser(RunParser):
    """The parser of `elastane run`, with `--use-env`."""

    names = Names((*TABLE, USE_ENV))


Parser = LaunchParser  # The name that cli.main looks up.


def main(args: argparse.Namespace) -> int:
    """Launch, with the local rank among the script's arguments."""
    from elastane.process import environment

    environ = environment.snapshot()
    options = read_options(args, environ)
    return start_in_step(legacy(options, use_env=hasattr(args, "use_env")), environ)


def legacy(options: Options, *, use_env: bool) -> Options:
    """Return `options` with the local rank as the script's first argument, unless `use_env`."""
    if use_env:
        return options
    if options.flag("no_python"):
        raise UsageError(
            "--no-python without --use-env: a program may not know --local-rank",
            slug="usage",
            expected="--use-env with --no-python; the program has LOCAL_RANK in its environment",
            next_step="elastane run needs no --use-env",
        )
    return replace(options, script_args=("--local-rank=${local_rank}", *options.script_args))
