"""The command line of `elastane run`: which words are options, and the value that each option gets.

Words are read exactly as torchrun reads them. Options come before the script, and all later words
belong to the script. A long option of torchrun may be shortened while the short form is unique;
elastane's own options must be written in full, so that no short form that works with torchrun
becomes ambiguous. Precedence of values: command line, variable, settings file, default. Fails with
UsageError, which names the option, the value, its origin, and the nearest option.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastane.errors import UsageError
from elastane.options.table import BY_DEST, TABLE, Option

_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off", ""}
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
# As in argparse, such a word is a value or the script.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
HELP = "help"
# Name and value of an option on the command line; a flag has the value 1.
Written = tuple[str, str]
# Options of other launchers that torchrun never had, and what to write instead. Those of
# `bagua.distributed.run` only set variables that Bagua reads in the workers, which inherit the
# agent's environment.
_ADVICE = {
    "use-env": "leave it out: workers always have LOCAL_RANK; only python -m elastane.launch "
    "takes it",
    "autotune-level": "set the variables BAGUA_AUTOTUNE and, above 0, AUTO_TUNE_SERVER_ADDR to "
    "MASTER_ADDR:BAGUA_SERVICE_PORT, which is all that the option did",
    "is-output-autotune-log": "set the variable BAGUA_IS_OUTPUT_AUTOTUNE_LOG to 1, which is all "
    "that the option did; leave it unset for no",
    "enable-bagua-net": "put the folder .data/bagua-net of bagua_core first in LD_LIBRARY_PATH, "
    "which is all that the option did",
}
_VARIABLES = {
    "bagua-service-port": "BAGUA_SERVICE_PORT",
    "default-bucket-size": "BAGUA_DEFAULT_BUCKET_SIZE",
    "autotune-max-samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune-sampling-confidence-time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune-warmup-time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
}


class Names:
    """The options of one command line, found by each of their spellings."""

    def __init__(self, table: Sequence[Option]) -> None:
        self.table = tuple(table)
        self._by_name = {option.name: option for option in table}
        self._by_short = {option.short: option for option in table if option.short}

    def split(self, argv: Sequence[str]) -> tuple[list[Written], list[str]]:
        """Split into our options, with their full names, and the script with its arguments."""
        own: list[Written] = []
        index = 0
        while index < len(argv) and argv[index] != "--" and self._is_option(argv[index]):
            words, waiting = self._expand(argv[index])
            own += words
            index += 1
            if waiting:
                own.append((waiting.name, self._value(waiting, argv[index : index + 1])))
                index += 1
        rest = list(argv[index:])
        if rest[:1] == ["--"]:
            return own, rest[1:]
        if rest[1:2] == ["--"]:
            # argparse removes the first one, even after the script.
            del rest[1]
        return own, rest

    def find(self, written: str) -> Option | None:
        """Return the option for a full or shortened name; None for `--help`."""
        name = written.replace("_", "-")
        if name in self._by_name:
            return self._by_name[name]
        found = [option for option in self.table if option.name.startswith(name)]
        found = [option for option in found if not option.ours]
        is_help = HELP.startswith(name)
        if not name or len(found) + is_help == 0:
            raise self._unknown(f"--{written}")
        if len(found) + is_help == 1:
            return found[0] if found else None
        raise UsageError(
            f"--{written} is ambiguous",
            slug="unknown-option",
            expected="one of " + ", ".join(f"--{option.name}" for option in found),
            next_step="write the whole name of the option",
        )

    def _is_option(self, word: str) -> bool:
        if len(word) < 2 or word[0] != "-":
            return False
        if _NEGATIVE_NUMBER.fullmatch(word):
            return False
        # A word with a space is an option only if its name is one.
        return " " not in word or self._begins_as_option(word)

    def _begins_as_option(self, word: str) -> bool:
        if not word.startswith("--"):
            return word[1] in self._by_short or word[1] == "h"
        name, equals, _ = word[2:].partition("=")
        return bool(equals) and " " not in name

    def _value(self, option: Option, following: Sequence[str]) -> str:
        if following and not self._is_option(following[0]):
            return following[0]
        found = f", and {following[0]} is an option" if following else ""
        raise UsageError(
            f"--{option.name} without a value{found}",
            slug="usage",
            expected=f"--{option.name} {option.metavar or 'VALUE'}",
            next_step=f"--{option.name}=VALUE also takes a value that begins with a dash",
        )

    def _expand(self, word: str) -> tuple[list[Written], Option | None]:
        """Return the word's options, and the option whose value is the next word."""
        if not word.startswith("--"):
            return self._expand_short(word)
        name, equals, value = word[2:].partition("=")
        option = self.find(name)
        if option is None or option.kind == "flag":
            if equals:
                raise _no_value(option.name if option else HELP, value)
            return [(option.name if option else HELP, "1")], None
        return ([(option.name, value)], None) if equals else ([], option)

    def _expand_short(self, word: str) -> tuple[list[Written], Option | None]:
        """Return the options in a word such as -m, -r3 or -mt3."""
        own: list[Written] = []
        if word[1:].partition("=")[0].replace("_", "-") in self._by_name:
            # torchrun would read -rdzv-id=7 as -r with the value dzv-id=7.
            raise self._unknown(word)
        for place, letter in enumerate(word[1:], start=1):
            option = self._by_short.get(letter)
            if letter != "h" and option is None:
                raise self._unknown(word)
            if option is not None and option.kind != "flag":
                value = word[place + 1 :].removeprefix("=")
                has_value = len(word) > place + 1
                return ([*own, (option.name, value)], None) if has_value else (own, option)
            own.append((option.name if option else HELP, "1"))
        return own, None

    def _unknown(self, written: str) -> UsageError:
        name = written.lstrip("-").partition("=")[0].replace("_", "-")
        near = nearest(name, [*self._by_name, HELP])
        instead = advice(name)
        return UsageError(
            f"no such option: {written}",
            slug="unknown-option",
            expected=f"did you mean --{near}?"
            if near and not instead
            else "an option of elastane run",
            next_step=instead
            or "elastane run --help lists all; the script's own options come after the script",
        )


def _no_value(name: str, value: str) -> UsageError:
    return UsageError(
        f"--{name} takes no value, and has {value!r}",
        slug="usage",
        expected=f"--{name} without a value",
        next_step=f"write --{name}, or leave it out",
    )


def nearest(word: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """Return the name most similar to `word`, or an empty string if none is similar."""
    import difflib

    near = difflib.get_close_matches(word, list(names), n=1, cutoff=likeness)
    return near[0] if near else ""


def advice(name: str) -> str:
    """Return what to write instead of `--name`; empty if no launcher has this option."""
    if name in _ADVICE:
        return _ADVICE[name]
    variable = _VARIABLES.get(name, "")
    return f"set the variable {variable}, which is all that the option did" if variable else ""


@dataclass(frozen=True)
class Origin:
    """The source of a value; `name` is the variable, or the path of the settings file.

    "Slurm": the environment of the step, in `name`.
    """

    kind: Literal["command line", "variable", "file", "Slurm", "default"]
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


def words_of(options: Options) -> list[str]:
    """Return the given options of `elastane run` as words of its command line.

    A flag that is turned off has no word.
    """
    words: list[str] = []
    for option in TABLE:
        if option.dest not in options.given:
            continue
        value = options.text(option.dest)
        if option.kind == "flag":
            words += [f"--{option.name}"] * options.flag(option.dest)
        else:
            name = f"--{option.name}"
            words += [f"{name}={value}"] if value[:1] in ("-", "") else [name, value]
    return words


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    settings: OptionValues | None = None,
) -> Options:
    """Read a command line of `elastane run` (without the verb) and the variables beside it."""
    parser = RunParser(prog="elastane run", allow_abbrev=False)
    add_options(parser)
    return read(parser.parse_args(list(argv)), environ, settings)
