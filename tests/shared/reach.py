"""What `make coverage` holds: how much of each room the tests reach, statements and branches alike.

    python tests/shared/reach.py REPORT        # what `coverage json` wrote

The rooms are those of the contract in pyproject.toml that keeps torch out of the control plane:
all of `core` is reached, and nine in ten elsewhere. Exits with 1, naming what is not reached, where
a room falls short; a room that no file of the report belongs to falls short too.
"""

import json
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
CONTRACT = "the control plane never imports torch"
CORE, ELSEWHERE = 100.0, 90.0


@dataclass
class Room:
    """A package or module, and how many of its statements and branches were reached."""

    name: str
    reached: int = 0
    there: int = 0
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def wanted(self):
        return CORE if self.name == "elastane.core" else ELSEWHERE

    @property
    def percent(self):
        return 100 * self.reached / self.there if self.there else 0.0

    @property
    def holds(self):
        return self.percent >= self.wanted

    def owns(self, path):
        """Whether the file is the module, or below the package."""
        return f"{path.removesuffix('.py')}/".startswith(self.name.replace(".", "/") + "/")

    def add(self, path, file):
        """Count what `coverage json` says of one of this room's files."""
        figures = file["summary"]
        there = figures["num_statements"] + figures["num_branches"]
        reached = figures["covered_lines"] + figures["covered_branches"]
        self.there += there
        self.reached += reached
        if there > reached:
            self.misses[f"{path}: {_not_reached(file)}"] = there - reached


def control_plane(project=PROJECT):
    """The rooms' names, as pyproject.toml has them."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    return next(c["source_modules"] for c in contracts if c["name"] == CONTRACT)


def measured(report, names):
    """The rooms of these names with what the report says of each."""
    rooms = [Room(name) for name in names]
    for path, file in report["files"].items():
        module = path[path.rfind("elastane/") :]
        for room in rooms:
            if room.owns(module):
                room.add(module, file)
    return rooms


def told(rooms):
    """A line for each room; below those that fall short, their files, the worst first."""
    for room in rooms:
        yield f"{room.percent:6.1f}% of {room.wanted:g}%  {room.there:5}  {room.name}"
        if not room.holds:
            worst = sorted(room.misses, key=lambda miss: -room.misses[miss])
            yield from (f"    {miss}" for miss in worst)


def _not_reached(file):
    lines = ", ".join(map(str, file["missing_lines"]))
    branches = ", ".join(f"{a}->{b}" for a, b in file["missing_branches"])
    return "; ".join(part for part in (lines and f"lines {lines}", branches) if part)


def main(report):
    rooms = measured(json.loads(Path(report).read_text()), control_plane())
    print(*told(rooms), sep="\n")
    return 0 if all(room.holds for room in rooms) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
