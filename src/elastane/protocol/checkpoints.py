"""Defines a checkpoint: its key and their order, its name, its records and their bounds.

Owns the types that are written to storage, and the checks of their consistency. It knows nothing
of where they are stored, how digests are computed, or what a state contains. How it fails: `fault`
says in words why a record is not consistent; msgspec refuses other types.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from elastane.protocol.limits import COUNT_MAX, NAME_CHARS_MAX

# The largest size of a checkpoint's file: 1 PiB, far more than any real file has. A record with a
# larger size is garbage, and is refused before anything is allocated for it.
FILE_BYTES_MAX = 1 << 50
# Files of one checkpoint: 16 for each of the 16,384 sessions that a coordinator takes.
FILES_MAX = 1 << 18
# Writers of one checkpoint: one for each node. The names of their records have five digits.
PARTS_MAX = 100_000

# The bytes that one digest covers: enough for the full speed of a disk, and few enough to locate a
# fault.
CHUNK_BYTES = 16 << 20
# The format of the records. A reader refuses a newer format, and reads all older ones.
FORMAT = 1
# The commit record: created last, never replaced. A folder without it is an unfinished save.
MANIFEST = "manifest.json"

Fence = tuple[int, int, int]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
# One path component, valid in any file system and object store. "." and ".." are not allowed, since
# they would lead to another folder.
FileName = Annotated[
    str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]+\Z", max_length=NAME_CHARS_MAX)
]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=FILE_BYTES_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=PARTS_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=4 * NAME_CHARS_MAX)]

_FILE_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
_FOLDER = re.compile(
    r"step-(?P<step>\d{12,16})\.e(?P<era>\d{4,16})\.r(?P<round>\d{6,16})\.a(?P<attempt>\d{2,16})"
    r"\.(?P<nonce>[0-9a-f]{8})"
)


class Key(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """The position of a saved state in training. The newest checkpoint has the greatest key.

    Times do not order checkpoints, since a machine's clock may be wrong. Steps alone do not either:
    the abandoned side of a partition may have made more steps.
    """

    era: Count
    round: Count
    attempt: Count
    step: Count

    @property
    def fence(self) -> Fence:
        """Return the fencing token: one lower than that of a published checkpoint is rejected."""
        return (self.era, self.round, self.attempt)


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. `digests` has one digest for each `CHUNK_BYTES` of it, in order."""

    name: FileName
    size_bytes: Bytes
    digests: tuple[Digest, ...]


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts of a save for people. `reason` is step, time, asked, leave or final flush."""

    job: Text
    world: Count
    created_s: float
    versions: dict[Text, Text]
    reason: Text


class CheckpointPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one writer of a save: all its files are durable.

    The record of part 0 also holds the manifest's `about`, so that every publisher of a save writes
    the same bytes.
    """

    part: Number
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)]
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(max_length=FILES_MAX)]
    key: Key
    nonce: Nonce
    about: About
    format: int = FORMAT


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit record: it names all files of a checkpoint, including the parts' records."""

    format: int
    key: Key
    nonce: Nonce
    about: About
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(max_length=FILES_MAX)]

    @property
    def size_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.size_bytes for file in self.files)


def folder_name(key: Key, nonce: str) -> str:
    """Return the folder name of one save; `nonce` has 8 hexadecimal digits."""
    assert re.fullmatch(r"[0-9a-f]{8}", nonce), nonce
    return f"step-{key.step:012d}.e{key.era:04d}.r{key.round:06d}.a{key.attempt:02d}.{nonce}"


def parse_folder(name: str) -> tuple[Key, str] | None:
    """Return the key and nonce in the name of a save's folder, or None for any other name."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    key = Key(*(int(match[part]) for part in ("era", "round", "attempt", "step")))
    named = folder_name(key, match["nonce"])
    if max(key.era, key.round, key.attempt, key.step) > COUNT_MAX or named != name:
        return None
    return key, match["nonce"]


def part_name(part: int, parts: int) -> str:
    """Return the file name of one writer's record."""
    return f"part-{part:05d}-of-{parts:05d}.json"


def is_file_name(name: str) -> bool:
    """Return whether `name` may name a file of a checkpoint."""
    return len(name) <= NAME_CHARS_MAX and _FILE_NAME.fullmatch(name) is not None


def chunks_of(size_bytes: int) -> int:
    """Return the number of chunks of a file."""
    return -(-size_bytes // CHUNK_BYTES)


def fault(record: Manifest | CheckpointPart, folder: str) -> str:
    """Return why a record contradicts itself or the name of its folder; "" if it is sound."""
    if parse_folder(folder) != (record.key, record.nonce):
        return f"it is of {folder_name(record.key, record.nonce)}, and lies in another folder"
    if isinstance(record, CheckpointPart) and record.part >= record.parts:
        return f"it is part {record.part} of only {record.parts}"
    names = [file.name for file in record.files]
    if len(set(names)) != len(names) or MANIFEST in names:
        return "it names a file twice"
    for file in record.files:
        if len(file.digests) != chunks_of(file.size_bytes):
            return f"{file.name}: {len(file.digests)} digests for {file.size_bytes} bytes"
    return ""


def era_beyond(newest: Fence | None, round_number: int, attempt: int) -> int:
    """Return the era in which a run at this round and attempt publishes, after `newest`.

    A run that continues from a higher round or attempt than `newest` keeps its era. A run that
    counts its rounds from the start again gets a greater era, so its checkpoints are newer.
    """
    if newest is None:
        return 0
    era = newest[0]
    return era if (era, round_number, attempt) > newest else era + 1
