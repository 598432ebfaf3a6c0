"""Seeds that once failed, in a file: one per line, with what was wrong.

    840 store --without 1,2   # the coordinator forgot that it had regained its authority

A seed names what the simulation of its day drew. If it draws differently now, the line still plays
a history, but another one; a unit test or a planted bug then covers the old finding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from simulation.setup import KINDS, Cut


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One history that is always played."""

    seed: int
    store_backed: bool
    in_place: bool
    span: int
    kind: str
    cut: Cut
    was: str


def read_kept(path: Path) -> list[Kept]:
    """Return the histories of a file of kept seeds; ValueError for a malformed line."""
    return [
        _kept(line) for line in path.read_text("utf-8").splitlines() if line.split("#")[0].strip()
    ]


def cut_of(without: str, nodes: int) -> Cut:
    """Return what the options --without and --nodes leave out."""
    numbers = tuple(int(number) for number in without.split(",") if number)
    return Cut(without=numbers, nodes=nodes)


def _kept(line: str) -> Kept:
    words, _, was = line.partition("#")
    seed, mode, *rest = words.split()
    if mode not in ("store", "endpoint") or not was.strip():
        raise ValueError(
            f"{line!r}: expected SEED store|endpoint [--in-place | --shrinks | --planned | --fails]"
            " [--without ...]  # what was wrong"
        )
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--without", default="")
    parser.add_argument("--in-place", action="store_true")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="")
    parser.add_argument("--span", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=0)
    cut = parser.parse_args(rest)
    return Kept(
        seed=int(seed),
        store_backed=mode == "store",
        in_place=cut.in_place,
        span=cut.span,
        kind=cut.kind,
        cut=cut_of(cut.without, cut.nodes),
        was=was.strip(),
    )
