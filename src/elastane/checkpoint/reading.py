"""Reads a serialized layout into tensors: from a snapshot, from storage, or from other ranks.

Bytes go straight into a live tensor if a piece lies contiguously in it; several pieces are read at
a time. `gather` restores a sharded state from the memory of several nodes: all ranks say which
pieces they lack, and the first rank whose server holds a piece broadcasts it once. Sources are
verified elsewhere: storage before, snapshots by the server's digests, and network data where it is
written. How it fails: OSError, CheckpointError for missing bytes, or as the collective does.

`CheckpointTransfer` copies a checkpoint to folders that lack it: the local folders of nodes that
joined later. One rank reads the files and broadcasts them in parts. One rank of each folder that
lacks them writes them under the same names. The original digests are compared on arrival, and the
manifest is written last. How it fails: CheckpointError on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Queue
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from elastane.checkpoint.layout import Box, Layout, TensorPiece, overlap, part_of
from elastane.checkpoint.members import Members
from elastane.comms.digest import raw_bytes
from elastane.errors import CheckpointError
from elastane.observe.progress import ShownProgress, shown_progress
from elastane.protocol.checkpoints import CHUNK_BYTES, MANIFEST, FileRecord, Manifest
from elastane.storage.aligned import pages
from elastane.storage.protocol import Storage
from elastane.storage.publishing import RecordError, read_record

THREADS = 4
# The size of one broadcast.
PARCEL_BYTES = 16 << 20


# Parts that are read ahead, and parts that wait to be written.
_AHEAD = 2
# One arriving part, the waiting ones, and one that is being written.
_BUFFERS = _AHEAD + 2


Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Destination:
    """A tensor of this rank, the tensor's number in the layout, and its offsets in that tensor."""

    number: int
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """The part of the whole tensor that it is."""
        return Box(self.offsets, tuple(self.tensor.shape))


class ByteSource(Protocol):
    """A readable serialized layout; any thread may call."""

    def read_into(self, at: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `at` on; raises OSError or CheckpointError."""

    def run(self, at: int, size: int) -> int:
        """Return how many bytes from `at` on are contiguous in the source, `size` at most."""


class _CountedBytes:
    """A source that reports what is read of it."""

    def __init__(self, source: ByteSource, shown: ShownProgress) -> None:
        self._source = source
        self._shown = shown

    def read_into(self, at: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `at` on."""
        self._source.read_into(at, memory)
        self._shown.add(len(memory))

    def run(self, at: int, size: int) -> int:
        """Return how many bytes from `at` on are contiguous in the source, `size` at most."""
        return self._source.run(at, size)


def counted(source: ByteSource, shown: ShownProgress | None) -> ByteSource:
    """Return the source, wrapped to count the bytes read if `shown` displays progress."""
    return source if shown is None else _CountedBytes(source, shown)


class MemoryPieces:
    """A serialized layout in descriptors, each of which begins with the bytes [first, end)."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._pieces = sorted(pieces)

    def run(self, at: int, size: int) -> int:
        """See ByteSource.run."""
        return _run([(first, end) for first, end, _fd in self._pieces], at, size)

    def read_into(self, at: int, memory: memoryview) -> None:
        """See ByteSource.read_into."""
        place = self.place(at, len(memory))
        if place is None:
            raise _missing(at, len(memory))
        read_whole(*place, memory)

    def place(self, at: int, size: int) -> tuple[int, int] | None:
        """Return a descriptor that holds all of this range, and the offset in it; else None."""
        for first, end, fd in self._pieces:
            if first <= at and at + size <= end:
                return fd, at - first
        return None


class CheckpointFiles:
    """A serialized layout in the files of a checkpoint."""

    def __init__(self, storage: Any, folder: str, ranges: Sequence[tuple[str, int, int]]) -> None:
        self._storage = storage
        self._folder = folder
        self._ranges = sorted(ranges, key=lambda each: each[1])
        self._fds: dict[str, int | None] = {}
        try:
            for file, _first, _end in self._ranges:
                self._fds[file] = storage.open_local(f"{folder}/{file}")
        except BaseException:
            self.close()
            raise

    def read_into(self, at: int, memory: memoryview) -> None:
        """See ByteSource.read_into."""
        for file, first, end in self._ranges:
            if first <= at and at + len(memory) <= end:
                fd = self._fds[file]
                if fd is not None:
                    read_whole(fd, at - first, memory)
                    return
                path = f"{self._folder}/{file}"
                data = self._storage.read(path, offset=at - first, size=len(memory))
                if len(data) != len(memory):
                    raise _missing(at, len(memory))
                memory[:] = data
                return
        raise _missing(at, len(memory))

    def run(self, at: int, size: int) -> int:
        """See ByteSource.run."""
        return _run([(first, end) for _file, first, end in self._ranges], at, size)

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds.clear()


def read_whole(fd: int, at: int, memory: memoryview) -> None:
    """Fill `memory` from a descriptor; raises OSError if there is less."""
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], at + done)
        if not count:
            raise OSError(f"the data ends at byte {at + done}, {len(memory) - done} too early")
        done += count


class ReadRequest(NamedTuple):
    """A piece, a destination, and the part that they have in common."""

    piece: TensorPiece
    destination: Destination
    common: Box


@contextlib.contextmanager
def restore_progress(
    what: str, total_bytes: int, members: Members
) -> Iterator[ShownProgress | None]:
    """Show the progress of what all ranks do together, on the first one."""
    if members.rank:
        yield None
        return
    with shown_progress(what, total_bytes) as shown:
        yield shown


def fill(layout: Layout, image: ByteSource, destinations: Sequence[Destination]) -> None:
    """Fill all destinations."""
    fill_requests(layout, image, requests_of(layout, destinations))


def fill_requests(layout: Layout, image: ByteSource, wanted: Sequence[ReadRequest]) -> None:
    """Read these requests with several threads."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="restore") as pool:
        jobs = [pool.submit(_fill_one, layout, image, each) for each in _shares_of(wanted)]
        for job in jobs:
            job.result()


def broadcast(
    image_bytes: int, image: ByteSource | None, members: Members, source: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcast a serialized layout in parcels; yields each offset and its bytes on all ranks.

    `image` is the source's; it is None on other ranks.
    """
    for at in range(0, image_bytes, PARCEL_BYTES):
        data = torch.empty(min(PARCEL_BYTES, image_bytes - at), dtype=torch.uint8)
        if image is not None:
            read_parts(image, at, memory_of(data))
        members.spread(data, source)
        yield at, data


def read_parts(image: ByteSource, at: int, memory: memoryview) -> None:
    """Fill `memory` from a range that may lie in several pieces of a source."""
    done = 0
    while done < len(memory):
        size = image.run(at + done, len(memory) - done)
        image.read_into(at + done, memory[done : done + size])
        done += size


class ReceivedBytes:
    """Received bytes of a serialized layout, from offset `first` on, in this process's memory."""

    def __init__(self, image_bytes: int, first: int = 0) -> None:
        self.data = torch.empty(image_bytes, dtype=torch.uint8)
        self._first = first

    def read_into(self, at: int, memory: memoryview) -> None:
        """See ByteSource.read_into."""
        at -= self._first
        memory[:] = memory_of(self.data)[at : at + len(memory)]

    def run(self, at: int, size: int) -> int:
        """Return `size`: everything is contiguous."""
        return size


def _run(spans: Sequence[tuple[int, int]], at: int, size: int) -> int:
    for first, end in spans:
        if first <= at < end:
            return min(size, end - at)
    raise _missing(at, size)


def requests_of(layout: Layout, destinations: Sequence[Destination]) -> list[ReadRequest]:
    """Return the read requests; raises CheckpointError if the layout lacks some of the values."""
    found = []
    by_number: dict[int, list[Destination]] = {}
    for destination in destinations:
        by_number.setdefault(destination.number, []).append(destination)
    covered = {id(destination): 0 for destination in destinations}
    for piece in layout.pieces:
        for destination in by_number.get(piece.tensor, ()):
            common = overlap(piece, destination.box)
            if common is not None or not destination.tensor.numel():
                covered[id(destination)] += torch.Size(common.shape).numel() if common else 0
            if common is not None:
                found.append(ReadRequest(piece, destination, common))
    for destination in destinations:
        if covered[id(destination)] != destination.tensor.numel():
            name = layout.tensors[destination.number].name
            raise CheckpointError(
                f"{name}: the checkpoint has {covered[id(destination)]} of its"
                f" {destination.tensor.numel()} values that are wanted here",
                expected="a checkpoint that holds each part of each tensor",
                next_step="elastane checkpoint verify FOLDER",
                slug="checkpoint-layout",
            )
    return found


def _shares_of(wanted: Sequence[ReadRequest]) -> list[Sequence[ReadRequest]]:
    """Cut the requests into runs, a few for each thread."""
    step = max(1, len(wanted) // (THREADS * 4))
    return [wanted[n : n + step] for n in range(0, len(wanted), step)]


def _fill_one(layout: Layout, image: ByteSource, wanted: Sequence[ReadRequest]) -> None:
    spare = torch.empty(0, dtype=torch.uint8)  # Reused: new memory for each piece costs more.
    for piece, destination, common in wanted:
        at = layout.data_at(piece)
        target = part_of(
            destination.tensor, TensorPiece(piece.tensor, *common, 0), destination.offsets
        )
        is_whole = tuple(piece.shape) == common.shape
        if is_whole and target.device.type == "cpu" and target.is_contiguous():
            image.read_into(at, memory_of(target))
            continue
        dtype = destination.tensor.dtype
        size = torch.Size(piece.shape).numel() * dtype.itemsize
        if spare.numel() < size:
            spare = torch.empty(size, dtype=torch.uint8)
        whole = spare[:size].view(dtype).view(piece.shape)
        image.read_into(at, memory_of(whole))
        with torch.no_grad():
            target.copy_(part_of(whole, TensorPiece(piece.tensor, *common, 0), piece.offsets))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(raw_bytes(tensor).numpy().data)


def _missing(at: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"bytes {at} to {at + size} of a state are in no file of the checkpoint",
        expected="a checkpoint that is whole",
        next_step="elastane checkpoint verify FOLDER",
        slug="checkpoint-layout",
    )


@dataclass(frozen=True)
class Parcel:
    """Adjacent pieces, and the rank that sends them."""

    source: int
    pieces: list[TensorPiece]
    first: int
    end: int


def gather(
    layout: Layout,
    own: ByteSource | None,
    spans: Sequence[Spans],
    destinations: Sequence[Destination],
    members: Members,
    shown: ShownProgress | None = None,
) -> None:
    """Fill the destinations. `own` is readable by this rank; `spans` are those of all ranks."""
    wanted, why = list[ReadRequest](), ""
    try:
        wanted = requests_of(layout, destinations)
    except CheckpointError as error:
        why = str(error)
    mine = spans[members.rank]
    near = [each for each in wanted if _has(mine, layout, each.piece)]
    far: dict[int, list[ReadRequest]] = {}
    for each in wanted:
        if not _has(mine, layout, each.piece):
            far.setdefault(each.piece.at, []).append(each)
    lacked = _exchange(members, [*far], why)
    if own is not None:
        fill_requests(layout, counted(own, shown), near)
    _receive(layout, own, [*parcels(layout, lacked, spans)], far, members, shown)


def _exchange(members: Members, lacked: list[int], why: str) -> set[int]:
    """Return the offsets of pieces that some rank lacks; CheckpointError if one has failed."""
    received = members.texts(msgspec.msgpack.encode((why, lacked)))
    decoded = [msgspec.msgpack.decode(each, type=tuple[str, list[int]]) for each in received]
    reason = next((reason for reason, _ in decoded if reason), "")
    if reason:
        raise CheckpointError(
            reason,
            expected="a checkpoint that has the values that the ranks need",
            next_step="restore it with the model that it was saved of",
            slug="checkpoint-layout",
        )
    return {at for _, some in decoded for at in some}


def _receive(
    layout: Layout,
    own: ByteSource | None,
    coming: Sequence[Parcel],
    far: dict[int, list[ReadRequest]],
    members: Members,
    shown: ShownProgress | None,
) -> None:
    failure: Exception | None = None
    for parcel in coming:
        arrived = ReceivedBytes(parcel.end - parcel.first, parcel.first)
        if parcel.source == members.rank and own is not None:
            try:
                read_parts(own, parcel.first, memory_of(arrived.data))
            except (OSError, CheckpointError) as error:
                failure = error  # The other ranks are in the collective already.
        members.spread(arrived.data, parcel.source)
        mine = [w for p in parcel.pieces for w in far.get(p.at, ())]
        fill_requests(layout, counted(arrived, shown), mine)
    if failure is not None:
        raise failure


def parcels(layout: Layout, lacked: set[int], spans: Sequence[Spans]) -> Iterator[Parcel]:
    """Group the lacking pieces into parcels, the same on all ranks."""
    parcel: Parcel | None = None
    for piece in layout.pieces:
        if piece.at not in lacked:
            continue
        source = next((n for n, some in enumerate(spans) if _has(some, layout, piece)), None)
        if source is None:
            raise CheckpointError(
                f"bytes from {piece.at} on are in no node's memory",
                expected="a snapshot that is whole on all nodes together",
                next_step="none: an older one is restored",
                slug="checkpoint-layout",
            )
        end = piece.at + layout.frame(piece).size_bytes
        if parcel is not None:
            fits = parcel.source == source and end - parcel.first <= PARCEL_BYTES
            if fits and parcel.end == piece.at:
                parcel = Parcel(source, [*parcel.pieces, piece], parcel.first, end)
                continue
            yield parcel
        parcel = Parcel(source, [piece], piece.at, end)
    if parcel is not None:
        yield parcel


def _has(spans: Spans, layout: Layout, piece: TensorPiece) -> bool:
    end = piece.at + layout.frame(piece).size_bytes
    return any(first <= piece.at and end <= until for first, until in spans)


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
    """Copies a checkpoint folder from one rank's storage to that of ranks which lack it."""

    def __init__(self, members: Members, storage: Storage, folder: str) -> None:
        self._members = members
        self._storage = storage
        self._folder = folder
        self._source = 0
        self._shown: ShownProgress | None = None

    def run(self, source: int, writers: Collection[int], step: int) -> None:
        """Copy it from rank `source` to the ranks `writers`; all ranks call it.

        Raises CheckpointError if one of them failed.
        """
        self._source, mine = source, self._members.rank == source
        content, failure = self._manifest() if mine else (b"", "")
        content = self._members.texts(content)[source]
        if content:
            writes = self._members.rank in writers
            failure = self._prepare() if writes else ""
            manifest = msgspec.msgpack.decode(content, type=_Announced)
            total_bytes = sum(record.size_bytes for record in manifest.files)
            with (
                ThreadPoolExecutor(1, thread_name_prefix="elastane-bring") as helper,
                restore_progress(f"copying step {step} to nodes", total_bytes, self._members) as to,
            ):
                self._shown = to
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
        """Remove the files of an earlier attempt."""
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
            yield self._spread(data)

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
                    yield self._spread(data)
        finally:
            wait(coming)
            if fd is not None:
                os.close(fd)

    def _spread(self, data: torch.Tensor) -> torch.Tensor:
        self._members.spread(data, self._source)
        if self._shown is not None:
            self._shown.add(data.numel())
        return data

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
                    slug="checkpoint-location",
                )
