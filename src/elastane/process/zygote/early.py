"""Hides modules that the zygote imported from a worker's script until the script imports them.

A forked worker starts without them in `sys.modules`, like a fresh interpreter. The first import of
one of them reaches `EarlyModules`, which resolves it on the script's own import path. If that gives
the same file, the script gets the early module and its whole package, in microseconds. If it gives
another file (a vendored package, put first on sys.path), the early package is dropped, and Python
imports the script's.

Torch and its dependencies cannot be imported twice in one process. For those, and for variables
that were changed after torch had read them, a line on stderr says what has no effect.
"""

from __future__ import annotations

import atexit
import copy
import importlib.machinery
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from elastane.process.zygote.fitness import is_read_at_import
from elastane.process.zygote.learned import renew

# The launcher's parts that the worker runs in, and modules that C extensions look up themselves.
_OWN = frozenset({"elastane", "msgspec"})


@dataclass(frozen=True, slots=True)
class Imported:
    """The top-level packages that were imported early, each with its file, in order.

    `bound`: torch and the packages that it imported, which one process can hold only once. `reads`:
    the variables that learned packages read at import, with their values then. `writes`: the
    variables that packages set, each with the package and the value. `renewed`: the modules that
    read the worker's environment again when they are provided (`learned.RENEWALS`). `devices`: the
    value of CUDA_VISIBLE_DEVICES that a package of the user's choice read, if one did.
    """

    origins: Mapping[str, str] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    reads: Mapping[str, str | None] = field(default_factory=dict)
    writes: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    renewed: frozenset[str] = frozenset()
    devices: Mapping[str, str | None] = field(default_factory=dict)


def outside(names: Iterable[str]) -> dict[str, str]:
    """Return the top-level packages among `names` that are not Python's own, with their files."""
    found = {}
    for name in names:
        own = name in sys.stdlib_module_names or name in _OWN or name.startswith("_")
        if own or "." in name:
            continue
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        if origin and origin.startswith("/"):
            found[name] = origin
    return found


class EarlyModules:
    """A finder, first on sys.meta_path, that provides the early modules when they are imported.

    All packages bound to torch are provided together, and so are all the others.
    """

    def __init__(self, imported: Imported, env: Mapping[str, str]) -> None:
        self._imported, self._env = imported, dict(env)
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._looks = False

    def hide(self) -> None:
        """Remove the early packages from sys.modules until they are imported."""
        for name, module in [*sys.modules.items()]:
            package = name.partition(".")[0]
            if package in self._imported.origins:
                self._hidden.setdefault(package, {})[name] = module
                del sys.modules[name]
        if self._hidden:
            sys.meta_path.insert(0, self)
            # Exit handlers of the early modules run later and find their imports.
            atexit.register(self._show, [*self._hidden])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that the zygote imported early; None for any other name."""
        module = self._hidden.get(name, {}).get(name)
        if self._looks or module is None or module.__spec__ is None:
            return None
        if name not in self._imported.bound and self._is_stale(name):
            self._forget(self._unit(name))
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = _EarlyModule(self, module)  # type: ignore[assignment]
        return spec

    def give(self, name: str) -> None:
        """Make the package of this name, and its unit, imported from now on."""
        unit = self._unit(name)
        if name in self._imported.bound:
            self._report(unit)
        self._show(unit)
        self._renew(unit)

    def _renew(self, unit: Collection[str]) -> None:
        """Let the modules of these packages read this worker's environment; set their variables."""
        renew(name for name in self._imported.renewed if name.partition(".")[0] in unit)
        for name, (package, value) in self._imported.writes.items():
            if package not in unit:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _is_stale(self, name: str) -> bool:
        """Return whether an import now would find another file, or read other variables.

        A worker that waits for an assignment has no rank yet, and may later import a module that
        keeps the rank.
        """
        if self._imported.renewed and "RANK" not in os.environ:
            return True
        if any(os.environ.get(each) != value for each, value in self._imported.reads.items()):
            return True
        return any(map(self._elsewhere, self._unit(name)))

    def _unit(self, name: str) -> list[str]:
        bound = self._imported.bound
        return [each for each in self._hidden if (each in bound) == (name in bound)]

    def _show(self, packages: Iterable[str]) -> None:
        for package in packages:
            sys.modules.update(self._hidden.get(package, {}))
        self._forget(packages)

    def _forget(self, packages: Iterable[str]) -> None:
        for package in packages:
            self._hidden.pop(package, None)
        if not self._hidden and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _report(self, unit: Iterable[str]) -> None:
        """Print which settings of the script have no effect, since torch is imported already."""
        for package in unit:
            if found := self._elsewhere(package):
                early = self._imported.origins[package]
                _warn(f"{found} is not used: torch was imported with {early} before")
        for name in sorted({*self._env, *os.environ}):
            value = os.environ.get(name)
            if not is_read_at_import(name) or value == self._env.get(name):
                continue
            if name not in self._imported.writes or value != self._imported.writes[name][1]:
                _warn(f"{name} has no effect: torch was imported before the script set it")

    def _elsewhere(self, package: str) -> str:
        """Return the file that the script's import path finds, if it is another one."""
        origin, found = self._imported.origins[package], None
        self._looks = True
        try:
            for finder in sys.meta_path:
                look: Callable[..., Any] | None = getattr(finder, "find_spec", None)
                found = look(package, None, None) if look is not None else None
                if found is not None:
                    break
        finally:
            self._looks = False
        file = getattr(found, "origin", None)
        return "" if file in (None, origin) or _is_same_file(file, origin) else str(file)


class ImportNotes:
    """A finder that finds nothing and reports each name, until `note` returns False."""

    def __init__(self, note: Callable[[str], bool]) -> None:
        self._note, self._pid = note, os.getpid()

    def begin(self) -> None:
        """Report imports of this process from now on, but not of its forks."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Report the name of a module that is not Python's own."""
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package in _OWN or os.getpid() != self._pid:
            return
        if not self._note(name) and self in sys.meta_path:
            sys.meta_path.remove(self)


class _EarlyModule:
    """A loader for a module that is imported already."""

    def __init__(self, early: EarlyModules, module: ModuleType) -> None:
        self._early, self._module, self._spec = early, module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._early.give(module.__name__)


def _is_same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False


def _warn(what: str) -> None:
    if sys.stderr is not None:
        next_step = "Next: --no-zygote starts each worker as a new interpreter"
        sys.stderr.write(f"elastane: {what}. {next_step}\n")
