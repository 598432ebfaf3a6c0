"""Expands Slurm's node lists, such as `n[001-003,7],m[1-2]x`.

A list has parts between commas, and a part may have several brackets, of which the last one varies
fastest. Leading zeros are a width. Fails with ConfigurationError for a text of another form, and
for more hosts than `HOSTS_MAX`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from elastane.errors import ConfigurationError

# Slurm's own bound of a job's nodes is 64,000; a longer list is damage, and would fill the memory.
HOSTS_MAX = 65_536
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|[^\[\]]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str, variable: str) -> tuple[str, ...]:
    """Return the hosts of a list in its order; `variable` is named in errors."""
    hosts: list[str] = []
    place = 0
    while place < len(text):
        part = _PART.match(text, place)
        if part is None or text[part.end() : part.end() + 1] not in ("", ","):
            raise _unreadable(variable, text)
        pieces = [list(_texts(match)) for match in _PIECE.finditer(part[0])]
        if not all(pieces):
            raise _unreadable(variable, text)
        hosts += itertools.islice(map("".join, itertools.product(*pieces)), HOSTS_MAX + 1)
        if len(hosts) > HOSTS_MAX:
            raise _unreadable(variable, text)
        place = part.end() + 1
    if not hosts or text.endswith(","):
        raise _unreadable(variable, text)
    return tuple(hosts)


def _texts(piece: re.Match[str]) -> Iterator[str]:
    """Yield the texts of a piece: itself, or the numbers in its brackets; none if it is damaged."""
    if piece[1] is None:
        yield piece[0]
        return
    ranges = [_RANGE.fullmatch(each) for each in piece[1].split(",")]
    bounds = [(each[1], each[2] or each[1]) for each in ranges if each]
    sizes = [int(last) - int(first) + 1 for first, last in bounds]
    if len(bounds) < len(ranges) or min(sizes) < 1 or sum(sizes) > HOSTS_MAX:
        return
    for first, last in bounds:
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _unreadable(variable: str, text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{variable} = {text[:200]!r} is no list of hosts",
        slug="slurm-environment",
        expected="names between commas, such as n[001-003,7],m1",
        next_step="run elastane by srun, or name the place to meet: --rdzv-endpoint HOST:PORT",
    )
