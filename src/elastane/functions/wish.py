"""What a caller asks of `elastane run`: its options as Python values, checked before anything runs.

The names are those of the flags. The agent reads the same wish from the function's folder, so no
option is ever on a command line, where a secret would be seen. How it fails: UsageError and
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
from elastane.options.nearest import nearest
from elastane.options.option import Option
from elastane.options.options import BY_DEST
from elastane.options.parser import Options, OptionValues, read
from elastane.options.settings import load

FILE, REPORT = "wish.json", "report.json"
_MET_AT_AN_ADDRESS = ("static", "c10d", "elastane")
_MEETING = {"rdzv_backend", "rdzv_endpoint", "standalone", "master_addr", "master_port"}
_STEM_CHARS_MAX = 40
# They say what is run and how an interpreter is told so: here that is the function, whatever
# variables say.
OF_A_FUNCTION = {"module": "1", "no_python": "0", "run_path": "0", "show_config": "0", "json": "0"}


@dataclass(frozen=True)
class RequestedOptions:
    """Options by destination, as text, and what the workers run.

    `ambient`: variables (PET_*, ELASTANE_*) and the settings file say what the options do not.
    """

    values: dict[str, str]
    script: str
    script_args: tuple[str, ...] = ()
    ambient: bool = True

    def options(self, environ: Mapping[str, str]) -> Options:
        """Return the launcher's options; UsageError for a value that one cannot take."""
        namespace = argparse.Namespace(
            **self.values, training_script=self.script, training_script_args=list(self.script_args)
        )
        named = self.values.get("config", "")
        if not self.ambient:
            return read(namespace, {}, load(named, Path.cwd()) if named else OptionValues())
        named = named or environ.get("ELASTANE_CONFIG", "")
        return read(namespace, environ, load(named, Path.cwd()))

    def to_json(self) -> bytes:
        """Return the file of the function's folder that the agent reads."""
        return json.dumps(asdict(self)).encode()


def read_wish(folder: Path) -> RequestedOptions:
    """Return the wish of a function's folder, which this program itself wrote."""
    found = json.loads((folder / FILE).read_bytes())
    return RequestedOptions(**{**found, "script_args": tuple(found["script_args"])})


def named(wish: RequestedOptions, function: str, environ: Mapping[str, str]) -> RequestedOptions:
    """Return the wish with what a call of a function adds where nobody said otherwise.

    Workers for all devices of the node; for a job of one node, a place where it meets nobody; and a
    name, after the function.
    """
    options = wish.options(environ)
    more = {} if "nproc_per_node" in options.given else {"nproc_per_node": "auto"}
    is_alone = options.text("nnodes") in ("1", "1:1")
    if is_alone and not options.given & _MEETING:
        more |= {"rdzv_backend": "elastane", "rdzv_endpoint": "localhost:0"}
    if options.text("rdzv_id") in ("", "none"):
        ending = secrets.token_hex(4) if is_alone else _known_to_all(options, function)
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", function).strip(".-")[-_STEM_CHARS_MAX:]
        more |= {"rdzv_id": f"{stem or 'function'}-{ending}"} if ending else {}
    return replace(wish, values={**wish.values, **more})


def _known_to_all(options: Options, function: str) -> str:
    """Return the same text on all nodes that call alike, which have not met.

    Nothing where a store remembers jobs that ended: there the launcher asks for a name.
    """
    if options.text("rdzv_backend").lower() not in _MET_AT_AN_ADDRESS:
        return ""
    where = [options.text(name) for name in ("nnodes", "rdzv_endpoint", "master_addr")]
    return hashlib.sha256("\0".join([function, *where]).encode()).hexdigest()[:10]


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return keyword options as text; UsageError names the flag that is nearest to a typo.

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
        return text.replace(",", ",,")  # as its flag has it: two commas are one of a text
    if "," in text:
        raise _bad(option, value, "items without commas")
    return text


def _bad(option: Option, value: Any, expected: str) -> UsageError:
    return UsageError(f"{option.dest} = {value!r}", slug="bad-option-value", expected=expected)


def _unknown(name: str) -> UsageError:
    known = [dest for dest in BY_DEST if dest not in OF_A_FUNCTION]
    near = nearest(name, [*known, "nproc", "args", "kwargs"])
    return UsageError(
        f"elastane.launch(): no option {name}",
        slug="unknown-option",
        expected=f"did you mean {near}?" if near else "the names of the flags of elastane run",
        next_step="elastane run --help",
    )
