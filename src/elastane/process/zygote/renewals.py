"""Renews what some packages keep of the environment at import, when a worker gets them.

Lightning and torchmetrics keep the rank of their process, and fsspec keeps its configuration. A
worker that gets them from the zygote would keep the zygote's. This module lists the kept values, in
versions whose source was read. `fault_of` tries a renewal in the zygote: a package of another
version, or whose renewal has no effect, is imported by each worker itself (`learned`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


# No job has this many workers (`COUNT_MAX` of the protocol), so it is no worker's rank.
_TRIAL_RANK = (1 << 31) - 1
_TRIAL_RANKS = dict.fromkeys(("RANK", "LOCAL_RANK"), str(_TRIAL_RANK))


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
