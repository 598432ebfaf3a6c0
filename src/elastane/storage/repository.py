"""The checkpoints of one place: which exist, which are valid, which may be removed.

Owns the order of checks: the record, then the existence and size of its files, then on request
every byte by its digest, with several threads. An invalid checkpoint is named with its reason and
skipped; a damaged file with its name and the byte range. A fault of the place never counts as a
fault of a checkpoint, because a job that cannot read must not start from zero. How it fails:
OSError of the storage; CheckpointError if none of the published checkpoints can be restored, or the
newest cannot and the caller is strict.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import (
    CHUNK_BYTES,
    MANIFEST,
    CheckpointPart,
    FileRecord,
    Key,
    Manifest,
    chunks_of,
    parse_folder,
)
from elastane.storage import publishing, retention
from elastane.storage.aligned import ALIGNED_BYTES, pages
from elastane.storage.digest import digest_of
from elastane.storage.places import file_fault
from elastane.storage.protocol import Progress, Stop, Storage, never
from elastane.storage.publishing import NewerFormatError, RecordError, read_record
from elastane.storage.retention import LITTER_S, Removal, SeenCheckpoint

_log = logging.getLogger(__name__)
_NAMED_MAX = 8
assert publishing.POLL_S < publishing.POLL_MAX_S < LITTER_S
# Attempts to list a place in which others remove checkpoints meanwhile.
_LOOKS_MAX = 100


def wrong_size(storage: Storage, folder: str, files: Sequence[FileRecord]) -> str:
    """Describe a file that is missing or has the wrong size; "" if there is none."""
    sizes = storage.sizes(folder, [file.name for file in files])
    for file in files:
        if file.name not in sizes:
            return f"{file.name} is missing, or not a plain file"
        if sizes[file.name] != file.size_bytes:
            return f"{file.name} has {sizes[file.name]} bytes, not {file.size_bytes}"
    return ""


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A published checkpoint. `reason` says why it is invalid, as far as it was checked."""

    folder: str
    key: Key
    nonce: str
    manifest: Manifest | None = None
    reason: str = ""
    newer: bool = False  # Its format is later, so this elastane cannot judge it.


class RestorePoint(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, and the newer ones that were skipped, with reasons."""

    found: FoundCheckpoint | None
    skipped: tuple[FoundCheckpoint, ...] = ()


class Repository:
    """All checkpoints of one place. The constructor reads and creates nothing."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._verified: set[str] = set()

    def add_part(self, folder: str, part: CheckpointPart) -> None:
        """Record that all files of one writer are durable."""
        publishing.add_part(self.storage, folder, part)

    def publish_when_whole(
        self, folder: str, parts: int, *, wait_s: float, stop: Stop = never
    ) -> Manifest:
        """Return the manifest of a save once it is durable; any writer may create it.

        Raises FencedError if a later round has published, and CheckpointError if parts are missing
        after `wait_s`. Earlier checkpoints are unchanged.
        """
        return publishing.Publication(self.storage, folder, parts).wait(wait_s, stop)

    def check_fence(self, key: Key) -> None:
        """Raise FencedError if a later round than this key's has published.

        A caller checks before a useless write, and after a failed one: a later round removes the
        files of unfinished saves of earlier rounds, also during their write.
        """
        publishing.check_fence(self.storage, key)

    def abandon(self, folder: str) -> None:
        """Remove the files of a failed save. The caller's part must not have been added."""
        with contextlib.suppress(FileNotFoundError):
            if not publishing.is_published(self.storage, folder):
                self.storage.remove(folder)

    def newest_key(self) -> Key | None:
        """Return the greatest published key, valid or not."""
        return publishing.newest_key(self.storage)

    def published(self) -> list[FoundCheckpoint]:
        """Return all checkpoints, newest first, checked by records and file sizes.

        Raises OSError (EAGAIN) if the place changes during each of several readings.
        """
        for _ in range(_LOOKS_MAX):
            names = set(self.storage.folders())
            # Oldest first: a checkpoint removed meanwhile was replaced by a newer one, which is
            # checked later or not listed yet. A place whose only checkpoint was just replaced must
            # not look empty.
            looked = [self._found(name) for name in reversed(_newest_first(names))]
            found = [one for one in reversed(looked) if one is not None]
            if len(found) == len(names) or set(self.storage.folders()) == names:
                return found
        raise self._unstable()

    def unfinished(self) -> list[str]:
        """Return the folders of saves without a manifest: running, or never finished."""
        names = _newest_first(self.storage.folders())
        return [name for name in names if not publishing.is_published(self.storage, name)]

    def verify(
        self,
        found: FoundCheckpoint,
        progress: Progress | None = None,
        *,
        stop: Stop = never,
        fresh: bool = False,
    ) -> str:
        """Read every byte of a checkpoint; return why it is invalid, or "".

        `fresh` reads from a folder's disk instead of the host's cache.
        """
        if found.reason or found.manifest is None:
            return found.reason
        files = found.manifest.files
        try:
            reason = wrong_size(self.storage, found.folder, files)
        except OSError as error:
            reason = file_fault(found.folder, error)
        reason = reason or Inspection(self.storage, found.folder, files, fresh=fresh).run(
            progress, stop
        )
        if not reason:
            self._verified.add(found.folder)
        return reason

    def newest_valid(self, *, strict: bool = False) -> RestorePoint:
        """Return the newest valid checkpoint, and why newer ones are invalid.

        Raises CheckpointError if checkpoints were published and none is valid: starting
        from zero would be a silent loss. With `strict` it raises if the newest is invalid.
        """
        for _ in range(_LOOKS_MAX):
            choice, gone = self._look(self.published(), strict)
            if not gone:
                break
        else:
            raise self._unstable()
        if choice.found is None and choice.skipped:
            raise invalid(self.storage.where, choice.skipped, strict=strict)
        return choice

    def prune(
        self,
        keep: int,
        *,
        protect: Collection[str] = (),
        litter_s: float = LITTER_S,
        read: bool = True,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Remove all but the newest `keep` valid checkpoints, and abandoned saves; return which.

        Before a published one is removed, one that stays is read byte by byte, once in the life of
        this object. Without `read`, its record and file sizes are enough: for a store that vouches
        for its bytes, where reading costs. A failed removal is logged and tried the next time.
        """
        seen = self._seen(trusted=not read)
        while retention.surplus(seen, keep, protect) and (doubtful := self._doubtful(seen, keep)):
            seen = self._checked(seen, doubtful)
        going = retention.to_remove(seen, keep, protect, litter_s=litter_s)
        if dry_run:
            return going
        if going:
            # A writer that was killed may have published one without its last fsync.
            for one in retention.kept(seen, keep):
                self.storage.make_durable(one.folder)
        return [one for one in going if self._remove(one)]

    def _look(self, published: list[FoundCheckpoint], strict: bool) -> tuple[RestorePoint, bool]:
        """Return the choice, and whether a candidate was removed meanwhile."""
        skipped: list[FoundCheckpoint] = []
        for found in published:
            reason = self.verify(found)
            if not reason:
                return RestorePoint(found, tuple(skipped)), False
            if not publishing.is_published(self.storage, found.folder):
                return RestorePoint(None), True
            skipped.append(msgspec.structs.replace(found, reason=reason))
            if strict:
                break
        return RestorePoint(None, tuple(skipped)), False

    def _found(self, folder: str) -> FoundCheckpoint | None:
        """Return a folder's checkpoint, or None if it is not published (any more)."""
        parsed = parse_folder(folder)
        assert parsed is not None, folder
        found = FoundCheckpoint(folder, *parsed)
        try:
            manifest = read_record(self.storage, folder, MANIFEST, Manifest)
            reason = wrong_size(self.storage, folder, manifest.files)
        except FileNotFoundError:
            return None
        except RecordError as error:
            newer = isinstance(error, NewerFormatError)
            return msgspec.structs.replace(found, reason=f"{MANIFEST}: {error}", newer=newer)
        except OSError as error:
            return msgspec.structs.replace(found, reason=file_fault(MANIFEST, error))
        return msgspec.structs.replace(found, manifest=manifest, reason=reason)

    def _seen(self, *, trusted: bool) -> list[SeenCheckpoint]:
        published = {found.folder: found for found in self.published()}
        seen = []
        pending = [name for name in self.storage.folders() if name not in published]
        now_s = self.storage.now_s() if pending else 0.0
        for found in published.values():
            state: retention.State = (
                "newer" if found.newer else "unsound" if found.reason else "sound"
            )
            verified = trusted or found.folder in self._verified
            seen.append(SeenCheckpoint(found.folder, state, verified and state == "sound"))
        for name in pending:
            with contextlib.suppress(FileNotFoundError):
                silent_s = now_s - self.storage.changed_s(name)
                if not publishing.is_published(self.storage, name):
                    seen.append(SeenCheckpoint(name, "pending", silent_s=silent_s))
        return seen

    def _doubtful(self, seen: list[SeenCheckpoint], keep: int) -> SeenCheckpoint | None:
        """Return the newest one that stays, if none that stays has been read yet."""
        staying = retention.kept(seen, keep)
        return None if any(one.verified for one in staying) else staying[0]

    def _checked(
        self, seen: list[SeenCheckpoint], doubtful: SeenCheckpoint
    ) -> list[SeenCheckpoint]:
        found = self._found(doubtful.folder)
        sound = found is not None and not self.verify(found, fresh=True)
        judged = msgspec.structs.replace(
            doubtful, verified=sound, state="sound" if sound else "unsound"
        )
        return [judged if one is doubtful else one for one in seen]

    def _unstable(self) -> OSError:
        return OSError(errno.EAGAIN, f"changed during {_LOOKS_MAX} looks", self.storage.where)

    def _remove(self, removal: Removal) -> bool:
        try:
            self.storage.remove(removal.folder)
        except OSError as error:
            _log.warning("checkpoint %s could not be removed: %s", removal.folder, error)
            return False
        _log.info("checkpoint %s removed: %s", removal.folder, removal.why)
        return True


def invalid(
    where: str, skipped: Sequence[FoundCheckpoint], *, strict: bool = False
) -> CheckpointError:
    """Return the error for checkpoints of which none can be restored."""
    if strict:
        what = f"checkpoint {skipped[0].folder} is not valid: {skipped[0].reason}"
        next_step = "elastane checkpoint verify, or allow an older one to be restored"
    else:
        named = "; ".join(f"{one.folder}: {one.reason}" for one in skipped[:_NAMED_MAX])
        what = f"none of {len(skipped)} checkpoints is valid: {named}"
        next_step = "restore a backup; to start over, name another folder or move these away"
    return CheckpointError(
        what,
        slug="checkpoint-invalid" if strict else "checkpoint-none-valid",
        where=where,
        expected="a checkpoint whose files are unchanged since their save",
        next_step=next_step,
    )


def _newest_first(folders: Iterable[str]) -> list[str]:
    parsed = {name: key for name in folders if (key := parse_folder(name)) is not None}
    return sorted(parsed, key=lambda name: parsed[name], reverse=True)


class Inspection:
    """One verification of all files of a checkpoint. Call `run` once."""

    def __init__(
        self, storage: Storage, folder: str, files: Sequence[FileRecord], *, fresh: bool = False
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._files = files
        self._fresh = fresh
        self._work = self._chunks()
        self._turn = threading.Lock()
        self._faults: dict[tuple[int, int], str] = {}
        self._failure: BaseException | None = None
        self._done = 0
        self._all = sum(file.size_bytes for file in files)

    def run(self, progress: Progress | None = None, stop: Stop = never) -> str:
        """Return the first fault, or "" if every byte is as it was written."""
        # Local files are read at the speed of memory: an extra thread pays for each chunk of them.
        each = 1 if self._storage.remote else CHUNK_BYTES
        threads = min(self._storage.readers, 1 + self._all // each)
        arguments = (progress or _ignore, stop)
        helpers = [
            threading.Thread(target=self._read, args=arguments, daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._read(*arguments)
        for helper in helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        return self._faults[min(self._faults)] if self._faults else ""

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for index, file in enumerate(self._files):
            for chunk in range(chunks_of(file.size_bytes)):
                yield index, chunk

    def _read(self, progress: Progress, stop: Stop) -> None:
        buffer = pages(CHUNK_BYTES)
        try:
            while (place := self._next(stop)) is not None:
                fault, size = self._verify(*place, buffer)
                with self._turn:
                    self._done += size
                    if fault:
                        self._faults[place] = fault
                    progress(self._done, self._all)
        except BaseException as error:  # Raised again in the caller's thread.
            self._failure = self._failure or error

    def _next(self, stop: Stop) -> tuple[int, int] | None:
        with self._turn:
            if self._failure is not None or self._faults:
                return None
            if stop():
                raise OSError(errno.ECANCELED, "stopped", self._storage.where)
            return next(self._work, None)

    def _verify(self, index: int, chunk: int, buffer: mmap.mmap) -> tuple[str, int]:
        file = self._files[index]
        first = chunk * CHUNK_BYTES
        size = min(CHUNK_BYTES, file.size_bytes - first)
        try:
            found = self._bytes(f"{self._folder}/{file.name}", first, size, buffer)
        except OSError as error:
            return file_fault(file.name, error), size
        if len(found) < size:
            return f"{file.name} ends at byte {first + len(found)} of {file.size_bytes}", size
        if digest_of([found]) != file.digests[chunk]:
            return (
                f"{file.name}: bytes {first} to {first + size - 1} differ from what was saved",
                size,
            )
        return "", size

    def _bytes(self, path: str, first: int, size: int, buffer: mmap.mmap) -> bytes | memoryview:
        descriptor = self._storage.open_local(path)
        if descriptor is None:
            return self._storage.read(path, first, size)
        try:
            if self._fresh:
                _bypass_cache(descriptor)
            return memoryview(buffer)[: _fill(descriptor, first, size, buffer)]
        finally:
            os.close(descriptor)


def _bypass_cache(descriptor: int) -> None:
    """Make a descriptor read from the disk, because the page cache does not prove what is there.

    It costs a tenth more processor time, and leaves the cache to the training's data.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # EINVAL: the file system has no O_DIRECT.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(descriptor: int, first: int, size: int, buffer: mmap.mmap) -> int:
    """Read into a buffer; return how many of `size` bytes exist."""
    done = 0
    # O_DIRECT reads whole blocks; a read at the end of a file is shorter.
    end = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
    while done < size:
        try:
            got = os.preadv(descriptor, [memoryview(buffer)[done:end]], first + done)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # This disk has larger blocks, or a read ended inside one.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if got == 0:
            break
        done += got
    return min(done, size)


def _ignore(done: int, all_bytes: int) -> None:
    """Report no progress."""
