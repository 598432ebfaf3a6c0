"""How options are spelled: which words are options, which option is meant, where the script begins.

It reads words exactly as torchrun's parser does. Options come before the script, and all later
words belong to the script. A long option of torchrun's may be shortened while the short form is
unique. elastane's own options must be written in full, so that no abbreviation that works with
torchrun becomes ambiguous. It knows no meanings of values. It fails with UsageError, which names
the nearest option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from elastane.errors import UsageError
from elastane.options.table import Option

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
            # argparse removes the first one, even behind the script.
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
        expected=f"--{name}, or no --{name}",
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
