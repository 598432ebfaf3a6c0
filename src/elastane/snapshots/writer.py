"""Writes snapshots to storage: one at a time for each store, in threads of low priority.

`CheckpointWriter` owns the order in which things become durable, and the final flush: a write
without a request, which the servers of other nodes may attempt too (docs/decisions/final-flush.md).
`SnapshotWriter` owns the threads and the record of failures. Storage that hangs may block a thread
forever. How it fails: `WriteFailure`, with a reason and a slug, which is kept for workers that ask
and logged once for each reason. Files of a failed save are removed if that is still possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from elastane.errors import CheckpointError, ElastaneError, FencedError
from elastane.protocol.checkpoints import (
    About,
    CheckpointPart,
    FileRecord,
    Key,
    folder_name,
    parse_folder,
    part_name,
)
from elastane.snapshots.contents import OpenSnapshot, packed_streams
from elastane.snapshots.digests import digests_of, lower_priority
from elastane.snapshots.limits import CLAIM_POLL_S, CLAIM_S, FAILURES_MAX, HURRY_S
from elastane.snapshots.messages import (
    FINAL_FLUSH,
    STREAMS_FILE,
    PersistFailed,
    PersistRequest,
    Saved,
    SaveFailed,
    SnapshotEvent,
)
from elastane.snapshots.rules.slot_table import Name
from elastane.snapshots.shared_memory import Source, close_all, viewed

if TYPE_CHECKING:
    from elastane.storage.repository import Repository

_log = logging.getLogger("elastane.snapshots")
# The file by which one of several servers claims the final flush of a replicated state.
CLAIM = "claim"
_NONCE_CHARS = 8


# The slug of a save that lacks a part.
INCOMPLETE = "checkpoint-incomplete"


class WriteFailure(Exception):
    """A snapshot did not become durable, for this reason.

    `newer`: a later round has published this checkpoint.
    """

    def __init__(self, reason: str, slug: str, newer: Key | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.slug = slug
        self.newer = newer


@dataclass(frozen=True)
class WriteOrder:
    """A snapshot to write, with callbacks that are polled meanwhile.

    `stop()` cancels the write. `hurry()` ends the wait for other writers. Then this server writes
    the missing parts of `others` from its replicas of lost nodes. It does not if `is_past()`:
    workers continue from this snapshot, and will write a newer one. Its save began at `began_s` of
    this host's monotonic clock.
    """

    name: Name
    began_s: float
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
        """Return all its descriptors, for the caller to close."""
        return [source.slot for each in (self, *self.others) for source in each.sources]


class Written(NamedTuple):
    """The number of bytes that became durable, and their parts; none if it existed before."""

    size_bytes: int
    parts: tuple[int, ...]


class CheckpointWriter:
    """Writes snapshots, one at a time, and remembers the repository of each place."""

    def __init__(self) -> None:
        self._repositories: dict[str, Repository] = {}

    def write(self, order: WriteOrder) -> Written:
        """Write and publish a requested snapshot."""
        with _failures():
            try:
                return self._publish(order, folder_name(*order.name), order.name.nonce)
            except FileNotFoundError:
                # A later round removes unfinished checkpoints of earlier ones, also this one.
                self._repository(order.persist.where).check_fence(order.name.key)
                raise

    def flush(self, order: WriteOrder) -> Written:
        """Perform a final flush: write and publish, unless one at least as new is published.

        If one server writes the whole state, the servers of all nodes may try at once. The first
        one to create the claim file writes, the others wait, and write if it does not finish.
        """
        from elastane.storage import digest

        with _failures():
            if self._has_newer(order):
                return Written(0, ())
            # All servers of a sharded state derive the same nonce.
            nonce = digest.digest_of([f"{order.name.nonce} {FINAL_FLUSH}".encode()])[:_NONCE_CHARS]
            folder = folder_name(order.name.key, nonce)
            if order.persist.parts == 1 and not self._claim(order, folder):
                if self._wait_for_other(order):
                    return Written(0, ())
                nonce = os.urandom(_NONCE_CHARS // 2).hex()
                folder = folder_name(order.name.key, nonce)
            return self._publish(order, folder, nonce)

    def prune(self, persist: PersistRequest) -> None:
        """Remove checkpoints beyond those to keep; a fault here only costs space."""
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
            # Without this part's record no server can publish; another one may have written it.
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
            if persist.parts == 1:  # It cannot be published later, and takes space.
                repository.abandon(folder)
            raise
        except CheckpointError:
            if not order.others or order.is_past() or _is_gone(repository, own):
                raise
            parts += self._write_for_lost(order, folder, nonce)
            # Other servers may still be writing for lost nodes.
            repository.publish_when_whole(
                folder,
                persist.parts,
                wait_s=persist.wait_s,
                stop=lambda: order.stop() or order.is_past(),
            )
        size_bytes = sum(file.size_bytes for each in parts for file in each.files)
        return Written(size_bytes, tuple(each.part for each in parts))

    def _write_for_lost(
        self, order: WriteOrder, folder: str, nonce: str
    ) -> Iterator[CheckpointPart]:
        """Write the missing parts of which this server has replicas."""
        repository = self._repository(order.persist.where)
        for other in order.others:
            if not _is_gone(repository, f"{folder}/{_record_of(other.persist)}"):
                continue
            try:
                part = self._part(other, folder, nonce)
                repository.add_part(folder, part)
            except (FileExistsError, CheckpointError) as error:
                _log.debug("a part's own writer has begun, late: %s", error)
            else:
                yield part

    def _part(self, order: WriteOrder, folder: str, nonce: str) -> CheckpointPart:
        """Write the files of one part; returns its record."""
        files, persist = [*self._write_files(order, folder)], order.persist
        about = About(
            job=persist.job,
            world=persist.world,
            created_s=time.time(),
            versions=persist.versions,
            reason=persist.reason,
        )
        key = order.name.key
        return CheckpointPart(persist.part, persist.parts, tuple(files), key, nonce, about)

    def _write_files(self, order: WriteOrder, folder: str) -> Iterator[FileRecord]:
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

    def _has_newer(self, order: WriteOrder) -> bool:
        """Whether a checkpoint at least as new is published."""
        from elastane.storage import publishing

        storage = self._repository(order.persist.where).storage
        for folder in storage.folders():
            parsed = parse_folder(folder)
            if parsed and parsed[0] >= order.name.key and publishing.is_published(storage, folder):
                return True
        return False

    def _claim(self, order: WriteOrder, folder: str) -> bool:
        storage = self._repository(order.persist.where).storage
        return storage.create(f"{folder}/{CLAIM}", b"a final flush\n")

    def _wait_for_other(self, order: WriteOrder) -> bool:
        """Wait, for a bounded time, for another server's final flush."""
        until_s = time.monotonic() + CLAIM_S
        while time.monotonic() < until_s and not order.stop():
            if self._has_newer(order):
                return True
            time.sleep(CLAIM_POLL_S)
        return False

    def _repository(self, where: str) -> Repository:
        # Imported late: a server that only holds snapshots does not need it. From the package, for
        # the reason given in `digests`.
        from elastane.storage import Repository, open_storage

        if where not in self._repositories:
            self._repositories[where] = Repository(open_storage(where))
        return self._repositories[where]


def _record_of(persist: PersistRequest) -> str:
    return part_name(persist.part, persist.parts)


def _is_gone(repository: Repository, record: str) -> bool:
    """Whether a part's record is missing; for our own, another writer abandoned the save."""
    try:
        repository.storage.size(record)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def final_flush(persist: PersistRequest, wait_s: float) -> PersistRequest:
    """Return this request as one of the server itself, which waits `wait_s` for other writers."""
    wait_s = min(wait_s, persist.wait_s)
    return msgspec.structs.replace(persist, reason=FINAL_FLUSH, wait_s=wait_s)


def with_copies(order: WriteOrder, copies: Sequence[OpenSnapshot]) -> WriteOrder:
    """Return a final flush that also writes the parts of lost nodes, from these replicas."""
    others = []
    for words, descriptors in copies:
        request = words.final_flush
        place = order.persist.where, order.persist.parts
        if request is None or (request.where, request.parts) != place:
            close_all(descriptors)
            continue
        sources = zip(words.pieces, descriptors, strict=True)
        other = dataclasses.replace(
            order,
            persist=final_flush(request, order.persist.wait_s),
            sources=tuple(Source(piece.first, piece.end, slot) for piece, slot in sources),
            files={**words.layout_files, **words.files},
            streams=packed_streams(words.streams),
        )
        others.append(other)
    return dataclasses.replace(order, others=tuple(others))


def _regions(
    views: Sequence[tuple[Source, memoryview]], first: int, end: int
) -> Iterator[memoryview]:
    """Yield the bytes of a range of the serialized layout, in order, from the slots."""
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
def _failures() -> Iterator[None]:
    """Turn errors of storage into WriteFailure."""
    try:
        yield
    except FencedError as error:
        raise WriteFailure(error.what, error.slug, Key(*error.newer)) from error
    except ElastaneError as error:
        raise WriteFailure(error.what, error.slug) from error
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise WriteFailure(f"{named}{error.strerror or error}", slug="checkpoint-write") from error


@dataclass(frozen=True)
class WriterCallbacks:
    """Callbacks from the writing thread: a snapshot is durable, a write has ended.

    `ended` gets the failure, if there was one. `superseded` gets the checkpoint that a later round
    has published, before the failure is recorded. `news` is for the agent's event log.
    """

    durable: Callable[[WriteOrder], None]
    superseded: Callable[[WriteOrder, Key], None]
    ended: Callable[[WriteOrder, WriteFailure | None], None]
    news: Callable[[SnapshotEvent], None]


class SnapshotWriter:
    """Writes the snapshots of one store."""

    def __init__(self, heard: WriterCallbacks) -> None:
        self.last = (0.0, 0)  # Seconds and bytes of the last durable write.
        self.stopping = threading.Event()
        self._heard = heard
        self._writer = CheckpointWriter()
        self._lock = threading.Lock()
        self._failures: deque[SaveFailed] = deque(maxlen=FAILURES_MAX)
        self._logged = ""

    @property
    def failures(self) -> tuple[SaveFailed, ...]:
        """Return the last failures, newest last."""
        with self._lock:
            return tuple(self._failures)

    def begin(self, order: WriteOrder, *, final: bool, known: tuple[str, ...] | None) -> None:
        """Write in a new thread; `known` is the digest. Raises RuntimeError without a free thread.

        Descriptors of `order` are closed when the write has ended.
        """
        work = threading.Thread(
            target=self._write, args=(order, final, known), name="snapshot-write", daemon=True
        )
        work.start()

    def record(self, key: Key, failure: WriteFailure) -> None:
        """Record a failure for the workers that wait for this save."""
        with self._lock:
            self._failures.append(SaveFailed(key, failure.reason, failure.slug))

    def fail(self, key: Key, failure: WriteFailure, where: str = "") -> None:
        """Record a failure, and log it if its reason differs from the last one."""
        self.record(key, failure)
        with self._lock:
            is_new, self._logged = failure.reason != self._logged, failure.reason
        if is_new:  # A full disk fails every save.
            line = "the snapshot of step %d is not written to storage: %s [%s]"
            _log.error(line, key.step, failure.reason, failure.slug)
            self._heard.news(PersistFailed(key, where, failure.reason[:4096], failure.slug))

    def _write(self, order: WriteOrder, final: bool, known: tuple[str, ...] | None) -> None:
        lower_priority()
        began_s = time.monotonic()
        failure = None
        try:
            if final and known is not None and digests_of(order.sources, lambda: True) != known:
                raise WriteFailure(
                    "it changed in memory after it was kept", slug="snapshot-changed"
                )
            written = self._writer.flush(order) if final else self._writer.write(order)
            self.last = (time.monotonic() - began_s, written.size_bytes)
            self._heard.durable(order)
            self._logged = ""
            self._report_saved(order, written)
            self._writer.prune(order.persist)
        except WriteFailure as error:
            failure = error
        except Exception as error:
            _log.exception("a snapshot was not written, because of a bug in the snapshot server")
            failure = WriteFailure(
                f"a bug in the snapshot server: {error!r}", slug="checkpoint-write"
            )
        finally:
            close_all(order.slots)
        if failure is not None:
            if failure.newer is not None:
                self._heard.superseded(order, failure.newer)
            self.fail(order.name.key, failure, order.persist.where)
        self._heard.ended(order, failure)

    def _report_saved(self, order: WriteOrder, written: Written) -> None:
        """Report a checkpoint once: only the writer of its first part does."""
        if 0 in written.parts:
            (seconds, size_bytes), persist = self.last, order.persist
            saved = Saved(
                key=order.name.key,
                place=persist.where,
                reason=persist.reason,
                size_bytes=size_bytes,
                seconds=seconds,
                began_s=order.began_s,
            )
            self._heard.news(saved)


def lacks_other_parts(failure: WriteFailure | None) -> bool:
    """Whether a write failed only because other nodes' parts are missing."""
    return failure is not None and failure.slug == INCOMPLETE


class PeerWait:
    """Bounds the wait for the other writers of a save once there is a reason to hurry."""

    def __init__(self, stopping: threading.Event, has_reason: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._has_reason = has_reason
        self._until_s = float("inf")

    def ended(self) -> bool:
        """Whether the wait is over; polled while the writer waits."""
        if not self._has_reason():
            self._until_s = float("inf")
        else:
            self._until_s = min(self._until_s, time.monotonic() + HURRY_S)
        return self._stopping.is_set() or time.monotonic() >= self._until_s
