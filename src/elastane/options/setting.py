"""Converts one value of a settings file to the text that a command line would have.

TOML has types: a value of the wrong type is refused with what to write. A project's file is copied
and committed, so a secret in it is refused as well: the file may say where the secret is
(`token-file`). Pure; fails with ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError
from elastane.options.option import Option

# Endings of the --rdzv-conf keys whose values must never be shown.
SECRET_ENDINGS = ("token", "password", "passwd", "secret")


def as_text(path: Path, option: Option, value: Any) -> str:
    """Return a value of the file as a command line would have it."""
    writer = _WRITERS.get(option.kind, _plain)
    text = writer(value)
    if text is None:
        raise bad_value(path, option.name, value, _EXPECTED.get(option.kind, "text or a number"))
    if option.kind == "pairs":
        _refuse_secret(path, option, text)
    if option.kind == "path" and text:
        return str(path.parent / Path(text).expanduser())
    return text


def _plain(value: Any) -> str | None:
    return (
        None if isinstance(value, bool) or not isinstance(value, str | int | float) else f"{value}"
    )


def _flag(value: Any) -> str | None:
    return str(int(value)) if isinstance(value, bool) else None


def _int(value: Any) -> str | None:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> str | None:
    return None if isinstance(value, bool | str) else _plain(value)


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: Any) -> str | None:
    items = [_plain(item) for item in value] if isinstance(value, list) else [_plain(value)]
    if None in items or (len(items) > 1 and any("," in (item or "") for item in items)):
        return None
    return ",".join(item or "" for item in items)


def _needles(value: Any) -> str | None:
    """A list holds plain texts; a single text is written as on a command line."""
    if not isinstance(value, list):
        return _string(value)
    if not all(isinstance(item, str) for item in value):
        return None
    return ",".join(item.replace(",", ",,") for item in value)


def _pairs(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return _string(value)
    pairs = []
    for key, item in value.items():
        text = str(item).lower() if isinstance(item, bool) else _plain(item)
        if text is None or "," in text:
            return None
        pairs.append(f"{key}={text}")
    return ",".join(pairs)


def _refuse_secret(path: Path, option: Option, text: str) -> None:
    keys = {part.partition("=")[0].strip().replace("-", "_") for part in text.split(",")}
    for key in sorted(key for key in keys if key.lower().endswith(SECRET_ENDINGS)):
        raise ConfigurationError(
            f"{path}: {option.name} holds a secret: {key}",
            slug="settings-secret",
            expected="a file that can be shown to everybody",
            next_step='token-file = "PATH" in this file, or the variable ELASTANE_TOKEN'
            if key.endswith("token")
            else "PET_RDZV_CONF, or --rdzv-conf",
        )


def bad_value(path: Path, key: str, value: Any, expected: str) -> ConfigurationError:
    """Return the error for a value that does not fit its key."""
    return ConfigurationError(
        f"{path}: {key} = {value!r}", slug="settings-value", expected=expected
    )


_WRITERS: dict[str, Callable[[Any], str | None]] = {
    "flag": _flag,
    "int": _int,
    "float": _float,
    "list": _list,
    "needles": _needles,
    "pairs": _pairs,
    "path": _string,
    "choice": _string,
}
_EXPECTED = {
    "flag": "true or false, without quotes",
    "int": "an integer, without quotes",
    "float": "a number, without quotes",
    "list": "one value, or a list of values without commas in them",
    "needles": "a text, or a list of texts",
    "pairs": "a table of texts and numbers without commas, or text as KEY=VALUE,...",
    "path": "the path of a file or folder, from this file's folder on",
    "choice": "text",
}
