"""One option of `elastane run`: a row of the table in `options.options`.

It knows how its name is spelled and which variable can set it; it reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a value is written. A list has commas between its items; in needles two commas mean one comma
# inside an item; pairs are KEY=VALUE,...
Kind = Literal["text", "int", "float", "flag", "choice", "list", "needles", "pairs", "path"]


@dataclass(frozen=True)
class Option:
    """One option: its name, how its value is written, and where it may be set.

    `idle`: why the option has no effect here; it is accepted with a note. `setting`: whether a
    settings file may contain it.
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
        """The variable that sets it, or an empty string."""
        prefix = "ELASTANE" if self.ours else "PET"
        return f"{prefix}_{self.dest.upper()}" if self.variable else ""
