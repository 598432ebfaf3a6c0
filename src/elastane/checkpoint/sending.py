"""Copies a checkpoint to folders that lack it: the local folders of nodes that joined later.

One rank reads the files and broadcasts them in parts. One rank of each folder that lacks them
writes them under the same names. The original digests are compared on arrival, and the manifest is
written last. How it fails: CheckpointError on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from queue import Queue

import msgspec
import torch

from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import memory_of, read_whole
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import CHUNK_BYTES, MANIFEST, FileRecord, Manifest
from elastane.storage.aligned import pages
from elastane.storage.protocol import Storage
from elastane.storage.records import RecordError, read_record

# Parts that are read ahead, and parts that wait to be written.
_AHEAD = 2
# One arriving part, the waiting ones, and one that is being written.
_BUFFERS = _AHEAD + 2


def _spans(record: FileRecord) -> list[tuple[int, int]]:
    """Return the offset and size of each part of a file.

    A part is one chunk, since a writer asks for the next part when it no longer needs this one.
    """
    size = record.size_bytes
    return [(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)]


class _Announced(msgspec.Struct, frozen=True, array_like=True):
    """The manifest's bytes, and the files that it names."""

    content: bytes
    files: tuple[FileRecord, ...]


class CheckpointTransfer:
    """The transfer of one checkpoint folder."""

    def __init__(self, members: Members, storage: Storage, folder: str) -> None:
        self._members, self._storage, self._folder = members, storage, folder
        self._source = 0

    def run(self, source: int, writers: Collection[int]) -> None:
        """Copy it to the writers; all ranks take part. Raises CheckpointError if one failed."""
        self._source, mine = source, self._members.rank == source
        content, failure = self._manifest() if mine else (b"", "")
        content = self._members.texts(content)[source]
        if content:
            writes = self._members.rank in writers
            failure = self._prepare() if writes else ""
            manifest = msgspec.msgpack.decode(content, type=_Announced)
            with ThreadPoolExecutor(1, thread_name_prefix="elastane-bring") as helper:
                for record in manifest.files:
                    parcels = self._send(record, helper) if mine else self._receive(record)
                    if writes and not failure:
                        failure = self._write_while(record, parcels, helper)
                    for _ in parcels:
                        pass  # The rest must still take part in the collectives.
            if writes and not failure:
                failure = self._publish(manifest.content)
        self._check(failure)

    def _manifest(self) -> tuple[bytes, str]:
        """Return what is announced to all ranks, or why nothing can be sent."""
        try:
            manifest = read_record(self._storage, self._folder, MANIFEST, Manifest)
            content = self._storage.read(f"{self._folder}/{MANIFEST}")
        except (OSError, RecordError) as error:
            return b"", f"{self._folder}/{MANIFEST}: {error}"
        return msgspec.msgpack.encode(_Announced(content, manifest.files)), ""

    def _publish(self, content: bytes) -> str:
        path = f"{self._folder}/{MANIFEST}"
        try:
            self._storage.create(path, content)
        except OSError as error:
            return f"{path}: {error}"
        return ""

    def _prepare(self) -> str:
        """Remove what an earlier attempt left."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._storage.remove(self._folder)
        except OSError as error:
            return str(error)
        return ""

    def _write_while(
        self, record: FileRecord, parcels: Iterator[torch.Tensor], helper: Executor
    ) -> str:
        """Write parts while further ones arrive; returns why it failed, or ""."""
        coming: Queue[torch.Tensor | None] = Queue(_AHEAD)
        writing = helper.submit(self._write, record, coming)
        try:
            for parcel in parcels:
                coming.put(parcel)
        finally:
            coming.put(None)
        return writing.result()

    def _write(self, record: FileRecord, coming: Queue[torch.Tensor | None]) -> str:
        path = f"{self._folder}/{record.name}"
        parcels = iter(coming.get, None)
        try:
            found = self._storage.write(path, map(memory_of, parcels))
        except OSError as error:
            return f"{path}: {error}"
        finally:
            for _ in parcels:
                pass  # The receiving thread waits for room in the queue.
        return "" if found == record else f"{path} did not arrive as it was sent"

    def _receive(self, record: FileRecord) -> Iterator[torch.Tensor]:
        """Yield a file part by part, in buffers that are used again after some others."""
        for number, (_, size) in enumerate(_spans(record)):
            data = self._buffers[number % _BUFFERS][:size]
            self._members.spread(data, self._source)
            yield data

    def _send(self, record: FileRecord, helper: Executor) -> Iterator[torch.Tensor]:
        """Broadcast and yield a file part by part; the next parts are read meanwhile."""
        path = f"{self._folder}/{record.name}"
        fd = self._storage.open_local(path)
        spans, coming = _spans(record), deque[Future[torch.Tensor]]()
        try:
            for number in range(len(spans) + _AHEAD):
                if number < len(spans):
                    memory = self._buffers[number % _BUFFERS]
                    coming.append(helper.submit(self._read, path, fd, memory, *spans[number]))
                if number >= _AHEAD:
                    data = coming.popleft().result()
                    self._members.spread(data, self._source)
                    yield data
        finally:
            wait(coming)
            if fd is not None:
                os.close(fd)

    @functools.cached_property
    def _buffers(self) -> list[torch.Tensor]:
        """Page-aligned buffers, as O_DIRECT requires."""
        return [torch.frombuffer(pages(CHUNK_BYTES), dtype=torch.uint8) for _ in range(_BUFFERS)]

    def _read(
        self, path: str, fd: int | None, memory: torch.Tensor, at: int, size: int
    ) -> torch.Tensor:
        """Read a part; an unreadable part becomes zeros, which its digest reveals on arrival."""
        data = memory[:size]
        try:
            if fd is not None:
                read_whole(fd, at, memory_of(data))
            else:
                content = self._storage.read(path, offset=at, size=size)
                data[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        except (OSError, RuntimeError, ValueError):
            data.zero_()
        return data

    def _check(self, failure: str) -> None:
        for text in self._members.texts(failure.encode()):
            if text:
                raise CheckpointError(
                    f"a checkpoint could not be copied to a node: {text.decode()}",
                    expected="room for it in each node's folder",
                    next_step="mend the folder there, or use one that all nodes share",
                    slug="checkpoint-place",
                )
