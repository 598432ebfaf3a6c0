"""Exports a checkpoint as one file: `.pt` for torch.load, `.safetensors` for its readers.

The whole state is in memory once. A `.pt` holds the state as it was saved, by names. Safetensors
holds only tensors, under their dotted names, and the result lists what was left out. The file
appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.simple import load_found
from elastane.errors import CheckpointError, UsageError
from elastane.storage import FoundCheckpoint, Repository

SUFFIXES = (".pt", ".pth", ".safetensors")


class Exported(msgspec.Struct, frozen=True):
    """The written file. `left_out` names what its format cannot hold."""

    path: str
    size_bytes: int
    left_out: tuple[str, ...] = ()


def require_writable(to: Path) -> None:
    """Refuse a file that cannot be written, before the work of reading a checkpoint.

    Raises UsageError for an unknown suffix, and CheckpointError for a folder that is not writable
    or for safetensors if that is not installed.
    """
    if to.suffix not in SUFFIXES:
        raise UsageError(
            f"{to}: the suffix says what is written, and {to.suffix or 'none'} says nothing",
            expected=" or ".join(SUFFIXES),
            next_step=f"elastane checkpoint export WHERE {to.with_suffix('.pt')}",
            slug="bad-option-value",
        )
    if to.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            f"{to.name}: the package safetensors is not installed",
            expected="it, or another suffix",
            next_step="pip install safetensors",
            slug="checkpoint-export",
        )
    with _partial(to):
        pass


def export(repository: Repository, found: FoundCheckpoint, to: Path, only: str = "") -> Exported:
    """Write a checkpoint to one file by its suffix; `only` selects what was saved by that name.

    Raises CheckpointError if it cannot be written; an earlier file then stays.
    """
    state = _chosen(load_found(repository, found), only)
    with _partial(to) as partial:
        left_out = _saved(state, partial, to.suffix)
        partial.replace(to)
    return Exported(str(to), to.stat().st_size, left_out)


@contextlib.contextmanager
def _partial(to: Path) -> Iterator[Path]:
    """Yield an empty temporary file that will replace `to`; nothing is left of it.

    It lies in a new private folder with a random name. The folder of `to` may be /tmp, where other
    users could place a link at a predictable name.
    """
    try:
        if to.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryDirectory(prefix=".elastane-export-", dir=to.parent) as private:
            partial = Path(private) / to.name
            partial.touch()
            yield partial
    except OSError as error:
        raise CheckpointError(
            f"{to} cannot be written: {error.strerror or error}",
            expected="a file in a folder that takes it, with room for the whole state",
            next_step="make that, or name another file",
            slug="checkpoint-export",
        ) from error


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
    left_out: tuple[str, ...] = ()
    if suffix == ".safetensors":
        captured = Captured(state)
        left_out = tuple(sorted(captured.leaves()[0]))
        _save_tensors(dict(zip(captured.names, captured.tensors, strict=True)), path)
    else:
        with path.open("wb") as file:
            torch.save(dict(state), file)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return left_out


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    mode = path.stat().st_mode
    try:
        save_file({name: each.contiguous().clone() for name, each in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors creates its own file, readable only by its owner.
