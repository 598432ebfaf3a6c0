"""The settings file: `elastane.toml`, or `[tool.elastane]` of `pyproject.toml`.

Its table `[run]` holds options of `elastane run` by name. The file is searched in the current
folder and its parents up to the project's root. A file that another user could have planted is
refused. It yields values as on a command line; other modules interpret them. Fails with
ConfigurationError, which names file, key and the nearest key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastane.errors import ConfigurationError
from elastane.options.nearest import nearest
from elastane.options.option import Option
from elastane.options.options import BY_DEST, TABLE
from elastane.options.parser import OptionValues
from elastane.options.setting import as_text, bad_value
from elastane.protocol.unreadable import UNREADABLE

NAME = "elastane.toml"
PYPROJECT = "pyproject.toml"
TABLE_NAME = "run"
# Far above any file that a person writes; a log named by mistake is not read to its end.
SETTINGS_BYTES_MAX = 1 << 20


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
