"""The command line of `elastane run` as torchrun reads it, made from the table of options.

Options come before the script; whatever follows the script is the script's own. A long option
may be shortened while it is unique among torchrun's; ours must be written out, so that no
abbreviation that works with torchrun becomes ambiguous here. Precedence: command line, then
variable, then default. Fails with UsageError, which names the nearest option.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastane.errors import UsageError
from elastane.launcher.options import BY_DEST, TABLE, Option

_BY_NAME = {option.name: option for option in TABLE}
_BY_SHORT = {option.short: option for option in TABLE if option.short}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Options:
    """The value of every option, and which of them were given rather than left at the default."""

    script: str
    script_args: tuple[str, ...]
    values: Mapping[str, str]
    given: frozenset[str] = field(default_factory=frozenset)

    def text(self, dest: str) -> str:
        """Return the value as it was written."""
        return self.values[dest]

    def flag(self, dest: str) -> bool:
        """Return whether a flag is set; UsageError where its value is neither yes nor no."""
        value = self.values[dest].strip().lower()
        if value in _TRUE | _FALSE:
            return value in _TRUE
        raise _bad_value(BY_DEST[dest], self.values[dest], "1 or 0")

    def whole(self, dest: str) -> int:
        """Return an integer; UsageError where it is none."""
        try:
            return int(self.values[dest])
        except ValueError:
            raise _bad_value(BY_DEST[dest], self.values[dest], "an integer") from None

    def seconds(self, dest: str) -> float | None:
        """Return a number, or None where the option is empty; UsageError where it is none."""
        if not self.values[dest]:
            return None
        try:
            number = float(self.values[dest])
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise _bad_value(BY_DEST[dest], self.values[dest], "a number of seconds")
        return number


def _bad_value(option: Option, value: str, expected: str) -> UsageError:
    return UsageError(
        f"--{option.name} = {value!r}",
        slug="bad-option-value",
        where="command line" + (f" or {option.env}" if option.env else ""),
        expected=expected,
        next_step=f"see elastane run --help for --{option.name}",
    )


class RunParser(argparse.ArgumentParser):
    """An argparse parser that takes torchrun's spellings; its namespace is for `read` alone."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse options and script; the script's arguments never reach argparse."""
        own, script = split(list(args or ()))
        found, rest = super().parse_known_args([*own, *script[:1]], namespace)
        found.training_script_args = script[1:]
        return found, rest

    def error(self, message: str) -> Any:
        """Raise UsageError in place of argparse's exit."""
        raise UsageError(
            message,
            slug="usage",
            next_step=f"{self.prog} [options] SCRIPT [arguments of SCRIPT]; all options: "
            f"{self.prog} --help",
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of the table, group by group, and the script."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in TABLE:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    parser.add_argument(
        "training_script", metavar="SCRIPT", help="script (or module, with -m) that is run"
    )
    parser.add_argument(
        "training_script_args", metavar="...", nargs="*", default=[], help="its own arguments"
    )
    parser.usage = f"{parser.prog} [options] SCRIPT [arguments of SCRIPT]"
    parser.epilog = (
        "Each option also works with under_scores and through the variable PET_<NAME>; ours "
        "through ELASTANE_<NAME>. ${local_rank} in an argument of the script becomes the local "
        "rank."
    )


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    names = [f"-{option.short}"] if option.short else []
    names.append(f"--{option.name}")
    text = option.help.replace("%", "%%")
    if option.later:
        text += " (not in this version)"
    elif option.kind not in ("flag",) and option.default and "default" not in text:
        text += f" (default {option.default})"
    common: dict[str, Any] = {"dest": option.dest, "default": argparse.SUPPRESS, "help": text}
    if option.kind == "flag":
        group.add_argument(*names, action="store_const", const="1", **common)
    elif option.choices:
        group.add_argument(*names, choices=option.choices, **common)
    else:
        group.add_argument(*names, metavar=option.metavar or "X", **common)


def read(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Combine command line, variables and defaults; an empty variable counts as unset."""
    values: dict[str, str] = {}
    given: set[str] = set()
    for option in TABLE:
        if hasattr(namespace, option.dest):
            values[option.dest] = getattr(namespace, option.dest)
            given.add(option.dest)
        elif option.env and environ.get(option.env, ""):
            values[option.dest] = _checked_choice(option, environ[option.env])
            given.add(option.dest)
        else:
            values[option.dest] = option.default
    return Options(
        script=namespace.training_script,
        script_args=tuple(namespace.training_script_args),
        values=values,
        given=frozenset(given),
    )


def parse(argv: Sequence[str], environ: Mapping[str, str], prog: str = "elastane run") -> Options:
    """Read a command line of `elastane run` (without the verb) and the variables beside it."""
    parser = RunParser(prog=prog, allow_abbrev=False)
    add_options(parser)
    return read(parser.parse_args(list(argv)), environ)


def _checked_choice(option: Option, value: str) -> str:
    if option.choices and value not in option.choices:
        raise _bad_value(option, value, "one of " + ", ".join(option.choices))
    return value


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Divide into the launcher's options, written out in full, and the script with the rest."""
    own: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        if token == "--":
            return own, argv[index + 1 :]
        if not token.startswith("-") or token == "-":
            return own, argv[index:]
        index += 1
        name, takes_next = _expand(token)
        own.append(name)
        if takes_next and index < len(argv):
            # Glued, so that argparse never takes a value such as -1 for an option.
            own[-1] = f"{name}={argv[index]}" if name.startswith("--") else name + argv[index]
            index += 1
    return own, []


def _expand(token: str) -> tuple[str, bool]:
    """Return the token with its name in full, and whether its value is the next token."""
    if token in ("-h", "--help"):
        return token, False
    if not token.startswith("--"):
        option = _BY_SHORT.get(token[1])
        if option is None:
            raise _unknown(token)
        return token, option.kind != "flag" and len(token) == 2
    name, equals, value = token[2:].partition("=")
    option = _find(name)
    return f"--{option.name}{equals}{value}", option.kind != "flag" and not equals


def _find(written: str) -> Option:
    name = written.replace("_", "-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    found = [option for option in TABLE if option.name.startswith(name) and not option.ours]
    if len(found) == 1 and name:
        return found[0]
    if not found or not name:
        raise _unknown(f"--{written}")
    raise UsageError(
        f"--{written} is ambiguous",
        slug="unknown-option",
        expected="one of " + ", ".join(f"--{option.name}" for option in found),
    )


def _unknown(written: str) -> UsageError:
    import difflib

    name = written.lstrip("-").partition("=")[0].replace("_", "-")
    near = difflib.get_close_matches(name, [*_BY_NAME, "help"], n=1)
    return UsageError(
        f"no such option: {written}",
        slug="unknown-option",
        expected=f"did you mean --{near[0]}?" if near else "an option of elastane run",
        next_step="elastane run --help lists all; the script's own options come after the script",
    )
