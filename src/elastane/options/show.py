"""The display of options: `--show-config`, and notes about options without effect.

It renders and compares what was read; it starts nothing. A secret is never shown, wherever it came
from: only that there is one. A note is not an error: the job starts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from elastane.options.parser import Options, Origin, nearest
from elastane.options.settings import SECRET_ENDINGS
from elastane.options.table import BY_DEST, TABLE, Option

HIDDEN = "***"
# Variables that belong to no option but change what a job does.
OTHER_VARIABLES = (
    "ELASTANE_TOKEN",
    "PYTHON_EXEC",
    "LOGLEVEL",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "TORCH_ELASTIC_WORKER_IDENTICAL",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
)
_SECRET_PAIR = re.compile(
    rf"(?<![^,])(\s*[\w-]*(?:{'|'.join(SECRET_ENDINGS)})\s*=)[^,]*", re.IGNORECASE
)
_USER_INFO = re.compile(r"(?<=//)[^/@]*@|^[^/@]*:[^/@]*@")
# A foreign variable is ignored unless it is this similar to one of ours.
_LIKENESS = 0.8
_OPTION = re.compile(r"--([a-z-]+)")


def as_lines(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the listing for a person, with each value's origin."""
    shown = [option for option in TABLE if option.setting]
    names = max(len(option.name) for option in shown) + 2
    values = {option.dest: _value(options, option) or "-" for option in shown}
    width = min(30, max(map(len, values.values())))
    lines: list[str] = []
    group = ""
    for option in shown:
        if option.group != group:
            group = option.group
            lines += ["", group] if lines else [group]
        origin = options.origin(option.dest)
        lines.append(f"  --{option.name:<{names}}{values[option.dest]:<{width}}  {origin}")
    if options.script:
        lines += ["", f"script: {shlex.join([options.script, *options.script_args])}"]
    others = _others(environ)
    if others:
        lines += ["", "other variables that count here"]
        lines += [f"  {name}={value}" for name, value in others.items()]
    return lines


def as_object(options: Options, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the listing for a program; values have their types, null is an empty value."""
    return {
        "options": {
            option.name: {
                "value": _typed(options, option),
                "origin": options.origin(option.dest).kind,
                "name": options.origin(option.dest).name,
            }
            for option in TABLE
            if option.setting
        },
        "script": options.script,
        "script_args": list(options.script_args),
        "variables": _others(environ),
    }


def _value(options: Options, option: Option) -> str:
    if option.kind == "flag":
        return "yes" if options.flag(option.dest) else "no"
    return _without_secrets(option, options.text(option.dest))


def _typed(options: Options, option: Option) -> Any:
    text = options.text(option.dest)
    if option.kind == "flag":
        return options.flag(option.dest)
    if not text:
        return None
    if option.kind == "int":
        return options.whole(option.dest)
    if option.kind == "float":
        return options.seconds(option.dest)
    return _without_secrets(option, text)


def _without_secrets(option: Option, text: str) -> str:
    if option.kind == "pairs":
        text = _SECRET_PAIR.sub(rf"\1{HIDDEN}", text)
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def _others(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: environ[name] for name in OTHER_VARIABLES if environ.get(name)}
    return {name: HIDDEN if name == "ELASTANE_TOKEN" else value for name, value in found.items()}


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
    return str(origin) if origin.kind in ("variable", "file", "Slurm") else ""


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
