"""One call that saves and one that loads, for scripts with their own loop.

As in TorchElastic's examples, one process saves, and every process loads by itself. The result is
an ordinary checkpoint. The ranks agree on nothing, and a save returns when it is durable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.folder_identity import FolderIdentity, absolute_place, place_text
from elastane.checkpoint.members import Members, SingleProcess
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.reading import fill
from elastane.checkpoint.registered import bare, has_state, load_into, states_of
from elastane.checkpoint.restoring import open_files, places_for, state_of
from elastane.checkpoint.save_schedule import at_least_one, steps_done
from elastane.checkpoint.saving import Saver, require_durable
from elastane.checkpoint.state_source import fence_of_process, require_mapping, require_names
from elastane.process import environment
from elastane.protocol.checkpoints import Key, era_beyond
from elastane.snapshots.client import SnapshotClient
from elastane.storage import FoundCheckpoint, Repository, open_storage
from elastane.storage.errors import storage_errors


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
    # Not the agent's server, which holds the job's own state and may be busy with it.
    with contextlib.closing(SnapshotClient.connect(own=True)) as keeper:
        place = FolderIdentity(repository.storage)
        place.require()
        saver = Saver(source, keeper, repository.storage.where, place)
        captured = Captured(source.state())
        order = SaveOrder(step, "asked", keep, environment.get("TORCHELASTIC_RUN_ID", ""))
        key, _ = saver.save(captured, order, era, saver.agree(captured, order, 1))
        require_durable(keeper, key, repository.storage.where)


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
            fill(layout, image, destinations)
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
