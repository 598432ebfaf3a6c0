"""What one option of `elastane run` is: a row of the table in `options.options`.

It knows how its name is spelled and which variable stands in for it; it reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a value is written: a list has commas between its items, in needles two commas are one that
# belongs to an item, pairs are KEY=VALUE,...
Kind = Literal["text", "int", "float", "flag", "choice", "list", "needles", "pairs", "path"]


@dataclass(frozen=True)
class Option:
    """One option: its name, how its value is written, and where else than typed it may be given.

    `idle` is set where the option has nothing left to do: it is taken with a note. `setting` is
    whether a settings file may have it.
    """

    name: str
    default: str
    help: str
    group: str
    kind: Kind = "text"
    short: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    ours: bool = False
    variable: bool = True
    setting: bool = True
    idle: str = ""

    @property
    def dest(self) -> str:
        """The name as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write it on a command line."""
        long = dict.fromkeys((f"--{self.name}", f"--{self.dest}"))
        return ((f"-{self.short}",) if self.short else ()) + tuple(long)

    @property
    def env(self) -> str:
        """The variable that stands in for it, or an empty string."""
        prefix = "ELASTANE" if self.ours else "PET"
        return f"{prefix}_{self.dest.upper()}" if self.variable else ""
