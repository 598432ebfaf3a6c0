"""xxh3-128 digests, at the speed of memory: they detect damage, not forgery.

`xxhash` is an optional extra. How it fails: ConfigurationError names the extra if it is missing.
Digesting large buffers releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from elastane.errors import missing_extra
from elastane.protocol.checkpoints import CHUNK_BYTES, FileRecord

if TYPE_CHECKING:
    from types import ModuleType

View = bytes | bytearray | memoryview


def _xxhash() -> ModuleType:
    try:
        import xxhash
    except ModuleNotFoundError as missing:
        raise missing_extra(
            "checkpoints need xxhash, which is not installed", "checkpoints", "xxhash 3.4 or later"
        ) from missing
    return xxhash


def new_digest() -> Any:
    """Return an incremental digest with hashlib's `update` and `hexdigest`."""
    return _xxhash().xxh3_128()


def digest_of(pieces: Iterable[View]) -> str:
    """Return the digest of bytes that are given in pieces."""
    state = new_digest()
    for piece in pieces:
        state.update(piece)
    return str(state.hexdigest())


def chunks(regions: Iterable[View]) -> Iterable[list[memoryview]]:
    """Divide memory regions into chunks, each a list of pieces, without copying."""
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for region in regions:
        rest = memoryview(region).cast("B")
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if room == 0:
                yield pieces
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield pieces


def record_of(name: str, regions: Sequence[View]) -> FileRecord:
    """Return the record of a file with these bytes."""
    size_bytes = sum(memoryview(region).nbytes for region in regions)
    return FileRecord(name, size_bytes, tuple(map(digest_of, chunks(regions))))
