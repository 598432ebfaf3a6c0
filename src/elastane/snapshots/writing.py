"""Writing one snapshot to storage, from the slots that hold it to the published checkpoint.

Owns the order of what must be durable before what, and the last gasp, which nobody asked for and
which other keepers may be about to make as well. Runs in a thread of its own, which a storage that
hangs may hold for ever. How it fails: `WriteFailure`, in words and with the slug of its page;
whatever was written of a save that failed is removed where that is still possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from elastane.errors import CheckpointError, ElastaneError, FencedError
from elastane.protocol.checkpoints import (
    About,
    CheckpointPart,
    FileRecord,
    folder_name,
    parse_folder,
    part_name,
)
from elastane.protocol.limits import KEEPER_CLAIM_POLL_S, KEEPER_CLAIM_S
from elastane.snapshots.contents import Given, packed_streams
from elastane.snapshots.messages import LAST_GASP, STREAMS_FILE, PersistRequest
from elastane.snapshots.rules.snapshots import Name
from elastane.snapshots.shared_memory import close_all, viewed

if TYPE_CHECKING:
    from elastane.storage.repository import Repository

_log = logging.getLogger("elastane.snapshots")
# The file by which one of several keepers takes the last gasp of a replicated state upon itself.
CLAIM = "claim"
_NONCE_CHARS = 8


class WriteFailure(Exception):
    """Why a snapshot did not become durable."""

    def __init__(self, reason: str, slug: str) -> None:
        super().__init__(reason)
        self.reason, self.slug = reason, slug


@dataclass(frozen=True)
class Source:
    """Bytes `first` to `end` of the image: the first ones of a slot, which this descriptor is."""

    first: int
    end: int
    slot: int


@dataclass(frozen=True)
class WriteOrder:
    """What is to be written. `stop` is asked now and then; true gives the writing up.

    `hurry` is asked while other writers are waited for; true ends the wait. Then this one writes
    the parts of `others` that have not come, of nodes that are lost: it has their copies. Not where
    it `is_past`: workers go on from it, and are to write what is newer.
    """

    name: Name
    persist: PersistRequest
    sources: tuple[Source, ...]
    files: Mapping[str, bytes]
    streams: bytes
    stop: Callable[[], bool]
    hurry: Callable[[], bool]
    is_past: Callable[[], bool]
    others: tuple[WriteOrder, ...] = ()

    @property
    def slots(self) -> list[int]:
        """All descriptors that it has, for whoever closes them."""
        return [source.slot for each in (self, *self.others) for source in each.sources]


class Written(NamedTuple):
    """How many bytes became durable, and of which parts; none where it was there before."""

    size_bytes: int
    parts: tuple[int, ...]


class Writer:
    """Writes snapshots, one at a time; it remembers each place, and knows it from another one."""

    def __init__(self) -> None:
        self._repositories: dict[str, Repository] = {}

    def write(self, order: WriteOrder) -> Written:
        """Write and publish what somebody asked for."""
        with _told():
            try:
                return self._publish(order, folder_name(*order.name), order.name.nonce)
            except FileNotFoundError:
                # A later round removes what earlier ones have not finished, while they write it.
                self._repository(order.persist.where).check_fence(order.name.key)
                raise

    def gasp(self, order: WriteOrder) -> Written:
        """Write and publish what is newest here, unless something as new is there.

        Where one keeper writes all, the keepers of all nodes may be about to: the first to claim
        it does, the others wait for it, and do it themselves where it does not come.
        """
        from elastane.storage import digest

        with _told():
            if self._is_there(order):
                return Written(0, ())
            # All keepers of a sharded state come to the same name.
            nonce = digest.digest_of([f"{order.name.nonce} {LAST_GASP}".encode()])[:_NONCE_CHARS]
            folder = folder_name(order.name.key, nonce)
            if order.persist.parts == 1 and not self._claimed(order, folder):
                if self._came(order):
                    return Written(0, ())
                nonce = os.urandom(_NONCE_CHARS // 2).hex()
                folder = folder_name(order.name.key, nonce)
            return self._publish(order, folder, nonce)

    def prune(self, persist: PersistRequest) -> None:
        """Remove what is older than what is to be kept; a fault here costs room alone."""
        if not persist.keep or persist.part:
            return
        try:
            self._repository(persist.where).prune(persist.keep)
        except (OSError, ElastaneError) as error:
            _log.warning("old checkpoints in %s stay: %s", persist.where, error)

    def _publish(self, order: WriteOrder, folder: str, nonce: str) -> Written:
        repository, persist = self._repository(order.persist.where), order.persist
        own = f"{folder}/{_record_of(persist)}"
        try:
            parts = [self._part(order, folder, nonce)]
        except BaseException:
            # Without our part's record nobody can publish this; one that stood in for us may.
            with contextlib.suppress(OSError):
                if _is_gone(repository, own):
                    repository.abandon(folder)
            raise
        repository.add_part(folder, parts[0])
        try:
            repository.publish_when_whole(
                folder,
                persist.parts,
                wait_s=persist.wait_s,
                stop=lambda: order.hurry() or _is_gone(repository, own),
            )
        except FencedError:
            if persist.parts == 1:  # Nobody else can publish it later, and it takes room.
                repository.abandon(folder)
            raise
        except CheckpointError:
            if not order.others or order.is_past() or _is_gone(repository, own):
                raise
            parts += self._stand_in(order, folder, nonce)
            # Others may be standing in for others still.
            repository.publish_when_whole(
                folder,
                persist.parts,
                wait_s=persist.wait_s,
                stop=lambda: order.stop() or order.is_past(),
            )
        size_bytes = sum(file.size_bytes for each in parts for file in each.files)
        return Written(size_bytes, tuple(each.part for each in parts))

    def _stand_in(self, order: WriteOrder, folder: str, nonce: str) -> Iterator[CheckpointPart]:
        """Write what has not come of the parts that this keeper has copies of."""
        repository = self._repository(order.persist.where)
        for other in order.others:
            if not _is_gone(repository, f"{folder}/{_record_of(other.persist)}"):
                continue
            try:
                part = self._part(other, folder, nonce)
                repository.add_part(folder, part)
            except (FileExistsError, CheckpointError) as error:
                _log.debug("its own writer has begun, late: %s", error)
            else:
                yield part

    def _part(self, order: WriteOrder, folder: str, nonce: str) -> CheckpointPart:
        """Write the files of a part; returns its record."""
        files, persist = [*self._written(order, folder)], order.persist
        about = About(
            job=persist.job,
            world=persist.world,
            created_s=time.time(),
            versions=persist.versions,
            reason=persist.reason,
        )
        key = order.name.key
        return CheckpointPart(persist.part, persist.parts, tuple(files), key, nonce, about)

    def _written(self, order: WriteOrder, folder: str) -> Iterator[FileRecord]:
        storage = self._repository(order.persist.where).storage
        with contextlib.ExitStack() as stack:
            views = [
                (source, stack.enter_context(viewed(source.slot, source.end - source.first)))
                for source in sorted(order.sources, key=lambda source: source.first)
            ]
            for name, first, end in order.persist.ranges:
                regions = [*_regions(views, first, end)]
                yield storage.write(f"{folder}/{name}", regions, order.stop)
        streams = STREAMS_FILE.format(order.persist.part)
        yield storage.write(f"{folder}/{streams}", [order.streams], order.stop)
        for name, content in sorted(order.files.items()) if order.persist.small else ():
            yield storage.write(f"{folder}/{name}", [content], order.stop)

    def _is_there(self, order: WriteOrder) -> bool:
        """Whether something as new as this is published."""
        from elastane.storage import publishing

        storage = self._repository(order.persist.where).storage
        for folder in storage.folders():
            parsed = parse_folder(folder)
            if parsed and parsed[0] >= order.name.key and publishing.is_published(storage, folder):
                return True
        return False

    def _claimed(self, order: WriteOrder, folder: str) -> bool:
        storage = self._repository(order.persist.where).storage
        return storage.create(f"{folder}/{CLAIM}", b"a last gasp\n")

    def _came(self, order: WriteOrder) -> bool:
        """Wait for another keeper's last gasp, a bounded time."""
        until_s = time.monotonic() + KEEPER_CLAIM_S
        while time.monotonic() < until_s and not order.stop():
            if self._is_there(order):
                return True
            time.sleep(KEEPER_CLAIM_POLL_S)
        return False

    def _repository(self, where: str) -> Repository:
        # Imported here: a keeper that only holds snapshots does without. From the package, as
        # `background` says.
        from elastane.storage import Repository, open_storage

        if where not in self._repositories:
            self._repositories[where] = Repository(open_storage(where))
        return self._repositories[where]


def _record_of(persist: PersistRequest) -> str:
    return part_name(persist.part, persist.parts)


def _is_gone(repository: Repository, record: str) -> bool:
    """Whether a part's record is not there; of our own, another writer has given the save up."""
    try:
        repository.storage.size(record)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def last_gasp(persist: PersistRequest, wait_s: float) -> PersistRequest:
    """Return the same wish, as nobody's but the keeper's, who waits for others this long."""
    wait_s = min(wait_s, persist.wait_s)
    return msgspec.structs.replace(persist, reason=LAST_GASP, wait_s=wait_s)


def with_copies(order: WriteOrder, copies: Sequence[Given]) -> WriteOrder:
    """Return a last gasp that stands in for lost nodes, of whose parts these are copies."""
    others = []
    for words, descriptors in copies:
        wish = words.gasp
        if wish is None or (wish.where, wish.parts) != (order.persist.where, order.persist.parts):
            close_all(descriptors)
            continue
        sources = zip(words.pieces, descriptors, strict=True)
        other = dataclasses.replace(
            order,
            persist=last_gasp(wish, order.persist.wait_s),
            sources=tuple(Source(piece.first, piece.end, slot) for piece, slot in sources),
            files={**words.layout_files, **words.files},
            streams=packed_streams(words.streams),
        )
        others.append(other)
    return dataclasses.replace(order, others=tuple(others))


def _regions(
    views: Sequence[tuple[Source, memoryview]], first: int, end: int
) -> Iterator[memoryview]:
    """Return the bytes of a range of the image, in order, from wherever they lie."""
    at = first
    for source, view in views:
        if source.first <= at < min(end, source.end):
            until = min(end, source.end)
            yield view[at - source.first : until - source.first]
            at = until
    if at < end:
        raise WriteFailure(
            f"bytes {at} to {end} of it are in no worker's slot", slug="checkpoint-write"
        )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn what the world does into a Failure."""
    try:
        yield
    except ElastaneError as error:
        raise WriteFailure(error.what, error.slug) from error
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise WriteFailure(f"{named}{error.strerror or error}", slug="checkpoint-write") from error
