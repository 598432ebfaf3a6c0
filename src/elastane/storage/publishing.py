"""The commit of a save, which does not depend on any single process, and the records that make it.

Each writer makes its files durable, and then its part's record. Any writer that sees all records
creates the manifest. All create the same one, so that it does not matter which, or how often. The
death of a writer leaves a save without a manifest, which counts as nothing.

A publisher whose fence is older than the published one creates no manifest. If it does so in the
same instant, the order of keys still prevents its manifest from being the newest.

A manifest, or one writer's record, is exactly these bytes, so that any change is detected:

    {"digest":"<xxh3-128 of the body's bytes>","body":{ ... }}

How it fails: FencedError; CheckpointError if parts are missing or contradict each other; OSError of
the storage; RecordError, whose text is the reason, for bytes that are no record.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastane.errors import CheckpointError, FencedError
from elastane.protocol.checkpoints import (
    FORMAT,
    MANIFEST,
    CheckpointPart,
    Fence,
    Key,
    Manifest,
    fault,
    parse_folder,
    part_name,
)
from elastane.protocol.unreadable import UNREADABLE
from elastane.storage.digest import digest_of, record_of
from elastane.storage.places import file_fault
from elastane.storage.protocol import Stop, Storage, never

# A manifest: 36 bytes for each 16 MiB, so this is of 28 TiB; an object store takes it in one put.
RECORD_BYTES_MAX = 64 << 20
# The first and the longest pause between two looks for the other writers' records. A look costs a
# fraction of a millisecond on a disk, and a request on an object store.
POLL_S = 0.01
POLL_MAX_S = 0.5

# Records that a writer reads at its second look; the number doubles at each further one.
_RECORDS_FIRST = 8
# Above this many writers each looks less often: an object store answers 5,500 requests a second.
_WRITERS_AT_FULL_PACE = 64


_ENVELOPE = re.compile(rb'\{"digest":"(?P<digest>[0-9a-f]{32})","body":(?P<body>\{.*\})\}', re.S)
R = TypeVar("R", Manifest, CheckpointPart)


class RecordError(Exception):
    """The bytes are no record of elastane, or not the expected one."""


class NewerFormatError(RecordError):
    """A later elastane wrote this record; it may be valid, but cannot be judged here."""


class _Head(msgspec.Struct):
    format: int


def encode(record: Manifest | CheckpointPart) -> bytes:
    """Encode a record."""
    body = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1)
    return b'{"digest":"%s","body":%s}' % (digest_of([body]).encode(), body)


def decode(content: bytes, kind: type[R], folder: str) -> R:
    """Decode and check a record that was found in `folder`."""
    if len(content) > RECORD_BYTES_MAX:
        raise RecordError(f"more than {RECORD_BYTES_MAX} bytes")
    match = _ENVELOPE.fullmatch(content)
    if match is None:
        raise RecordError("cut short, or changed: it is not of the form of a record")
    if digest_of([match["body"]]) != match["digest"].decode():
        raise RecordError("changed: its digest does not match")
    record = _parse(match["body"], kind)
    if reason := fault(record, folder):
        raise RecordError(reason)
    return record


def _parse(body: bytes, kind: type[R]) -> R:
    try:
        head = msgspec.json.decode(body, type=_Head)
        if head.format > FORMAT:
            raise NewerFormatError(
                f"of format {head.format}, from a newer elastane; this one reads up to {FORMAT}"
            )
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise RecordError(f"not a record: {error}") from error


def read_record(storage: Storage, folder: str, name: str, kind: type[R]) -> R:
    """Read a record of a folder; raises FileNotFoundError if it is missing."""
    return decode(read_bounded(storage, f"{folder}/{name}"), kind, folder)


def read_bounded(storage: Storage, path: str) -> bytes:
    """Read a record's file; one byte more than allowed shows that it is too large."""
    return storage.read(path, 0, RECORD_BYTES_MAX + 1)


def is_published(storage: Storage, folder: str) -> bool:
    """Return whether a folder has a manifest, valid or not."""
    try:
        storage.size(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return False
    except OSError as error:
        file_fault(MANIFEST, error)  # Raises if the fault is not this file's own.
    return True


def newest_key(storage: Storage, beyond: Fence | None = None) -> Key | None:
    """Return the greatest published key, valid or not; None if there is none.

    With `beyond`, only a key with a later fence counts.
    """
    named = [(parsed[0], name) for name in storage.folders() if (parsed := parse_folder(name))]
    for key, name in sorted(named, reverse=True):
        if beyond is not None and key.fence <= beyond:
            return None
        if is_published(storage, name):
            return key
    return None


def check_fence(storage: Storage, key: Key) -> None:
    """Raise FencedError if a later round than this key's has published."""
    newest = newest_key(storage, beyond=key.fence)
    if newest is not None:
        raise _fenced(storage.where, key, newest)


def add_part(storage: Storage, folder: str, part: CheckpointPart) -> None:
    """Record that all files of one writer are durable."""
    if reason := fault(part, folder):
        raise ValueError(f"part {part.part} of {folder}: {reason}")
    path = f"{folder}/{part_name(part.part, part.parts)}"
    content = encode(part)
    # A client may have retried and found its own object.
    if not storage.create(path, content) and storage.read(path) != content:
        raise _conflict(folder, f"{path} is another writer's")


class Publication:
    """One writer's wait until a save is complete. Call `wait` once."""

    def __init__(self, storage: Storage, folder: str, parts: int) -> None:
        self._storage = storage
        self._folder = folder
        self._missing = list(range(parts))
        self._parts: dict[int, CheckpointPart] = {}
        self._contents: dict[int, bytes] = {}
        self._count = parts
        self._damaged = ""

    def wait(
        self, wait_s: float, stop: Stop = never, sleep: Callable[[float], None] = time.sleep
    ) -> Manifest:
        """Return the manifest once it is durable, created here or by another writer."""
        begun_s = time.monotonic()
        deadline_s = begun_s + wait_s
        pause_s, pause_max_s = POLL_S, self._pause_max_s()
        records, over = self._count, False
        while True:
            self._look(records, past_gaps=over)
            if (made := self._published()) is not None:
                self._storage.make_durable(self._folder)
                return made
            if not self._missing:
                return self._publish()
            if over:
                # A later round removes unfinished saves of earlier ones, records included.
                check_fence(self._storage, _key_of(self._folder))
                raise self._incomplete(time.monotonic() - begun_s)
            sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
            over = stop() or time.monotonic() >= deadline_s
            pause_s = min(2 * pause_s, pause_max_s)
            # A writer that did not see all records at its first look was not the last to finish,
            # and the last one is publishing. Hence 1,000 writers need not read 1,000 records each.
            records = (
                self._count if over else _RECORDS_FIRST if records == self._count else 2 * records
            )

    def _pause_max_s(self) -> float:
        return POLL_MAX_S * max(1.0, self._count / _WRITERS_AT_FULL_PACE)

    def _look(self, records: int, *, past_gaps: bool) -> None:
        """Read this many missing records, by name because listings may be stale.

        A look ends at the first missing record, where the next look begins: early writers ask
        little. The last look, with `past_gaps`, finds out which records are missing.
        """
        for number in self._missing[:records]:
            if not self._read(number) and not past_gaps:
                return

    def _read(self, number: int) -> bool:
        name = part_name(number, self._count)
        try:
            content = read_bounded(self._storage, f"{self._folder}/{name}")
            part = decode(content, CheckpointPart, self._folder)
        except FileNotFoundError:
            return False
        except RecordError as error:
            # Without hard links, the record may not be completely written yet.
            self._damaged = f"; {name}: {error}"
            return False
        if (part.part, part.parts) != (number, self._count):
            raise _conflict(self._folder, f"{name} is of part {part.part} of {part.parts}")
        self._parts[number], self._contents[number] = part, content
        self._missing.remove(number)
        return True

    def _published(self) -> Manifest | None:
        with contextlib.suppress(FileNotFoundError, RecordError):
            return read_record(self._storage, self._folder, MANIFEST, Manifest)
        return None

    def _publish(self) -> Manifest:
        manifest = self._manifest()
        check_fence(self._storage, manifest.key)
        # No manifest may outlive the records that it names.
        self._storage.make_durable(self._folder)
        content, path = encode(manifest), f"{self._folder}/{MANIFEST}"
        if not self._storage.create(path, content):
            found = read_bounded(self._storage, path)
            if found != content:
                self._refuse_other(found)
        return manifest

    def _refuse_other(self, found: bytes) -> None:
        try:
            decode(found, Manifest, self._folder)
        except RecordError as error:
            raise _conflict(self._folder, f"{MANIFEST}: {error}") from error
        raise _conflict(self._folder, f"{MANIFEST} is of other parts")

    def _manifest(self) -> Manifest:
        """Return the manifest of all parts, which is the same in every writer."""
        parts = [self._parts[number] for number in range(self._count)]
        files = [file for part in parts for file in part.files]
        for number, content in sorted(self._contents.items()):
            files.append(record_of(part_name(number, self._count), [content]))
        first = parts[0]
        manifest = Manifest(FORMAT, first.key, first.nonce, first.about, tuple(files))
        if reason := fault(manifest, self._folder):
            raise _conflict(self._folder, reason)
        return manifest

    def _incomplete(self, waited_s: float) -> CheckpointError:
        missing = ", ".join(map(str, self._missing[:8])) + (", ..." if self._missing[8:] else "")
        return CheckpointError(
            f"checkpoint {self._folder}: {len(self._missing)} of {self._count} writers did not "
            f"finish within {waited_s:.1f} s: part {missing}{self._damaged}",
            slug="checkpoint-incomplete",
            where=self._storage.where,
            expected="the record of each writer; the checkpoint before this one stays",
            next_step="look at why those writers failed; the next save tries again",
        )


def _key_of(folder: str) -> Key:
    parsed = parse_folder(folder)
    assert parsed is not None, folder
    return parsed[0]


def _conflict(folder: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder}: {reason}",
        slug="checkpoint-conflict",
        expected="files of one save alone, with one nonce",
        next_step="find the other writer to that place; the next save has a folder of its own",
    )


def _fenced(where: str, key: Key, newest: Key) -> FencedError:
    position = "era {}, round {}, attempt {}"
    return FencedError(
        f"checkpoint of step {key.step} not published: it is of "
        f"{position.format(*key.fence)}, and {position.format(*newest.fence)} has published",
        newer=(*newest.fence, newest.step),
        slug="checkpoint-fenced",
        where=where,
        expected="a round that is not older than the published one",
        next_step="nothing, if the network was cut: the other side of the job continued",
    )
