"""Saves, loads and exports a checkpoint in a single process, for scripts with their own loop.

As in TorchElastic's examples, one process saves, and every process loads by itself. The result is
an ordinary checkpoint. The ranks agree on nothing, and a save returns when it is durable.

`export` writes one file: `.pt` for torch.load with the state as it was saved, by names, or
`.safetensors` with only the tensors, under their dotted names; the result lists what was left out.
The whole state is in memory once. The file appears complete or not at all.
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
from elastane.checkpoint.members import Members, SingleProcess
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.reading import counted, fill
from elastane.checkpoint.registered import bare, has_state, load_into, states_of
from elastane.checkpoint.restoring import open_files, places_for, state_of
from elastane.checkpoint.saving import Saver, require_durable
from elastane.checkpoint.schedule import at_least_one, steps_done
from elastane.checkpoint.state_source import fence_of_process, require_mapping, require_names
from elastane.errors import CheckpointError, UsageError
from elastane.observe.progress import shown_progress, writing_progress
from elastane.process import environment
from elastane.protocol.checkpoints import Key, era_beyond
from elastane.snapshots.client import SnapshotClient
from elastane.storage import FoundCheckpoint, Repository, open_storage
from elastane.storage.places import FolderIdentity, absolute_place, place_text, storage_errors

SUFFIXES = (".pt", ".pth", ".safetensors")


class Loaded(msgspec.Struct, frozen=True):
    """The result of `load_checkpoint`: the saved state, and its step."""

    step: int
    state: dict[str, Any]
    folder: str


def save_checkpoint(
    where: str | os.PathLike[str], state: Mapping[str, Any], *, step: int, keep: int = 3
) -> None:
    """Save from this process alone; returns when the checkpoint is durable.

    `state` maps names to models, optimizers and other objects with `state_dict`, or to plain values
    and tensors. Only one process should call it, since several would make several checkpoints.
    Raises CheckpointError if it cannot be written; earlier checkpoints stay.
    """
    source = _NamedObjects(state)
    step, keep = steps_done(step), at_least_one(keep)
    repository = Repository(open_storage(absolute_place(where)))
    with storage_errors(repository.storage.where):
        newest = repository.newest_key()
    era = _era(newest, source.fence, step)
    # Another server than the agent's, which holds the job's own state and may be busy.
    with contextlib.closing(SnapshotClient.connect(own=True)) as server:
        place = FolderIdentity(repository.storage)
        place.require()
        saver = Saver(source, server, repository.storage.where, place)
        captured = Captured(source.state())
        order = SaveOrder(step, "asked", keep, environment.get("TORCHELASTIC_RUN_ID", ""))
        key, _ = saver.save(captured, order, era, saver.agree(captured, order, 1))
        require_durable(server, key, repository.storage.where)


def _era(newest: Key | None, fence: tuple[int, int], step: int) -> int:
    """Return the era that makes this save the newest.

    A run that starts again in the folder of another one, or goes back to an earlier step, saves at
    smaller steps than exist. In the same era its checkpoints would be older than those.
    """
    if newest is None:
        return 0
    if Key(newest.era, *fence, step) > newest:
        return newest.era
    return era_beyond(newest.fence, *fence)


def load_checkpoint(
    where: str | os.PathLike[str], into: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Loaded | None:
    """Load the newest valid checkpoint in this process; returns None if there is none yet.

    Objects of `into` with `load_state_dict` load what was saved under their names. Everything is in
    `Loaded.state`. Raises CheckpointError if a name was not saved, if no checkpoint is valid, or,
    with `strict`, if the newest is not.
    """
    repository = Repository(open_storage(place_text(where)))
    with storage_errors(repository.storage.where):
        found = repository.newest_valid(strict=strict).found
    if found is None:
        return None
    state = load_found(repository, found, _NamedObjects(into or {}).state())
    if into is not None:
        if not set(into) <= set(state):
            require_names(state, into)
        for name, thing in into.items():
            if has_state(thing):
                load_into(name, bare(thing), state[name])
    return Loaded(found.key.step, state, found.folder)


def load_found(
    repository: Repository, found: FoundCheckpoint, live: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a verified checkpoint, read into fitting tensors of `live`.

    Raises StorageError of the storage, and CheckpointError if its files contradict each other.
    """
    with storage_errors(repository.storage.where):
        layout, stored, image = open_files(repository.storage, found.folder)
        try:
            tensors, destinations = places_for(layout, live or {})
            total_bytes = sum(each.tensor.nbytes for each in destinations)
            with shown_progress(f"reading step {found.key.step}", total_bytes) as shown:
                fill(layout, counted(image, shown), destinations)
        finally:
            image.close()
    return state_of(stored, tensors)


class _NamedObjects:
    """The caller's objects, saved by this process alone."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        require_mapping(given)
        self._given = given

    @property
    def fence(self) -> tuple[int, int]:
        """The round and attempt given by the launcher."""
        return fence_of_process()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return none: nothing is copied after the call."""
        return []

    def buffers(self) -> list[torch.Tensor]:
        """Return none, since no other rank has any."""
        return []

    def members(self) -> Members:
        """Return this process."""
        return SingleProcess()

    def state(self) -> dict[str, Any]:
        """Return the state of each object, or the given value."""
        return {
            name: states_of(bare(thing))() if has_state(thing) else thing
            for name, thing in self._given.items()
        }


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
            f"{to}: the suffix chooses the format, and {to.suffix or 'none'} is no format",
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
        total_bytes = found.manifest.size_bytes if found.manifest is not None else 0
        with writing_progress(f"writing {to.name}", total_bytes, partial):
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
