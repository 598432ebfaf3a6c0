"""`elastane verify-run`: whether two runs computed the same, and the first step that differs.

The command reads two digest logs (`elastane.init(digest_log=...)`), names the settings in which the
runs differ, and compares the digests of their common steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from elastane.errors import ConfigurationError

if TYPE_CHECKING:
    from elastane.worker.digest_log import Recorded

SAME, DIFFERENT = 0, 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "a",
        metavar="DIGEST_LOG",
        help="digest log of a run: a file, or a folder with digests.jsonl",
    )
    add("b", metavar="OTHER_DIGEST_LOG", help="digest log of the run to compare it with")
    add("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "exit status: 0 all common steps agree; 1 a step differs; 78 a file is not a digest log"
    )


def main(args: argparse.Namespace) -> int:
    """Compare, and print the findings."""
    from elastane.worker.digest_log import read_digest_log

    found = compared(read_digest_log(args.a), read_digest_log(args.b))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        from elastane.observe.box import printable

        print("\n".join(printable(line) for line in _lines(found)))
    return DIFFERENT if found["first"] else SAME


def compared(one: Recorded, other: Recorded) -> dict[str, Any]:
    """Return the findings for two digest logs; ConfigurationError if they share no step."""
    from elastane.worker.digest_log import differing

    common = sorted(one.lines.keys() & other.lines.keys())
    if not common:
        raise ConfigurationError(
            f"{one.path} and {other.path} have no step in common",
            where=f"{one.path} has {_steps(one.lines)}, {other.path} has {_steps(other.lines)}",
            expected="two runs from the same step on, with the same digest_every",
            next_step="run both from their beginning, each with a digest log of its own",
            slug="digest-log-unreadable",
        )
    differences = list(differing(one, other))
    return {
        "runs": {name: _summary(run) for name, run in (("a", one), ("b", other))},
        "settings": _differing(_flat(one.settings), _flat(other.settings)),
        "compared": len(common),
        "different": len(differences),
        "same_until": _before(common, differences),
        "first": _first(one, other, *differences[0]) if differences else None,
    }


def _summary(run: Recorded) -> dict[str, Any]:
    worlds: list[int] = []
    for line in run.lines.values():
        if not worlds or worlds[-1] != line.world_size:
            worlds.append(line.world_size)
    return {"path": run.path, "job": run.job, "steps": _steps(run.lines), "worlds": worlds}


def _steps(lines: Iterable[int]) -> str:
    steps = list(lines)
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [one.get(name), other.get(name)]
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    }


def _before(common: list[int], differences: list[tuple[int, list[str]]]) -> int | None:
    """The last step before the first that differs."""
    same = [step for step in common if not differences or step < differences[0][0]]
    return same[-1] if same else None


def _first(one: Recorded, other: Recorded, step: int, names: list[str]) -> dict[str, Any]:
    worlds = [run.lines[step].world_size for run in (one, other)]
    digests = {name: [run.lines[step].digests.get(name) for run in (one, other)] for name in names}
    return {"step": step, "names": names, "worlds": worlds, "digests": digests}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found["runs"].items():
        worlds = ", ".join(str(size) for size in run["worlds"])
        lines.append(f"{name.upper()}: {run['path']}: {run['steps']}, worlds of {worlds}")
    for name, (one, other) in found["settings"].items():
        lines.append(f"other settings: {name} is {one} in A and {other} in B")
    first = found["first"]
    if first is None:
        return [*lines, f"the same: all {found['compared']} steps that both have"]
    lines.append(f"different: step {first['step']} is the first, of {found['compared']} compared")
    for name, (one, other) in first["digests"].items():
        lines.append(f"  {name}: {one or 'nothing'} in A, {other or 'nothing'} in B")
    lines.append(f"  world of {first['worlds'][0]} in A, of {first['worlds'][1]} in B")
    until = found["same_until"]
    lines.append(f"the same up to step {until}" if until is not None else "no step is the same")
    lines.append(f"{found['different']} of {found['compared']} steps differ")
    return lines
