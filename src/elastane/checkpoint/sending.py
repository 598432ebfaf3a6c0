"""A checkpoint on its way to folders that lack it: node-local ones, of nodes that came later.

One rank reads the files, all ranks hear them in parcels, and one rank of each folder that lacks
them writes them, under the same names. The digests that were made when the files were written
first are compared on arrival; the manifest comes last, as always.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from elastane.checkpoint.members import Members
from elastane.checkpoint.reading import PARCEL_BYTES, memory_of, read_whole
from elastane.core.checkpoints import MANIFEST, FileRecord, Manifest
from elastane.errors import CheckpointError
from elastane.storage.protocol import Storage
from elastane.storage.records import RecordError, read_record

# Parts that are read while one is on its way.
_AHEAD = 2


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
            for record in manifest.files:
                parcels = self._parcels(record, mine=mine)
                if writes and not trouble:
                    trouble = self._written(record, parcels)
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

    def _written(self, record: FileRecord, parcels: Iterator[torch.Tensor]) -> str:
        path = f"{self._folder}/{record.name}"
        try:
            found = self._storage.write(path, map(memory_of, parcels))
        except OSError as error:
            return f"{path}: {error}"
        return "" if found == record else f"{path} did not arrive as it was sent"

    def _parcels(self, record: FileRecord, *, mine: bool) -> Iterator[torch.Tensor]:
        """Yield a file part by part, as all ranks hear it; the next is read meanwhile."""
        size = record.size_bytes
        spans = [(at, min(PARCEL_BYTES, size - at)) for at in range(0, size, PARCEL_BYTES)]
        if not mine:
            for _, length in spans:
                data = torch.empty(length, dtype=torch.uint8)
                self._members.spread(data, self._source)
                yield data
            return
        path = f"{self._folder}/{record.name}"
        fd = self._storage.open_local(path)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="elastane-bring") as pool:
                coming = deque(pool.submit(self._read, path, fd, *span) for span in spans[:_AHEAD])
                for number in range(len(spans)):
                    data = coming.popleft().result()
                    for span in spans[number + _AHEAD : number + _AHEAD + 1]:
                        coming.append(pool.submit(self._read, path, fd, *span))
                    self._members.spread(data, self._source)
                    yield data
        finally:
            if fd is not None:
                os.close(fd)

    def _read(self, path: str, fd: int | None, at: int, size: int) -> torch.Tensor:
        """Read a part; what cannot be read is zeros, which its digest shows on arrival."""
        data = torch.zeros(size, dtype=torch.uint8)
        with contextlib.suppress(OSError):
            if fd is not None:
                read_whole(fd, at, memory_of(data))
            else:
                content = self._storage.read(path, offset=at, size=size)
                data[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
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
