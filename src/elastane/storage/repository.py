"""The checkpoints of one place: which there are, which of them can be believed, which may go.

Owns the order of looking: what a record says, whether its files are there with their sizes, and
then, where asked, every byte by its digest. What is not sound is named with its reason and passed
over. A fault of the place itself is never taken for a fault of a checkpoint: who cannot read must
not begin anew. How it fails: OSError of the storage; CheckpointError where checkpoints were
published and none can be restored, or the newest cannot and the caller is strict.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Iterable, Sequence

import msgspec

from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import MANIFEST, CheckpointPart, Key, Manifest, parse_folder
from elastane.protocol.limits import CHECKPOINT_LITTER_S
from elastane.storage import publishing, retention
from elastane.storage.protocol import Progress, Stop, Storage, never
from elastane.storage.reading import Inspection, told, wrong_size
from elastane.storage.records import NewerFormatError, RecordError, read_record
from elastane.storage.retention import Removal, SeenCheckpoint

_log = logging.getLogger(__name__)
_NAMED_MAX = 8
# Looks at a place whose checkpoints are removed by others while they are looked at.
_LOOKS_MAX = 100


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A published checkpoint. `reason` says why it is not valid, as far as was looked."""

    folder: str
    key: Key
    nonce: str
    manifest: Manifest | None = None
    reason: str = ""
    newer: bool = False  # of a later format: not for this elastane to judge


class RestorePoint(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, and the newer ones that were passed over, with reasons."""

    found: FoundCheckpoint | None
    skipped: tuple[FoundCheckpoint, ...] = ()


class Repository:
    """All checkpoints of one place. Nothing is read or made before the first operation."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._verified: set[str] = set()

    def add_part(self, folder: str, part: CheckpointPart) -> None:
        """Vouch for one writer's files, all of which must be durable."""
        publishing.add_part(self.storage, folder, part)

    def publish_when_whole(
        self, folder: str, parts: int, *, wait_s: float, stop: Stop = never
    ) -> Manifest:
        """Return the manifest of a save once it is durable; made by whoever sees all its parts.

        Raises FencedError where a later round has published, and CheckpointError where parts do
        not come within `wait_s`; the checkpoints before this one stay as they are.
        """
        return publishing.Publication(self.storage, folder, parts).wait(wait_s, stop)

    def check_fence(self, key: Key) -> None:
        """Raise FencedError where a later round than this key's has published.

        For who is about to write in vain, and for who could not: the later round removes what
        unfinished saves of earlier ones have written, while they write.
        """
        publishing.check_fence(self.storage, key)

    def abandon(self, folder: str) -> None:
        """Remove what there is of a save that has failed. The caller's part was not added."""
        with contextlib.suppress(FileNotFoundError):
            if not publishing.is_published(self.storage, folder):
                self.storage.remove(folder)

    def newest_key(self) -> Key | None:
        """Return the greatest key of what is published, sound or not."""
        return publishing.newest_key(self.storage)

    def published(self) -> list[FoundCheckpoint]:
        """Return all checkpoints, newest first, judged by their records and their files' sizes."""
        for _ in range(_LOOKS_MAX):
            names = set(self.storage.folders())
            # The oldest first: what goes meanwhile goes because a newer one was published, which
            # is looked at later, or is not listed yet. Nobody must take a place whose only
            # checkpoint was replaced just now for one that is empty.
            looked = [self._found(name) for name in reversed(_newest_first(names))]
            found = [one for one in reversed(looked) if one is not None]
            if len(found) == len(names) or set(self.storage.folders()) == names:
                return found
        raise self._restless()

    def unfinished(self) -> list[str]:
        """Return the folders of saves that have no manifest: they go on, or did not end."""
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
        """Read every byte of a checkpoint; return why it is not valid, "" where it is.

        `fresh` reads what a folder's disk holds, in place of what the host has cached of it.
        """
        if found.reason or found.manifest is None:
            return found.reason
        files = found.manifest.files
        try:
            reason = wrong_size(self.storage, found.folder, files)
        except OSError as error:
            reason = told(found.folder, error)
        reason = reason or Inspection(self.storage, found.folder, files, fresh=fresh).run(
            progress, stop
        )
        if not reason:
            self._verified.add(found.folder)
        return reason

    def newest_valid(
        self,
        *,
        strict: bool = False,
        full: bool = True,
        progress: Progress | None = None,
        stop: Stop = never,
    ) -> RestorePoint:
        """Return the newest checkpoint that is valid, and why those newer than it are not.

        Without `full`, "valid" is by records and sizes, and whoever reads the files compares their
        digests. Raises CheckpointError where some were published and none is valid, for beginning
        anew would be a loss that nobody asked for; if `strict`, where the newest is not.
        """
        for _ in range(_LOOKS_MAX):
            choice, gone = self._look(self.published(), strict, full, (progress, stop))
            if not gone:
                break
        else:
            raise self._restless()
        if choice.found is None and choice.skipped:
            raise invalid(self.storage.where, choice.skipped, strict=strict)
        return choice

    def prune(
        self,
        keep: int,
        *,
        protect: Collection[str] = (),
        litter_s: float = CHECKPOINT_LITTER_S,
        read: bool = True,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Remove all but the newest `keep` valid ones, and saves that never ended; return which.

        Before anything that was published goes, one that stays is read byte by byte, once in this
        object's life; without `read` its record and its files' sizes do, for a store that vouches
        for its bytes and where reading costs. What cannot be removed is told in the log and tried
        at the next time.
        """
        seen = self._seen(trusted=not read)
        while retention.surplus(seen, keep, protect) and (doubtful := self._doubtful(seen, keep)):
            seen = self._judged(seen, doubtful)
        going = retention.to_remove(seen, keep, protect, litter_s=litter_s)
        return going if dry_run else [one for one in going if self._removed(one)]

    def _look(
        self,
        published: list[FoundCheckpoint],
        strict: bool,
        full: bool,
        how: tuple[Progress | None, Stop],
    ) -> tuple[RestorePoint, bool]:
        """Return the choice, and whether one that was to be judged has been removed meanwhile."""
        skipped: list[FoundCheckpoint] = []
        progress, stop = how
        for found in published:
            reason = self.verify(found, progress, stop=stop) if full else found.reason
            if not reason:
                return RestorePoint(found, tuple(skipped)), False
            if not publishing.is_published(self.storage, found.folder):
                return RestorePoint(None), True
            skipped.append(msgspec.structs.replace(found, reason=reason))
            if strict:
                break
        return RestorePoint(None, tuple(skipped)), False

    def _found(self, folder: str) -> FoundCheckpoint | None:
        """Return a folder's checkpoint; None where it is not published, or not any more."""
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
            return msgspec.structs.replace(found, reason=told(MANIFEST, error))
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
        """Return the newest that stays, where none of those that stay was read yet."""
        staying = retention.kept(seen, keep)
        return None if any(one.verified for one in staying) else staying[0]

    def _judged(self, seen: list[SeenCheckpoint], doubtful: SeenCheckpoint) -> list[SeenCheckpoint]:
        found = self._found(doubtful.folder)
        sound = found is not None and not self.verify(found, fresh=True)
        judged = msgspec.structs.replace(
            doubtful, verified=sound, state="sound" if sound else "unsound"
        )
        return [judged if one is doubtful else one for one in seen]

    def _restless(self) -> OSError:
        return OSError(errno.EAGAIN, f"changed during {_LOOKS_MAX} looks", self.storage.where)

    def _removed(self, removal: Removal) -> bool:
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
    """Return the error for checkpoints none of which can be restored."""
    if strict:
        what = f"checkpoint {skipped[0].folder} is not valid: {skipped[0].reason}"
        next_step = "elastane checkpoint verify, or allow an older one to be restored"
    else:
        named = "; ".join(f"{one.folder}: {one.reason}" for one in skipped[:_NAMED_MAX])
        what = f"none of {len(skipped)} checkpoints is valid: {named}"
        next_step = "restore a backup; to begin anew, name another folder or move these away"
    return CheckpointError(
        what,
        slug="checkpoint-invalid" if strict else "checkpoint-none-valid",
        where=where,
        expected="a checkpoint whose files are all as they were written",
        next_step=next_step,
    )


def _newest_first(folders: Iterable[str]) -> list[str]:
    parsed = {name: key for name in folders if (key := parse_folder(name)) is not None}
    return sorted(parsed, key=lambda name: parsed[name], reverse=True)
