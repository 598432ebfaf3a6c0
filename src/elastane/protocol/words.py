"""Words that messages and reasons share: counts, ends of texts, and fixed beginnings. Pure."""

from __future__ import annotations

# The reasons for a restart begin so if workers have issued different collectives.
OTHER_PROGRAM = "workers do not run the same program"
# Where a worker is whose frames do not show it.
UNKNOWN_PLACE = "an unknown place"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def last_lines(text: str, chars: int) -> str:
    """Return the end of a text that fits, in whole lines unless its last line is longer."""
    if len(text) <= chars:
        return text
    end = text[-chars:]
    return end if text[-chars - 1] == "\n" else end.partition("\n")[2].lstrip("\n") or end
