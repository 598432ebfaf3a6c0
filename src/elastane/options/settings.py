"""The settings file: `elastane.toml`, or `[tool.elastane]` of `pyproject.toml`.

Its table `[run]` holds options of `elastane run` by name. The file is searched in the current
folder and its parents up to the project's root. A file that another user could have planted is
refused. It yields values as on a command line; other modules interpret them. Fails with
ConfigurationError, which names file, key and the nearest key.

TOML has types: a value of the wrong type is refused with what to write. A project's file is copied
and committed, so a secret in it is refused as well: the file may say where the secret is
(`token-file`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError
from elastane.options.parser import OptionValues, nearest
from elastane.options.table import BY_DEST, TABLE, Option
from elastane.protocol.unreadable import UNREADABLE

NAME = "elastane.toml"
PYPROJECT = "pyproject.toml"
TABLE_NAME = "run"
# Far above any file that a person writes; a log named by mistake is not read to its end.
SETTINGS_BYTES_MAX = 1 << 20
# Endings of the --rdzv-conf keys whose values must never be shown.
SECRET_ENDINGS = ("token", "password", "passwd", "secret")


def load(named: str, folder: Path) -> OptionValues:
    """Return the settings of the named file or folder, otherwise of the project around `folder`."""
    if named:
        path = Path(named).expanduser()
        if path.is_dir():
            return _named_folder(path)
        return _read(path, _document(path, _content(path)))
    for place in _places(folder):
        settings = _of_folder(place)
        if settings is not None:
            _check_owner(Path(settings.path))
            return settings
    return OptionValues()


def _places(folder: Path) -> list[Path]:
    """Return the folders up to the project's root; without a project, only this folder.

    The root has the repository's .git, otherwise it is the nearest folder with either file.
    """
    places = (folder, *folder.parents)
    for marks in ((".git",), (NAME, PYPROJECT)):
        for depth, place in enumerate(places, start=1):
            if any((place / mark).exists() for mark in marks):
                return list(places[:depth])
    return [folder]


def _of_folder(folder: Path) -> OptionValues | None:
    for name in (NAME, PYPROJECT):
        path = folder / name
        if path.is_file():
            text = _content(path)
            # Most projects' pyproject.toml has nothing for elastane, so it is not even parsed.
            if name == NAME or ("elastane" in text and "elastane" in _tools(path, text)):
                return _read(path, _document(path, text))
    return None


def _named_folder(folder: Path) -> OptionValues:
    settings = _of_folder(folder)
    if settings is None:
        raise ConfigurationError(
            f"--config {folder}: no settings in this folder",
            slug="settings-file",
            expected=f"{NAME}, or {PYPROJECT} with [tool.elastane.{TABLE_NAME}]",
        )
    return settings


def _tools(path: Path, text: str) -> Mapping[str, Any]:
    tools = _document(path, text).get("tool", {})
    return tools if isinstance(tools, Mapping) else {}


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(SETTINGS_BYTES_MAX + 1)
        if len(data) > SETTINGS_BYTES_MAX:
            raise _unusable(path, f"over {SETTINGS_BYTES_MAX} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _unusable(path, "not UTF-8") from None


def _document(path: Path, text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except UNREADABLE as error:  # digits or brackets without end are no TOMLDecodeError
        raise _unusable(path, str(error)) from None


def _unusable(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}: {reason}",
        slug="settings-file",
        expected=f"a TOML file with a table [{TABLE_NAME}]",
        next_step="--config /dev/null does without settings",
    )


def _check_owner(path: Path) -> None:
    """Refuse a file that another user put into a folder open to all, such as /tmp."""
    facts = path.stat()
    if facts.st_uid in (os.geteuid(), 0) or not path.parent.stat().st_mode & stat.S_IWOTH:
        return
    raise ConfigurationError(
        f"{path} belongs to another user, in a folder where anybody may write",
        slug="settings-file",
        expected="settings that are yours; they name modules that are imported",
        next_step=f"--config {path} to take it all the same, --config /dev/null to do without",
    )


def _read(path: Path, document: Mapping[str, Any]) -> OptionValues:
    prefix = ""
    if path.name == PYPROJECT:
        prefix = "tool.elastane."
        tools = _table(path, "tool", document.get("tool", {}))
        document = _table(path, "tool.elastane", tools.get("elastane", {}))
    for key in document:
        if key != TABLE_NAME:
            raise _unknown_table(path, prefix, key)
    where = f"[{prefix}{TABLE_NAME}]"
    path = path.absolute()
    values: dict[str, str] = {}
    for key, value in _table(path, where, document.get(TABLE_NAME, {})).items():
        option = _option(path, f"{where} {key}", key)
        if option.dest in values:
            raise bad_value(path, key, value, f"{option.name} once")
        values[option.dest] = as_text(path, option, value)
    return OptionValues(str(path), values)


def _table(path: Path, name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise bad_value(path, name, value, "a table")


def _option(path: Path, where: str, key: str) -> Option:
    option = BY_DEST.get(key.replace("-", "_"))
    if option is not None and option.setting:
        return option
    near = nearest(key.replace("_", "-"), (option.name for option in TABLE if option.setting))
    raise ConfigurationError(
        f"{path}: no such setting: {key}",
        slug="settings-key",
        where=where,
        expected=f"did you mean {near}?" if near else "the name of an option of elastane run",
        next_step="elastane run --help lists all",
    )


def _unknown_table(path: Path, prefix: str, key: str) -> ConfigurationError:
    belongs = key.replace("-", "_") in BY_DEST
    return ConfigurationError(
        f"{path}: no such table: {prefix}{key}",
        slug="settings-key",
        expected=f"{key} below [{prefix}{TABLE_NAME}]" if belongs else f"[{prefix}{TABLE_NAME}]",
    )


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
