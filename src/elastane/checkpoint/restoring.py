"""The way back: all ranks find the newest valid state, read it, and begin from it.

Owns the order of things: what is in memory comes before the same in storage, what cannot be read
is named and the next is tried, on all ranks alike. Nobody begins anew because something could not
be read: that is an error, also since what was read so far lies in the tensors that live already.
The rest of a state is loaded only when every rank has read the whole of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.choosing import (
    Choice,
    Inventory,
    Save,
    StatePart,
    choose,
    first_of_each_place,
)
from elastane.checkpoint.copy_on_write import Lender, Loan
from elastane.checkpoint.folder_identity import StoragePath
from elastane.checkpoint.gathering import gather
from elastane.checkpoint.inventory import Looking, without
from elastane.checkpoint.layout import Layout, Tensor, dtype_of
from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import (
    Arrived,
    Destination,
    Files,
    Image,
    Pieces,
    fill,
    give,
)
from elastane.checkpoint.registered import restore_streams
from elastane.checkpoint.sending import Sending
from elastane.checkpoint.state_source import Subject
from elastane.checkpoint.stored import (
    LAYOUT,
    STATE,
    StoredFiles,
    insist_on_ranges,
    layout_from,
    small_file,
    stored_from,
    streams_of,
    unreadable,
)
from elastane.comms.state import build
from elastane.errors import CheckpointError, StateError
from elastane.protocol.checkpoints import Key, era_beyond
from elastane.snapshots.client import HeldSnapshot, Keeper
from elastane.storage import Storage
from elastane.storage.repository import Repository

_log = logging.getLogger("elastane.checkpoint")
_STREAMS = "streams-"


class Restored(msgspec.Struct, frozen=True):
    """What was restored: `where` says from what; `skipped` are newer ones, each with its reason.

    `nonce` tells a save in memory from others of its step; "" where it was in storage. `missed`:
    there is a node that had nothing of it.
    """

    key: Key
    where: str
    skipped: tuple[str, ...] = ()
    nonce: str = ""
    missed: bool = False

    @property
    def step(self) -> int:
        """The step that it was saved under."""
        return self.key.step


class _Opened(msgspec.Struct, frozen=True):
    """One state, and how this rank reads it; `image` is None where it only hears it."""

    layout: Layout
    stored: StoredFiles
    image: Any
    streams: bytes


class Restorer:
    """One restore, by all ranks together."""

    def __init__(self, subject: Subject, keeper: Keeper, repository: Repository) -> None:
        self._subject, self._keeper, self._repository = subject, keeper, repository
        self._members: Members = subject.members()
        self._held: dict[Save, HeldSnapshot] = {}
        self._lent: tuple[Lender, HeldSnapshot] | None = None
        self.loan: Loan | None = None  # what was restored may lie in a snapshot for a while

    def newest(self, place: StoragePath, *, strict: bool) -> tuple[Restored | None, int]:
        """Restore the newest valid state, if any; returns with it the era that it begins.

        CheckpointError where there is something and nothing of it can be restored.
        """
        self._members.numbers([0])  # They meet: a rank that waits alone is told.
        self._subject.prepare()
        held = self._keeper.held()
        # One that was not digested yet is as whole; one that does not pass is not among them.
        self._held = {Save(h.key, h.words.nonce): h for h in held}
        looking = Looking(self._members, self._keeper.id, self._repository, place)
        try:
            whole = [save for save, each in self._held.items() if _is_whole(each)]
            parts = [_part(save, each) for save, each in self._held.items() if save not in whole]
            heard = looking.inventories(whole, parts)
            self._insist_on_storage(heard)
            restored = self._newest_of(looking, heard, strict=strict)
            if restored is None:
                self._subject.unprepare()
        finally:
            if self._lent is not None and self._lent[0].has_lent:
                # Also of what could not be loaded: some of it may have been.
                held.remove(self._lent[1])
                self.loan = Loan(self._keeper, *self._lent)
            for each in held:
                self._keeper.release(each)
        fences = [each.fence for each in heard if each.fence is not None]
        fences += [save.key.fence for each in heard for save in each.held]
        return restored, era_beyond(max(fences, default=None), *self._subject.fence)

    def _newest_of(
        self, looking: Looking, heard: list[Inventory], *, strict: bool
    ) -> Restored | None:
        failed, read = set[tuple[Save, bool]](), set[Save]()
        skipped = [why for each in heard for why in each.skipped]
        while (choice := choose(heard, failed)) is not None and not (strict and skipped):
            if not choice.memory and choice.save not in read:
                bad = self._bad(looking, choice, heard)
                heard = without(heard, choice.save, bad)
                skipped += [f"{choice.save.folder}: {why}" for why in bad.values()]
                read.add(choice.save)
                continue
            why = self._tried(choice, heard)
            if not why:
                where = "memory" if choice.memory else self._repository.storage.where
                self._tell(f"passed over: {'; '.join(skipped)}" if skipped else "")
                nonce = choice.save.nonce if choice.memory else ""
                missed = bool(choice.lacking)
                return Restored(choice.save.key, where, tuple(skipped), nonce, missed)
            skipped.append(f"{choice.save.folder}: {why}")
            failed.add((choice.save, choice.memory))
        if skipped:
            raise _nothing(self._repository.storage.where, skipped, strict=strict)
        return None

    def _bad(self, looking: Looking, choice: Choice, heard: Sequence[Inventory]) -> dict[int, str]:
        """Have a checkpoint read byte by byte where it is; returns why it is not valid, by rank."""
        speaks = choice.save in heard[self._members.rank].stored
        why = looking.verify(choice.save) if speaks else ""
        reasons = [said.decode() for said in self._members.texts(why.encode())]
        return {rank: reason for rank, reason in enumerate(reasons) if reason}

    def _insist_on_storage(self, heard: Sequence[Inventory]) -> None:
        """Storage that cannot be read is an error, but where memory has what the job was at."""
        faults = [each.fault for each in heard if each.fault]
        if not faults:
            return
        choice = choose(heard)
        if choice is None or not choice.memory:
            raise CheckpointError(
                f"checkpoints cannot be looked for: {faults[0]}",
                expected="storage that can be read: who cannot read must not begin anew",
                next_step="mend the storage, and start again",
                slug="checkpoint-storage",
            )
        self._tell(f"going on from memory: {faults[0]} [checkpoint-storage]")

    def _tell(self, text: str) -> None:
        if text and self._members.rank == 0:
            _log.warning("%s", text)

    def _tried(self, choice: Choice, heard: Sequence[Inventory]) -> str:
        """Restore a choice; returns why some rank could not."""
        opened, state, why = None, None, ""
        try:
            if choice.lacking and not choice.memory:
                folder = choice.save.folder
                Sending(self._members, self._repository.storage, folder).bring(
                    choice.givers[0], _writers(choice, heard)
                )
            opened = self._opened(choice)
            state = self._read(opened, choice)
        except (CheckpointError, OSError) as error:
            why = str(error)
        reasons = [said.decode() for said in self._members.texts(why.encode())]
        first = next((reason for reason in reasons if reason), "")
        if not first and opened is not None and state is not None:
            self._subject.load(state)
            if opened.streams:
                restore_streams(opened.streams)
        return first

    def _opened(self, choice: Choice) -> _Opened:
        if choice.memory:
            return self._opened_memory(choice)
        storage = self._repository.storage
        folder = choice.save.folder
        layout, stored, image = opened_files(storage, folder)
        names = sorted(name for name in storage.names(folder) if name.startswith(_STREAMS))
        streams = [small_file(storage, folder, name) for name in names]
        return _Opened(layout, stored, image, streams_of(streams, self._members.rank))

    def _opened_memory(self, choice: Choice) -> _Opened:
        """Open what the keeper holds; who lacks it hears from another rank what it is."""
        held = self._held.get(choice.save)
        small, image = [b"", b"", b""], None
        if held is not None:
            words = held.words
            packed = msgspec.msgpack.encode([*words.streams.values()])
            small = [words.layout_files[LAYOUT], words.files[STATE], packed]
            image = Pieces(held.pieces)
        if choice.lacking:
            said = self._members.texts(msgspec.msgpack.encode(small))[choice.givers[0]]
            small = small if held is not None else msgspec.msgpack.decode(said, type=list[bytes])
        streams = streams_of(small[2:], self._members.rank)
        return _Opened(layout_from(small[0]), stored_from(small[1]), image, streams)

    def _read(self, opened: _Opened, choice: Choice) -> dict[str, Any]:
        image: Image = opened.image
        # Of a sharded state a rank has a part; what it hears is in its own memory.
        lender, self._lent = None, None
        if isinstance(image, Pieces) and not choice.spans:
            lender = Lender(opened.layout, image)
            self._lent = lender, self._held[choice.save]
        tensors, destinations = places_for(opened.layout, self._subject.state(), lender)
        try:
            if choice.spans:
                gather(opened.layout, image, choice.spans, destinations, self._members)
            else:
                if choice.memory and choice.lacking:
                    image = self._hear(opened, choice)
                fill(opened.layout, image, destinations)
        finally:
            if isinstance(opened.image, Files):
                opened.image.close()
        return state_of(opened.stored, tensors)

    def _hear(self, opened: _Opened, choice: Choice) -> Image:
        """Take from a rank that has it what some lack; all ranks take part."""
        source, rank = choice.givers[0], self._members.rank
        arrived = Arrived(opened.layout.image_bytes) if rank in choice.lacking else None
        own = opened.image if rank == source else None
        for at, data in give(opened.layout.image_bytes, own, self._members, source):
            if arrived is not None:
                arrived.data[at : at + len(data)] = data
        return arrived if arrived is not None else opened.image


def opened_files(storage: Storage, folder: str) -> tuple[Layout, StoredFiles, Files]:
    """Open a checkpoint in storage, which is valid; the files are the caller's to close."""
    stored = stored_from(small_file(storage, folder, STATE))
    layout = layout_from(small_file(storage, folder, LAYOUT))
    insist_on_ranges(storage, folder, stored, layout)
    return layout, stored, Files(storage, folder, stored.ranges)


def state_of(stored: StoredFiles, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the state around its tensors; CheckpointError where there is none by names."""
    try:
        state = build(stored.tree, tensors)
    except StateError as error:
        raise unreadable(STATE, error.what) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise unreadable(STATE, "what it holds has no names")
    return state


def places_for(
    layout: Layout, live: Mapping[str, Any], lender: Lender | None = None
) -> tuple[list[Any], list[Destination]]:
    """Return a tensor for each of the layout's, and what is to be read into which.

    Tensors that live and fit are used as they are; others are lent, or there is new memory for
    them.
    """
    captured = Captured(live)
    originals = captured.originals
    by_name = {name: number for number, name in enumerate(captured.names)}
    offsets = {chunk.tensor: chunk.offsets for chunk in captured.chunks}
    tensors: list[Any] = []
    destinations: list[Destination] = []
    for number, spec in enumerate(layout.tensors):
        own = by_name.get(spec.name, -1)
        if own >= 0 and captured.specs[own] == spec and not _overlaps(captured.tensors[own]):
            local, whole = captured.tensors[own], originals[own]
            at = offsets.get(own, (0,) * local.dim())
        elif lender is not None and (lent := lender.tensor(number)) is not None:
            tensors.append(lent)
            continue
        else:
            local = whole = _new(spec)
            at = (0,) * local.dim()
        tensors.append(whole)
        destinations.append(Destination(number, at, local))
    return tensors, destinations


def _new(spec: Tensor) -> torch.Tensor:
    try:
        return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    except RuntimeError as error:
        raise CheckpointError(
            f"{spec.name}: no memory for {list(spec.shape)} values of {spec.dtype}: {error}",
            expected="memory for the whole state",
            next_step="restore it on a machine with more memory",
            slug="checkpoint-layout",
        ) from error


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements are one, as in what was expanded: nothing can be read into that."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_whole(held: HeldSnapshot) -> bool:
    size = sum(end - first for first, end, _fd in held.pieces)
    return held.words.replicated and size >= held.words.image_bytes


def _part(save: Save, held: HeldSnapshot) -> StatePart:
    spans = sorted((first, end) for first, end, _fd in held.pieces)
    return StatePart(save, held.words.image_bytes, tuple(spans))


def _writers(choice: Choice, heard: Sequence[Inventory]) -> Collection[int]:
    """Return the ranks that write what their place lacks."""
    firsts = first_of_each_place([each.place for each in heard])
    return [rank for rank in firsts if rank in choice.lacking]


def _nothing(where: str, skipped: Sequence[str], *, strict: bool) -> CheckpointError:
    if strict:
        return CheckpointError(
            skipped[0],
            where=where,
            expected="no damaged checkpoint, as strict=True has it",
            next_step="elastane checkpoint verify, and move it away; or restore without strict",
            slug="checkpoint-invalid",
        )
    return CheckpointError(
        f"nothing can be restored: {'; '.join(skipped[:3])}",
        where=where,
        expected="a checkpoint that is valid, and storage that can be read",
        next_step="elastane checkpoint verify; to begin anew, name another folder",
        slug="checkpoint-none-valid",
    )
