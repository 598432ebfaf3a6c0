"""The command line of `elastane run`, made from the table of options, and the values it leads to.

Precedence: command line, then variable, then settings file, then default; each value knows its
origin. `options.spelling` knows how options are spelled. Fails with UsageError, which names the
option, the value and its origin.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastane.errors import UsageError
from elastane.options.spelling import HELP, Names, Written, nearest
from elastane.options.table import BY_DEST, TABLE, Option

_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off", ""}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from; `name` is the variable, or the path of the settings file."""

    kind: Literal["command line", "variable", "file", "default"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


@dataclass(frozen=True)
class OptionValues:
    """The content of a settings file: values as on a command line, by destination."""

    path: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """The value of every option, and the origins of those not at their default."""

    script: str
    script_args: tuple[str, ...]
    values: Mapping[str, str]
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def given(self) -> frozenset[str]:
        """Return the destinations of all options that were set anywhere."""
        return frozenset(self.origins)

    def origin(self, dest: str) -> Origin:
        """Return where the value comes from."""
        return self.origins.get(dest, Origin("default"))

    def text(self, dest: str) -> str:
        """Return the value as it was written."""
        return self.values[dest]

    def flag(self, dest: str) -> bool:
        """Return whether a flag is set; UsageError if its value is neither yes nor no."""
        value = self.values[dest].strip().lower()
        if value in _TRUE | _FALSE:
            return value in _TRUE
        try:
            return bool(int(value))
        except ValueError:
            raise self.bad(dest, "1 or 0") from None

    def whole(self, dest: str) -> int:
        """Return an integer; UsageError for any other text."""
        try:
            return int(self.values[dest])
        except ValueError:
            raise self.bad(dest, "an integer") from None

    def seconds(self, dest: str) -> float | None:
        """Return a number, None for an empty option; UsageError for any other text."""
        if not self.values[dest] and dest not in self.origins:
            return None
        try:
            number = float(self.values[dest])
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.bad(dest, "a number of seconds")
        return number

    def bad(self, dest: str, expected: str) -> UsageError:
        """Return the error for a value that its option cannot take."""
        name = BY_DEST[dest].name
        return UsageError(
            f"--{name} = {self.values[dest]!r}",
            slug="bad-option-value",
            where=str(self.origin(dest)),
            expected=expected,
            next_step=f"see elastane run --help for --{name}",
        )

    def check(self) -> None:
        """Raise UsageError for the first given value that does not fit its option."""
        for dest in self.origins:
            option = BY_DEST[dest]
            if option.kind == "flag":
                self.flag(dest)
            elif option.kind == "int":
                self.whole(dest)
            elif option.kind == "float":
                self.seconds(dest)
            elif option.choices and self.values[dest] not in option.choices:
                near = nearest(self.values[dest], option.choices)
                hint = f"did you mean {near}? " if near else ""
                raise self.bad(dest, hint + "one of " + ", ".join(option.choices))


_EPILOG = """\
examples:
  {prog} --nproc-per-node 4 train.py --lr 0.1
      four workers on this machine
  {prog} --nnodes 2 --rdzv-endpoint HOST:29400 train.py
      run on each of two nodes; HOST is one of them
  {prog} --nnodes 1:4 --max-restarts 3 --rdzv-id exp7 --rdzv-endpoint HOST train.py
      one to four nodes, which may join and leave

Options may be written with dashes or underscores. Those of torchrun may be shortened as long as
they stay unique. Each option can also be set by a variable, PET_<NAME> or ELASTANE_<NAME> for
elastane's own, or in the table [run] of elastane.toml. The command line overrides the variable,
which overrides the file. ${{local_rank}} in an argument of SCRIPT is replaced by the local rank."""


class RunParser(argparse.ArgumentParser):
    """A parser of torchrun's spellings; its namespace is for `read` only.

    argparse only renders the help. Its treatment of values such as `--` or numbers below zero
    changes with Python's version, so it does not parse the words.
    """

    names = Names(TABLE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Read options and script; the script's arguments are not parsed."""
        own, script = self.names.split(list(args or ()))
        found = namespace or argparse.Namespace()
        for name, value in own:
            if name == HELP:
                self.print_help()
                self.exit()
            setattr(found, name.replace("-", "_"), value)
        if not script and not hasattr(found, "show_config"):
            raise self._no_script(own)
        found.training_script = script[0] if script else ""
        found.training_script_args = script[1:]
        return found, []

    def _no_script(self, own: Sequence[Written]) -> UsageError:
        name, value = own[-1] if own else ("", "")
        option = self.names.find(name) if name else None
        took = option is not None and option.kind != "flag"
        return UsageError(
            "no script: the command line does not say what the workers run",
            slug="usage",
            where=f"--{name} took {value} as its value" if took else "",
            expected=f"{self.prog} [options] SCRIPT [arguments of SCRIPT]",
            next_step=f"{self.prog} --help",
        )


def add_options(parser: RunParser) -> None:
    """Add every option of the parser's table, group by group, and the script."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in parser.names.table:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    parser.add_argument(
        "training_script",
        metavar="SCRIPT",
        nargs="?",
        help="script to run, or with -m a module",
    )
    parser.add_argument(
        "training_script_args", metavar="...", nargs="*", default=[], help="arguments of SCRIPT"
    )
    parser.usage = f"{parser.prog} [options] SCRIPT [arguments of SCRIPT]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG.format(prog=parser.prog)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    names = [f"-{option.short}"] if option.short else []
    names.append(f"--{option.name}")
    text = option.help.replace("%", "%%")
    if option.kind not in ("flag",) and option.default and "default" not in text:
        text += f" (default {option.default})"
    common: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS, "help": text}
    if option.kind == "flag":
        group.add_argument(*names, action="store_const", const="1", **common)
    else:
        choices = "{" + ",".join(option.choices) + "}" if option.choices else ""
        group.add_argument(*names, metavar=choices or option.metavar or "X", **common)


def read(
    namespace: argparse.Namespace, environ: Mapping[str, str], settings: OptionValues | None = None
) -> Options:
    """Combine command line, variables, settings file and defaults, and check each value's kind.

    An empty variable counts as unset: that is how a wrapper script clears one.
    """
    values: dict[str, str] = {}
    origins: dict[str, Origin] = {}
    settings = settings or OptionValues()
    for option in TABLE:
        dest = option.dest
        if hasattr(namespace, dest):
            values[dest], origins[dest] = getattr(namespace, dest), Origin("command line")
        elif option.env and environ.get(option.env, ""):
            values[dest], origins[dest] = environ[option.env], Origin("variable", option.env)
        elif dest in settings.values:
            values[dest], origins[dest] = settings.values[dest], Origin("file", settings.path)
        else:
            values[dest] = option.default
    options = Options(
        script=namespace.training_script,
        script_args=tuple(namespace.training_script_args),
        values=values,
        origins=origins,
    )
    options.check()
    return options


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str = "elastane run",
    settings: OptionValues | None = None,
) -> Options:
    """Read a command line of `elastane run` (without the verb) and the variables beside it."""
    parser = RunParser(prog=prog, allow_abbrev=False)
    add_options(parser)
    return read(parser.parse_args(list(argv)), environ, settings)
