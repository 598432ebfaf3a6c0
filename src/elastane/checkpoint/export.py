"""A checkpoint as one file: `.pt` for torch.load, `.safetensors` for what reads those.

Holds the whole state in memory once. A `.pt` has the state as it was saved, by names; safetensors
knows tensors alone, so it gets those under their dotted names, and of the rest what is said is what
is left out. The file appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.simple import load_found
from elastane.errors import CheckpointError, UsageError
from elastane.storage import Found, Repository

SUFFIXES = (".pt", ".pth", ".safetensors")


class Exported(msgspec.Struct, frozen=True):
    """What was written. `left_out` is what the format has no place for."""

    path: str
    size_bytes: int
    left_out: tuple[str, ...] = ()


def export(repository: Repository, found: Found, to: Path, only: str = "") -> Exported:
    """Write a checkpoint to one file, by its suffix; `only`: what was saved under this name."""
    if to.suffix not in SUFFIXES:
        raise UsageError(
            f"{to}: the suffix says what is written, and {to.suffix or 'none'} says nothing",
            expected=" or ".join(SUFFIXES),
            next_step=f"elastane checkpoint export WHERE {to.with_suffix('.pt')}",
            slug="bad-option-value",
        )
    state = _chosen(load_found(repository, found), only)
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        left_out = _saved(state, partial, to.suffix)
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(str(to), to.stat().st_size, left_out)


def _chosen(state: Mapping[str, Any], only: str) -> dict[str, Any]:
    users = {name: held for name, held in state.items() if not name.startswith("elastane.")}
    if not only:
        return users
    if only not in users:
        raise CheckpointError(
            f"nothing was saved as {only}",
            expected=", ".join(users),
            next_step=f"--only {next(iter(users), 'NAME')}",
            slug="checkpoint-unknown",
        )
    held = users[only]
    return dict(held) if isinstance(held, Mapping) else {only: held}


def _saved(state: Mapping[str, Any], path: Path, suffix: str) -> tuple[str, ...]:
    if suffix != ".safetensors":
        with path.open("wb") as file:
            torch.save(dict(state), file)
            os.fsync(file.fileno())
        return ()
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            f"{path.name}: the package safetensors is not installed",
            expected="it, or another suffix",
            next_step="pip install safetensors",
            slug="checkpoint-export",
        ) from None
    captured = Captured(state)
    pairs = zip(captured.names, captured.tensors, strict=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in pairs}, path)
    plain, _ = captured.leaves()
    return tuple(sorted(plain))
