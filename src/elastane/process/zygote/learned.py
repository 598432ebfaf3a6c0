"""Imports that the zygote learned from the first workers, so that a restart need not repeat them.

Only packages of site-packages are imported, never the user's own modules, whose code may change. A
package is unsafe if its import starts a thread, initialises CUDA, or reads a variable that differs
between workers (RANK), except for modules that a worker can renew. The agent then starts another
zygote without the unsafe packages and their importers.

The other variables that packages read are returned, because a script may set them before its own
import. So are the variables that packages set, because a worker's environment is a new one and
lacks them.

Lightning and torchmetrics keep the rank of their process, and fsspec keeps its configuration. A
worker that gets them from the zygote would keep the zygote's. `RENEWALS` lists these values, in
versions whose source was read. `fault_of` tries a renewal in the zygote: a package of another
version, or whose renewal has no effect, is imported by each worker itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# No worker waits for it, but it shares the host's CPUs with the training.
LEARNED_IMPORT_S = 60.0
# Variables of one worker or one attempt.
_WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_WORKER_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ELASTANE_")
# No job has this many workers (`COUNT_MAX` of the protocol), so it is no worker's rank.
_TRIAL_RANK = (1 << 31) - 1
_TRIAL_RANKS = dict.fromkeys(("RANK", "LOCAL_RANK"), str(_TRIAL_RANK))


@dataclass
class ImportFindings:
    """The use of the environment during the import of packages.

    `unsafe`: packages, and modules of torch, that must not be imported early. `ranked`: the unsafe
    packages that read a variable of one worker, each with that variable. `reads`: the variables
    that the others read, with their values then. `writes`: the variables that they set, each with
    the package and the value; None for a deletion. `renewed`: the modules to be renewed.
    """

    unsafe: set[str] = field(default_factory=set)
    ranked: dict[str, str] = field(default_factory=dict)
    reads: dict[str, str | None] = field(default_factory=dict)
    writes: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)

    def try_renewals(self) -> None:
        """Keep the renewals that work; the packages of the others are unsafe."""
        for module in sorted(self.renewed):
            if fault_of(module):
                self.renewed.remove(module)
                self.add_unsafe(_package(module))

    def add_unsafe(self, package: str, variable: str = "") -> None:
        """Add an unsafe package; `variable`: the variable of one worker that it reads."""
        if variable and package not in self.unsafe:
            self.ranked[package] = variable
        self.unsafe.add(package)


def import_learned(names: Iterable[str], unfit: Callable[[], str]) -> ImportFindings:
    """Import modules in order; `unfit` returns why this process can no longer be forked."""
    found, known = ImportFindings(), {}
    ends_s = time.monotonic() + LEARNED_IMPORT_S
    with watched(found):
        for name in names:
            package = _package(name)
            if package not in known:
                known[package] = _is_installed(package)
            if not known[package] or package in found.unsafe or name in sys.modules:
                continue
            if time.monotonic() > ends_s:
                break
            before = set(found.unsafe)
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):
                continue  # it may have failed in the worker too: an optional part that is missing
            if found.unsafe - before:
                # In the next zygote it would import the unsafe package again.
                found.unsafe.add(name if package == "torch" else package)
            if len(os.listdir("/proc/self/task")) > 1 and unfit():  # noqa: PTH208 - counted only
                found.unsafe.add(package)
                break
    found.try_renewals()
    return found


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_installed(package: str) -> bool:
    """Return whether a package lies where pip installs packages, not where a user edits them."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    return origin is not None and any(Path(origin).is_relative_to(root) for root in roots)


@contextlib.contextmanager
def watched(found: ImportFindings) -> Iterator[None]:
    """Record the variables that packages read and set while they are imported in this context."""
    kind: Any = type(os.environ)

    class ImportWatch(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            reader = _user(sys._getframe(1))
            if reader in RENEWALS:
                found.renewed.add(reader)
                return str(super().__getitem__(name))
            if reader and (name in _WORKER_VARIABLES or name.startswith(_WORKER_PREFIXES)):
                found.add_unsafe(_package(reader), name)
            # A value that a package has set says nothing about the environment.
            if name in found.writes:
                return str(super().__getitem__(name))
            found.reads[name] = None
            found.reads[name] = value = str(super().__getitem__(name))
            return value

        def __iter__(self) -> Any:
            reader = _user(sys._getframe(1))
            if reader in RENEWALS:
                found.renewed.add(reader)
            elif reader:
                found.add_unsafe(_package(reader))
            return super().__iter__()

        def __setitem__(self, name: str, value: str) -> None:
            super().__setitem__(name, value)
            found.writes[name] = (_package(_user(sys._getframe(1))), value)

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            found.writes[name] = (_package(_user(sys._getframe(1))), None)

    environ: Any = os.environ
    environ.__class__ = ImportWatch
    try:
        yield
    finally:
        environ.__class__ = kind


def _user(frame: FrameType | None) -> str:
    """Return the module whose code uses the environment; empty for the zygote.

    Modules of Python's own library are skipped.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _package(module) == "elastane":
            break
        if _package(module) not in sys.stdlib_module_names:
            return module
        frame = frame.f_back
    return ""


@dataclass(frozen=True, slots=True)
class Renewal:
    """How one module reads the environment again, and how to verify it.

    `versions`: beginnings of the package's versions. With the variables `trial` set, `shows` is
    true after `renew`, and false after it without them.
    """

    versions: tuple[str, ...]
    renew: Callable[[Any], None]
    trial: Mapping[str, str]
    shows: Callable[[Any], bool]


def _rank_holders(module: Any) -> list[Any]:
    """Return the functions that keep the rank; until Lightning 2.5 there may be two."""
    return [module.rank_zero_only, module.rank_zero_module.rank_zero_only]


def _renew_lightning(module: Any) -> None:
    for holder in _rank_holders(module):
        holder.rank = module._get_rank() or 0


def _renew_torchmetrics(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def _renew_fsspec(module: Any) -> None:
    default = str(Path("~").expanduser() / ".config/fsspec")
    module.conf_dir = os.environ.get("FSSPEC_CONFIG_DIR", default)
    module.conf.clear()
    module.set_conf_files(module.conf_dir, module.conf)
    module.set_conf_env(module.conf)


_LIGHTNING = Renewal(
    ("2.5.", "2.6."),
    _renew_lightning,
    _TRIAL_RANKS,
    lambda module: all(holder.rank == _TRIAL_RANK for holder in _rank_holders(module)),
)
# The modules that read a variable of one worker, or all variables, at import.
RENEWALS: Mapping[str, Renewal] = {
    "lightning.fabric.utilities.rank_zero": _LIGHTNING,
    "lightning_fabric.utilities.rank_zero": _LIGHTNING,
    "torchmetrics.utilities.prints": Renewal(
        ("1.",),
        _renew_torchmetrics,
        _TRIAL_RANKS,
        lambda module: bool(module.rank_zero_only.rank == _TRIAL_RANK),
    ),
    "fsspec.config": Renewal(
        ("2023.", "2024.", "2025.", "2026."),
        _renew_fsspec,
        {"FSSPEC_ELASTANE": '{"trial": 1}'},
        lambda module: "elastane" in module.conf,
    ),
}


def fault_of(name: str) -> str:
    """Return why module `name` cannot be renewed, after a trial; empty if it can."""
    renewal, module = RENEWALS[name], sys.modules.get(name)
    package = sys.modules.get(name.partition(".")[0])
    version = str(getattr(package, "__version__", "unknown"))
    if module is None or not version.startswith(renewal.versions):
        return f"version {version} is not known"
    before = {variable: os.environ.get(variable) for variable in renewal.trial}
    try:
        os.environ.update(renewal.trial)
        renewal.renew(module)
        has_changed = renewal.shows(module)
        _restore(before)
        renewal.renew(module)
        if has_changed and not renewal.shows(module):
            return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _restore(before)
    return "its renewal has no effect"


def renew(names: Iterable[str]) -> None:
    """Make these modules read this process's environment, as if they were imported now."""
    for name in names:
        RENEWALS[name].renew(sys.modules[name])


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
