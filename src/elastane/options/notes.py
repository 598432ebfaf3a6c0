"""Notes for the user about options and variables without the effect that they seem to have.

Pure: it only compares. A note is not an error: the job starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastane.options.parser import Options, Origin
from elastane.options.spelling import nearest
from elastane.options.table import BY_DEST, TABLE

# A foreign variable is ignored unless it is this similar to one of ours.
_LIKENESS = 0.8
_OPTION = re.compile(r"--([a-z-]+)")


def notes_of(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the notes, each one line."""
    return [*_idle(options), *_start_method(options), *_variables(environ)]


def settings_notes(options: Options) -> list[str]:
    """Name the settings in effect: the user may not know of the file.

    Separate from the other notes, since it must be printed before an error that a setting caused.
    """
    paths = {origin.name for origin in options.origins.values() if origin.kind == "file"}
    names = [option.name for option in TABLE if options.origin(option.dest).kind == "file"]
    return [f"from {path}: {', '.join(names)}" for path in paths]


def origin_of(options: Options, what: str) -> str:
    """Return the origin of an option that an error begins with; empty if it was typed.

    A user who never typed `--nnodes` would look for `--nnodes = '0'` in the wrong place.
    """
    named = _OPTION.match(what)
    option = BY_DEST.get(named[1].replace("-", "_")) if named else None
    origin = options.origin(option.dest) if option else Origin("default")
    return str(origin) if origin.kind in ("variable", "file") else ""


def _idle(options: Options) -> list[str]:
    return [
        f"--{option.name} has no effect here: {option.idle}"
        for option in TABLE
        if option.idle and options.text(option.dest) != option.default
    ]


def _start_method(options: Options) -> list[str]:
    if "start_method" not in options.given or options.flag("run_path"):
        return []
    return ["--start-method has no effect without --run-path, as in torchrun"]


def _variables(environ: Mapping[str, str]) -> list[str]:
    known = [option.env for option in TABLE if option.env]
    without = {f"PET_{option.dest.upper()}": option.name for option in TABLE if not option.env}
    notes = []
    for name in environ:
        if not name.startswith("PET_") or name in known:
            continue
        near = nearest(name, known, _LIKENESS)
        if name in without:
            notes.append(f"{name} is not read, as in torchrun: use --{without[name]}")
        elif near:
            notes.append(f"{name} is not read: did you mean {near}?")
    return notes
