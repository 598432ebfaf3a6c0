"""Encodes the records of a checkpoint: a manifest, or one writer's record.

    {"digest":"<xxh3-128 of the body's bytes>","body":{ ... }}

A record is exactly these bytes, so that any change is detected. One record always has the same
bytes, so that all writers of it write the same. How it fails: RecordError, whose text is the
reason; NewerFormatError for a record of a later elastane.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from elastane.protocol.checkpoints import FORMAT, CheckpointPart, Manifest, fault
from elastane.protocol.limits import CHECKPOINT_RECORD_BYTES_MAX
from elastane.protocol.unreadable import UNREADABLE
from elastane.storage.digest import digest_of
from elastane.storage.protocol import Storage

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
    if len(content) > CHECKPOINT_RECORD_BYTES_MAX:
        raise RecordError(f"more than {CHECKPOINT_RECORD_BYTES_MAX} bytes")
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
    return storage.read(path, 0, CHECKPOINT_RECORD_BYTES_MAX + 1)
