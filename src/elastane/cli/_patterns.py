"""The patterns of a user, by which `elastane explain` finds the class of a failure.

Reads a TOML file with tables `[[pattern]]`. Fails with ConfigurationError, which names the file and
the entry. What an entry may say is in docs/failure-classes.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError
from elastane.protocol.patterns import Pattern
from elastane.protocol.unreadable import UNREADABLE
from elastane.protocol.verdicts import Outlook

# Far above any table that a person writes; a log named by mistake is not read to its end.
_FILE_BYTES_MAX = 1 << 20
_KIND = re.compile(r"[a-z][a-z0-9-]{0,39}")
_FIELDS: Mapping[str, type] = {
    "class": str,
    "sign": str,
    "outlook": str,
    "next": str,
    "anywhere": bool,
}


def load_patterns(named: str) -> tuple[Pattern, ...]:
    """Return the patterns of a file in their order; none without a name."""
    if not named:
        return ()
    path = Path(named).expanduser()
    entries = _document(path).get("pattern")
    if not isinstance(entries, list) or not entries:
        raise _unusable(path, "no table [[pattern]]")
    return tuple(_pattern(path, number, entry) for number, entry in enumerate(entries, 1))


def _document(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise _unusable(path, f"over {_FILE_BYTES_MAX} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _unusable(path, "not UTF-8") from None
    except UNREADABLE as error:  # digits or brackets without end are no TOMLDecodeError
        raise _unusable(path, str(error)) from None


def _pattern(path: Path, number: int, entry: object) -> Pattern:
    where = f"pattern {number}"
    if not isinstance(entry, Mapping):
        raise _unusable(path, f"{where} is no table")
    for key, value in entry.items():
        if key not in _FIELDS or type(value) is not _FIELDS[key]:
            raise _unusable(path, f"{where}: {key} = {value!r}")
    kind, sign = entry.get("class", ""), entry.get("sign", "")
    if not _KIND.fullmatch(kind) or not sign:
        needs = f"{where} needs a class of small letters, and a sign"
        raise _unusable(path, f"{needs}: class = {kind!r}, sign = {sign!r}")
    try:
        return Pattern(
            kind=kind,
            sign=re.compile(sign),
            outlook=Outlook(entry.get("outlook", Outlook.UNKNOWN)),
            next_step=entry.get("next", ""),
            anywhere=entry.get("anywhere", True),
        )
    except re.error as error:
        raise _unusable(path, f"{where}: {sign!r} is no regular expression: {error}") from None
    except ValueError as error:
        raise _unusable(path, f"{where}: {error}") from None


def _unusable(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}: {reason}",
        slug="explain-patterns",
        expected=(
            "TOML tables [[pattern]] with class and sign, and perhaps outlook (may-pass,"
            " same-again, unknown), next and anywhere"
        ),
        next_step="correct that entry; docs/failure-classes.md has an example",
    )
