"""Modules that the zygote imported before the script did: kept out of its sight until it does.

A forked worker begins without them in `sys.modules`, as a fresh interpreter does. The first import
of one of them comes to `EarlyModules`, which looks where the script's own import path leads. The
same file: the early module is the script's, with all of its package, in microseconds. Another one
(a vendored package, put first on sys.path): the early package is dropped, and Python imports the
script's. Torch cannot be imported twice in one process, nor what it is built on. For those, and for
variables that were changed after torch had read them, one line on stderr says what has no effect.
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
from elastane.process.zygote.renewals import renew

# Parts of the launcher that the worker runs in; and what C extensions look up by themselves.
_OWN = frozenset({"elastane", "msgspec"})


@dataclass(frozen=True, slots=True)
class Imported:
    """The top-level packages that were imported early, each with its file, in their order.

    `bound` are those that torch imported, and torch: one process holds each of them once. `reads`
    are the variables that learned packages read when they were imported, with their values then.
    `writes` are those that packages set, each with the package and the value. `renewed` are the
    modules that take in the worker's environment when they are given out (`renewals`).
    """

    origins: Mapping[str, str] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    reads: Mapping[str, str | None] = field(default_factory=dict)
    writes: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    renewed: frozenset[str] = frozenset()


def outside(names: Iterable[str]) -> dict[str, str]:
    """Return the top-level packages among `names` that are not Python's own, with their files."""
    found = {}
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        own = name in sys.stdlib_module_names or name in _OWN or name.startswith("_")
        if "." not in name and not own and origin and origin.startswith("/"):
            found[name] = origin
    return found


class EarlyModules:
    """A finder, first on sys.meta_path, that gives the early modules out when they are imported.

    All packages that are bound to torch are given out together, and so are all the others.
    """

    def __init__(self, imported: Imported, env: Mapping[str, str]) -> None:
        self._imported, self._env = imported, dict(env)
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._looks = False

    def hide(self) -> None:
        """Take the early packages out of sys.modules until they are imported."""
        for name, module in [*sys.modules.items()]:
            package = name.partition(".")[0]
            if package in self._imported.origins:
                self._hidden.setdefault(package, {})[name] = module
                del sys.modules[name]
        if self._hidden:
            sys.meta_path.insert(0, self)
            # Handlers of the early modules themselves come later, and find what they import.
            atexit.register(self._show, [*self._hidden])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how an early package is given out; None where it is not what is looked for."""
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
        """Have the package of this name, and its unit, imported from now on."""
        unit = self._unit(name)
        if name in self._imported.bound:
            self._report(unit)
        self._show(unit)
        self._renew(unit)

    def _renew(self, unit: Collection[str]) -> None:
        """Have the modules of these packages take in this worker's environment, and set theirs."""
        renew(name for name in self._imported.renewed if name.partition(".")[0] in unit)
        for name, (package, value) in self._imported.writes.items():
            if package not in unit:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _is_stale(self, name: str) -> bool:
        """Whether an import now would lead elsewhere, or read other variables.

        A worker that waits for a place has no rank yet, and may import later what keeps the rank.
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
        """Say what of the script's has no effect, for torch is there already."""
        for package in unit:
            if found := self._elsewhere(package):
                early = self._imported.origins[package]
                _say(f"{found} is not used: torch was imported with {early} before")
        for name in sorted({*self._env, *os.environ}):
            value = os.environ.get(name)
            if not is_read_at_import(name) or value == self._env.get(name):
                continue
            if name not in self._imported.writes or value != self._imported.writes[name][1]:
                _say(f"{name} has no effect: torch was imported before the script set it")

    def _elsewhere(self, package: str) -> str:
        """Return the file that the script's import path leads to, where it is another one."""
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
    """A finder that finds nothing, and has what is looked for noted, until `note` takes no more."""

    def __init__(self, note: Callable[[str], bool]) -> None:
        self._note, self._pid = note, os.getpid()

    def begin(self) -> None:
        """Note imports from now on, in this process and in none that it forks."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Note the name of a module that is not Python's own."""
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package in _OWN or os.getpid() != self._pid:
            return
        if not self._note(name) and self in sys.meta_path:
            sys.meta_path.remove(self)


class _EarlyModule:
    """Loads a module that is there already."""

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


def _say(what: str) -> None:
    if sys.stderr is not None:
        next_step = "Next: --no-zygote starts each worker as a new interpreter"
        sys.stderr.write(f"elastane: {what}. {next_step}\n")
