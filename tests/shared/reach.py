"""What `make coverage` holds: how much of each room the tests reach, statements and branches alike.

    python tests/shared/reach.py REPORT        # what `coverage json` wrote

The rooms are those of two contracts in pyproject.toml: what is pure is reached as a whole, and nine
in ten of the control plane, which never imports torch. Exits with 1, naming what is not reached,
where a room falls short; a room that no file of the report belongs to falls short too.
"""

import json
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
CONTROL_PLANE, PURE = "the control plane never imports torch", "rules are pure"
WANTED = {PURE: 100.0, CONTROL_PLANE: 90.0}


@dataclass
class Room:
    """A package or module, and how many of its statements and branches were reached."""

    name: str
    wanted: float
    reached: int = 0
    there: int = 0
    misses: dict[str, int] = field(default_factory=dict)

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


def rooms_of(contract, project=PROJECT):
    """The names of the rooms of a contract, as pyproject.toml has them."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    return next(c["source_modules"] for c in contracts if c["name"] == contract)


def every_room():
    """All rooms, each with the part of it that is to be reached."""
    return [Room(name, WANTED[contract]) for contract in WANTED for name in rooms_of(contract)]


def measured(report, rooms):
    """These rooms with what the report says of each."""
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
    rooms = measured(json.loads(Path(report).read_text()), every_room())
    print(*told(rooms), sep="\n")
    return 0 if all(room.holds for room in rooms) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
