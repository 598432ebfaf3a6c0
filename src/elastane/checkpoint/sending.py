"""A checkpoint on its way to folders that lack it: node-local ones, of nodes that came later.

One rank reads the files, all ranks hear them in parcels, and one rank of each folder that lacks
them writes them, under the same names. The digests that were made when the files were written
first are compared on arrival; the manifest comes last, as always.
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

# Parts that are read while one is on its way, and that wait to be written while one is written.
_AHEAD = 2
# One that comes, those that wait, and one that is written.
_BUFFERS = _AHEAD + 2


def _spans(record: FileRecord) -> list[tuple[int, int]]:
    """Return where each part of a file begins, and how long it is.

    A part is a chunk: who writes it asks for the next when it needs this one no more.
    """
    size = record.size_bytes
    return [(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)]


class _Announced(msgspec.Struct, frozen=True, array_like=True):
    """The manifest as it is in its file, and the files that it names."""

    content: bytes
    files: tuple[FileRecord, ...]


class Sending:
    """Of one checkpoint, by its folder."""

    def __init__(self, members: Members, storage: Storage, folder: str) -> None:
        self._members, self._storage, self._folder = members, storage, folder
        self._source = 0

    def bring(self, source: int, writers: Collection[int]) -> None:
        """Give it to the writers; all ranks take part. CheckpointError where one did not get it."""
        self._source, mine = source, self._members.rank == source
        content, trouble = self._manifest() if mine else (b"", "")
        content = self._members.texts(content)[source]
        if content:
            writes = self._members.rank in writers
            trouble = self._begin() if writes else ""
            manifest = msgspec.msgpack.decode(content, type=_Announced)
            with ThreadPoolExecutor(1, thread_name_prefix="elastane-bring") as helper:
                for record in manifest.files:
                    parcels = self._given(record, helper) if mine else self._heard(record)
                    if writes and not trouble:
                        trouble = self._taken(record, parcels, helper)
                    for _ in parcels:
                        pass  # What is left of it belongs to the others' collectives.
            if writes and not trouble:
                trouble = self._published(manifest.content)
        self._insist(trouble)

    def _manifest(self) -> tuple[bytes, str]:
        """Return what is announced to all, or why nothing can be."""
        try:
            manifest = read_record(self._storage, self._folder, MANIFEST, Manifest)
            content = self._storage.read(f"{self._folder}/{MANIFEST}")
        except (OSError, RecordError) as error:
            return b"", f"{self._folder}/{MANIFEST}: {error}"
        return msgspec.msgpack.encode(_Announced(content, manifest.files)), ""

    def _published(self, content: bytes) -> str:
        path = f"{self._folder}/{MANIFEST}"
        try:
            self._storage.create(path, content)
        except OSError as error:
            return f"{path}: {error}"
        return ""

    def _begin(self) -> str:
        """Remove what an earlier attempt has left."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._storage.remove(self._folder)
        except OSError as error:
            return str(error)
        return ""

    def _taken(self, record: FileRecord, parcels: Iterator[torch.Tensor], helper: Executor) -> str:
        """Have what comes written while more comes; returns why it could not be."""
        coming: Queue[torch.Tensor | None] = Queue(_AHEAD)
        writing = helper.submit(self._written, record, coming)
        try:
            for parcel in parcels:
                coming.put(parcel)
        finally:
            coming.put(None)
        return writing.result()

    def _written(self, record: FileRecord, coming: Queue[torch.Tensor | None]) -> str:
        path = f"{self._folder}/{record.name}"
        parcels = iter(coming.get, None)
        try:
            found = self._storage.write(path, map(memory_of, parcels))
        except OSError as error:
            return f"{path}: {error}"
        finally:
            for _ in parcels:
                pass  # Who puts them there waits for room.
        return "" if found == record else f"{path} did not arrive as it was sent"

    def _heard(self, record: FileRecord) -> Iterator[torch.Tensor]:
        """Yield a file part by part, each in memory that is used again after some others."""
        for number, (_, size) in enumerate(_spans(record)):
            data = self._buffers[number % _BUFFERS][:size]
            self._members.spread(data, self._source)
            yield data

    def _given(self, record: FileRecord, helper: Executor) -> Iterator[torch.Tensor]:
        """Yield a file part by part, as the others hear it; the next ones are read meanwhile."""
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
        """Memory that lies as a disk takes it."""
        return [torch.frombuffer(pages(CHUNK_BYTES), dtype=torch.uint8) for _ in range(_BUFFERS)]

    def _read(
        self, path: str, fd: int | None, memory: torch.Tensor, at: int, size: int
    ) -> torch.Tensor:
        """Read a part; what cannot be read is zeros, which its digest shows on arrival."""
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

    def _insist(self, trouble: str) -> None:
        for said in self._members.texts(trouble.encode()):
            if said:
                raise CheckpointError(
                    f"a checkpoint could not be brought to a node: {said.decode()}",
                    expected="room for it in each node's folder",
                    next_step="mend the folder there, or use one that all nodes share",
                    slug="checkpoint-place",
                )
