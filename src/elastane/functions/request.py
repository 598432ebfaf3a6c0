"""The options that a caller asks of `elastane run`, as Python values, checked before anything runs.

The names are those of the flags. The agent reads the same request from the function's folder, so no
option, and no secret, ever appears on a command line. How it fails: UsageError and
ConfigurationError of the launcher, raised in the caller.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import numbers
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastane.errors import UsageError
from elastane.options.parser import Options, OptionValues, nearest, read
from elastane.options.settings import load
from elastane.options.table import BY_DEST, Option

FILE, REPORT = "request.json", "report.json"
_MET_AT_AN_ADDRESS = ("static", "c10d", "elastane")
_MEETING = {"rdzv_backend", "rdzv_endpoint", "standalone", "master_addr", "master_port"}
_STEM_CHARS_MAX = 40
# These options say what to run and how. A function fixes them, whatever variables say.
OF_A_FUNCTION = {"module": "1", "no_python": "0", "run_path": "0", "show_config": "0", "json": "0"}


@dataclass(frozen=True)
class RequestedOptions:
    """Options by destination, as text, and what the workers run.

    `ambient`: variables (PET_*, ELASTANE_*) and the settings file set the other options.
    """

    values: dict[str, str]
    script: str
    script_args: tuple[str, ...] = ()
    ambient: bool = True

    def options(self, environ: Mapping[str, str]) -> Options:
        """Return the launcher's options; UsageError for a value that does not fit."""
        namespace = argparse.Namespace(
            **self.values, training_script=self.script, training_script_args=list(self.script_args)
        )
        path = self.values.get("config", "")
        if not self.ambient:
            return read(namespace, {}, load(path, Path.cwd()) if path else OptionValues())
        path = path or environ.get("ELASTANE_CONFIG", "")
        return read(namespace, environ, load(path, Path.cwd()))

    def to_json(self) -> bytes:
        """Return the content of the file in the function's folder that the agent reads."""
        return json.dumps(asdict(self)).encode()


def read_request(folder: Path) -> RequestedOptions:
    """Return the request in a function's folder, which this program itself wrote."""
    found = json.loads((folder / FILE).read_bytes())
    return RequestedOptions(**{**found, "script_args": tuple(found["script_args"])})


def with_defaults(
    request: RequestedOptions, function: str, environ: Mapping[str, str]
) -> RequestedOptions:
    """Return the request with the defaults of a function call.

    They are workers for all devices of the node, an endpoint for a job of one node that no other
    can join, and a job name after the function.
    """
    options = request.options(environ)
    more = {} if "nproc_per_node" in options.given else {"nproc_per_node": "auto"}
    is_alone = options.text("nnodes") in ("1", "1:1")
    if is_alone and not options.given & _MEETING:
        more |= {"rdzv_backend": "elastane", "rdzv_endpoint": "localhost:0"}
    if options.text("rdzv_id") in ("", "none"):
        ending = secrets.token_hex(4) if is_alone else _known_to_all(options, function)
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", function).strip(".-")[-_STEM_CHARS_MAX:]
        more |= {"rdzv_id": f"{stem or 'function'}-{ending}"} if ending else {}
    return replace(request, values={**request.values, **more})


def _known_to_all(options: Options, function: str) -> str:
    """Return a text that is equal on all nodes with the same call, before they meet.

    Empty where a store remembers ended jobs: there the launcher asks for a name.
    """
    if options.text("rdzv_backend").lower() not in _MET_AT_AN_ADDRESS:
        return ""
    where = [options.text(name) for name in ("nnodes", "rdzv_endpoint", "master_addr")]
    return hashlib.sha256("\0".join([function, *where]).encode()).hexdigest()[:10]


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return keyword options as text; UsageError names the nearest flag for a typo.

    None leaves an option at its default.
    """
    for name in options:
        if name not in BY_DEST or name in OF_A_FUNCTION:
            raise _unknown(name)
    return {
        name: _text(BY_DEST[name], value) for name, value in options.items() if value is not None
    }


def _text(option: Option, value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | numbers.Real | os.PathLike):  # numpy's numbers are Real too
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if isinstance(value, Mapping) and option.kind == "pairs":
        return ",".join(f"{key}={_item(option, item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        if option.name == "nnodes":
            return ":".join(map(str, value))
        return ",".join(_item(option, item) for item in value)
    raise _bad(option, value, "a text, a number, True or False, or a list")


def _item(option: Option, value: Any) -> str:
    text = str(value)
    if option.kind == "needles":
        return text.replace(",", ",,")  # as on the command line: two commas mean one
    if "," in text:
        raise _bad(option, value, "items without commas")
    return text


def _bad(option: Option, value: Any, expected: str) -> UsageError:
    return UsageError(
        f"{option.dest} = {value!r}",
        slug="bad-option-value",
        expected=expected,
        next_step=f"see elastane run --help for --{option.name}",
    )


def _unknown(name: str) -> UsageError:
    known = [dest for dest in BY_DEST if dest not in OF_A_FUNCTION]
    near = nearest(name, [*known, "nproc", "args", "kwargs"])
    return UsageError(
        f"elastane.launch(): no option {name}",
        slug="unknown-option",
        expected=f"did you mean {near}?" if near else "the names of the flags of elastane run",
        next_step="elastane run --help",
    )
