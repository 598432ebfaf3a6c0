"""Records of a checkpoint as bytes: a manifest, or what one writer vouches for.

    {"digest":"<xxh3-128 of the body's bytes>","body":{ ... }}

A record is these bytes exactly, so that any change to any of them is found; the same record is
always the same bytes, so that all who may write one write the same. How it fails: RecordError,
whose text is the reason; NewerFormatError where a later elastane wrote it.
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
    """Bytes are no record of ours, or not the one that they should be."""


class NewerFormatError(RecordError):
    """A later elastane wrote this: it may be sound, and it cannot be judged here."""


class _Head(msgspec.Struct):
    format: int


def encode(record: Manifest | CheckpointPart) -> bytes:
    """Return a record's bytes."""
    body = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1)
    return b'{"digest":"%s","body":%s}' % (digest_of([body]).encode(), body)


def decode(content: bytes, kind: type[R], folder: str) -> R:
    """Return the record that these bytes, found in `folder`, are."""
    if len(content) > CHECKPOINT_RECORD_BYTES_MAX:
        raise RecordError(f"more than {CHECKPOINT_RECORD_BYTES_MAX} bytes")
    match = _ENVELOPE.fullmatch(content)
    if match is None:
        raise RecordError("cut short, or changed: it is not of the form of a record")
    if digest_of([match["body"]]) != match["digest"].decode():
        raise RecordError("changed: its digest does not match")
    record = _believed(match["body"], kind)
    if reason := fault(record, folder):
        raise RecordError(reason)
    return record


def _believed(body: bytes, kind: type[R]) -> R:
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
    """Return a record of a folder; FileNotFoundError where there is none."""
    return decode(read_bounded(storage, f"{folder}/{name}"), kind, folder)


def read_bounded(storage: Storage, path: str) -> bytes:
    """Return a record's file; of one that is too large, enough to be told."""
    return storage.read(path, 0, CHECKPOINT_RECORD_BYTES_MAX + 1)
