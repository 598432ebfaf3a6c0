"""One call that saves and one that loads, for scripts that hold their own loop.

In the manner of TorchElastic's examples: one process saves, every process loads by itself. What is
written is a checkpoint like a Checkpointer's; nothing is agreed among ranks, and the call returns
when it is durable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.folder_identity import StoragePath, absolute, named
from elastane.checkpoint.members import Alone, Members
from elastane.checkpoint.plan import SaveOrder
from elastane.checkpoint.reading import fill
from elastane.checkpoint.registered import bare, give, has_state, states_of
from elastane.checkpoint.restoring import opened_files, places_for, state_of
from elastane.checkpoint.save_schedule import at_least_one, steps_done
from elastane.checkpoint.saving import Saver, insist_durable
from elastane.checkpoint.state_source import fence_of_process, insist_on_mapping, insist_on_names
from elastane.process import environment
from elastane.protocol.checkpoints import Key, era_beyond
from elastane.snapshots.client import Keeper
from elastane.storage import FoundCheckpoint, Repository, open_storage
from elastane.storage.errors import told_of


class Loaded(msgspec.Struct, frozen=True):
    """What `load_checkpoint` found: the state as it was saved, and under which step."""

    step: int
    state: dict[str, Any]
    folder: str


def save_checkpoint(
    where: str | os.PathLike[str], state: Mapping[str, Any], *, step: int, keep: int = 3
) -> None:
    """Save on this process alone; returns when the checkpoint is durable.

    `state` maps names to models, optimizers and whatever else has `state_dict`, or to plain values
    and tensors. Call it on one process: several would make several checkpoints. CheckpointError
    where it could not be written; the checkpoints before it stay.
    """
    subject = _NamedObjects(state)
    step, keep = steps_done(step), at_least_one(keep)
    repository = Repository(open_storage(absolute(where)))
    with told_of(repository.storage.where):
        newest = repository.newest_key()
    era = _era(newest, subject.fence, step)
    # Not the agent's keeper: that holds the job's own state, and is perhaps busy with it.
    with contextlib.closing(Keeper.connect(own=True)) as keeper:
        place = StoragePath(repository.storage)
        place.insist()
        saver = Saver(subject, keeper, repository.storage.where, place)
        captured = Captured(subject.state())
        order = SaveOrder(step, "asked", keep, environment.get("TORCHELASTIC_RUN_ID", ""))
        key, _ = saver.save(captured, order, era, saver.agree(captured, order, 1))
        insist_durable(keeper, key, repository.storage.where)


def _era(newest: Key | None, fence: tuple[int, int], step: int) -> int:
    """Return the era in which what is saved now is the newest.

    A run that begins again in the folder of another one, or goes back to an earlier step, saves at
    smaller steps than are there. In the same era its checkpoints would be old on arrival.
    """
    if newest is None:
        return 0
    if Key(newest.era, *fence, step) > newest:
        return newest.era
    return era_beyond(newest.fence, *fence)


def load_checkpoint(
    where: str | os.PathLike[str], into: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Loaded | None:
    """Load the newest valid checkpoint on this process; None where there is none yet.

    Objects of `into` that have `load_state_dict` take over what was saved under their names; what
    else was saved is in `Loaded.state`. CheckpointError where a name was not saved, where there are
    checkpoints and none is valid, or, if `strict`, where the newest is not.
    """
    repository = Repository(open_storage(named(where)))
    with told_of(repository.storage.where):
        found = repository.newest_valid(strict=strict).found
    if found is None:
        return None
    state = load_found(repository, found, _NamedObjects(into or {}).state())
    if into is not None:
        if not set(into) <= set(state):
            insist_on_names(state, into)
        for name, thing in into.items():
            if has_state(thing):
                give(name, bare(thing), state[name])
    return Loaded(found.key.step, state, found.folder)


def load_found(
    repository: Repository, found: FoundCheckpoint, live: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state of a checkpoint that was verified; tensors of `live` that fit are read into.

    StorageError of the storage; CheckpointError where its files contradict each other.
    """
    with told_of(repository.storage.where):
        layout, stored, image = opened_files(repository.storage, found.folder)
        try:
            tensors, destinations = places_for(layout, live or {})
            fill(layout, image, destinations)
        finally:
            image.close()
    return state_of(stored, tensors)


class _NamedObjects:
    """What the caller gave, saved by this process alone."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        insist_on_mapping(given)
        self._given = given

    @property
    def fence(self) -> tuple[int, int]:
        """What the launcher says."""
        return fence_of_process()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """None: the call returns when all is written."""
        return []

    def buffers(self) -> list[torch.Tensor]:
        """None that another rank would have."""
        return []

    def members(self) -> Members:
        """This process."""
        return Alone()

    def state(self) -> dict[str, Any]:
        """Return the state of each, or what was given."""
        return {
            name: states_of(bare(thing))() if has_state(thing) else thing
            for name, thing in self._given.items()
        }
