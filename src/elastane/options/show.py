"""`--show-config`: every option with its value and its origin.

It only renders what was read; it starts nothing and checks nothing more. A secret is never shown,
wherever it came from: only that there is one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from elastane.options.parser import Options
from elastane.options.settings import SECRET_ENDINGS
from elastane.options.table import TABLE, Option

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
