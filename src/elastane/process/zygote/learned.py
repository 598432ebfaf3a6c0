"""Imports that the zygote learned from the first workers: what a restart would import again.

Only packages of site-packages are imported, never the user's own modules, whose code may change.
A package is unsafe where its import starts a thread, initialises CUDA, or reads a variable that
differs between workers (RANK): the agent then starts another zygote without it. What other
variables were read is returned, since a script may set them before its own import.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

# Whoever learns is not waited for, but shares the host's CPUs with the training.
LEARNED_IMPORT_S = 60.0
# Variables that are one worker's own, or one attempt's.
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
_PLACE_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ELASTANE_")


@dataclass
class ImportFindings:
    """Which packages are unsafe, and which variables the others have read."""

    unsafe: set[str] = field(default_factory=set)
    reads: dict[str, str | None] = field(default_factory=dict)


def import_learned(names: Iterable[str], unfit: Callable[[], str]) -> ImportFindings:
    """Import modules in their order; `unfit` says why this process could not be forked by now."""
    found, known = ImportFindings(), {}
    ends_s = time.monotonic() + LEARNED_IMPORT_S
    watched = _watch(found)
    try:
        for name in names:
            package = name.partition(".")[0]
            if package not in known:
                known[package] = _is_installed(package)
            if not known[package] or package in found.unsafe or name in sys.modules:
                continue
            if time.monotonic() > ends_s:
                break
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):
                continue  # As it may have been for the worker: an optional part that is missing.
            if len(os.listdir("/proc/self/task")) > 1 and unfit():  # noqa: PTH208 - counted only
                found.unsafe.add(package)
                break
    finally:
        watched()
    return found


def _is_installed(package: str) -> bool:
    """Whether a package lies where pip puts packages, and not where a user edits them."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    return origin is not None and any(Path(origin).is_relative_to(root) for root in roots)


def _watch(found: ImportFindings) -> Callable[[], None]:
    """Note which variables are read from now on; returns what ends that."""
    kind: Any = type(os.environ)

    class ImportWatch(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            if name in _PLACES or name.startswith(_PLACE_PREFIXES):
                found.unsafe |= _readers(sys._getframe(1))
            found.reads[name] = None
            found.reads[name] = value = str(super().__getitem__(name))
            return value

        def __iter__(self) -> Any:
            found.unsafe |= _readers(sys._getframe(1))
            return super().__iter__()

    environ: Any = os.environ
    environ.__class__ = ImportWatch

    def end() -> None:
        environ.__class__ = kind

    return end


def _readers(frame: FrameType | None) -> set[str]:
    """Return the package whose code reads, which is none of Python's own; empty for the zygote."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "elastane":
            break
        if package not in sys.stdlib_module_names:
            return {package}
        frame = frame.f_back
    return set()
