"""Transfers state over channels from its holders to a member that lacks it, or part of it.

The receiver controls the transfer. Each giver sends a catalogue with a probe of each tensor. If a
probe equals that of the receiver's own tensor, digests show whether the whole tensor is equal. Only
differing tensors are requested, a stripe from each giver, and written into the receiver's memory. A
digest of all that was sent comes last. The receiver has the state only when `take` has returned. An
exception before that leaves it without, and the memory it was receiving into is void.

Channels raise as they do; StateError if the data differ from what was sent, or cannot be read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from elastane.comms.channel import Channel, decoded, unreadable
from elastane.comms.digest import DIGEST_BYTES, PROBE_BYTES, fold, probe, raw_bytes
from elastane.comms.state import Parts, build, flatten
from elastane.comms.state_plan import Piece, stripes
from elastane.errors import StateError

# The most elements of one tensor.
_SIZE_MAX = 1 << 40

# Smaller pieces of tensors share a parcel.
_SMALL_BYTES = 1 << 18


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]
    device: str


class _Catalogue(msgspec.Struct, frozen=True, array_like=True):
    tree: bytes
    specs: list[_Spec]
    probes: bytes


class _Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The receiver asks for digests of these tensors."""

    tensors: list[int]


class _Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """The receiver asks for these pieces, as its last request."""

    pieces: list[Piece]


_CATALOGUE = msgspec.msgpack.Decoder(_Catalogue)

_WANT = msgspec.msgpack.Decoder(_Want)

_FROM_RECEIVER: msgspec.msgpack.Decoder[_Ask | _Want] = msgspec.msgpack.Decoder(_Ask | _Want)


@dataclass(frozen=True)
class StateTaken:
    """The result of `take`: the state, the bytes received, and the names of tensors that differed.

    Tensors that the receiver did not have count as differing.
    """

    state: Any
    bytes_sent: int
    differed: list[str]


def give(channel: Channel, state: object) -> int:
    """Send the parts of `state` that the receiver requests; it must not change meanwhile.

    Returns how many bytes of tensors were sent.
    """
    parts = flatten(state)
    tree, tensors = parts.tree, parts.tensors
    memory = TensorMemory(tensors)
    specs = [
        _Spec(name, _name(t.dtype), list(t.shape), t.device.type)
        for name, t in zip(parts.names, tensors, strict=True)
    ]
    catalogue = msgspec.msgpack.encode(_Catalogue(tree, specs, b"".join(map(probe, memory.flat))))
    channel.say(catalogue)
    asked: _Ask | _Want = decoded(channel.hear(), _FROM_RECEIVER)
    if isinstance(asked, _Ask):
        channel.say(b"".join(fold(memory.flat[n]) for n in _numbers(asked, memory)))
        asked = decoded(channel.hear(), _WANT)
    assert isinstance(asked, _Want), "the decoder accepts only _Want"
    pieces = _checked(asked.pieces, memory)
    digest = hashlib.blake2b(catalogue, digest_size=DIGEST_BYTES)
    channel.put(
        map(memory.gather, parcels(pieces, channel.parcel_bytes)),
        lambda part: digest.update(fold(part)),
    )
    channel.say(digest.digest())
    return sum(stop - start for _, start, stop in pieces)


def take(
    channels: Sequence[Channel],
    into: object = None,
    *,
    room: Sequence[torch.Tensor] = (),
    when_writing: Callable[[], None] = lambda: None,
) -> StateTaken:
    """Receive the state that all givers hold; each of them must call `give`.

    Tensors of `into` are overwritten in place if name, dtype and shape match those received.
    Otherwise a matching tensor of `room` is used, or a new one. `when_writing` is called before the
    first tensor of `into` is changed.
    """
    raws = [channel.hear() for channel in channels]
    catalogues = [decoded(raw, _CATALOGUE) for raw in raws]
    mine = flatten(into) if into is not None else Parts(b"", [], [])
    tensors, known = _destinations(catalogues[0], mine, room)
    memory = TensorMemory(tensors)
    equal = _equal(channels[0], catalogues[0], memory, known)
    wants = _pieces_to_ask(catalogues, memory, equal)
    if any(wants):
        when_writing()
    for channel, pieces in zip(channels, wants, strict=True):
        channel.say(msgspec.msgpack.encode(_Want(pieces)))
    digests = [hashlib.blake2b(raw, digest_size=DIGEST_BYTES) for raw in raws]
    rows = zip(channels, wants, digests, strict=True)
    _round_robin([_filled(channel, memory, pieces, digest) for channel, pieces, digest in rows])
    for channel, digest in zip(channels, digests, strict=True):
        _compare(channel.hear(), digest.digest())
    memory.finish()
    return StateTaken(
        build(catalogues[0].tree, tensors),
        sum(stop - start for pieces in wants for _, start, stop in pieces),
        [spec.name for number, spec in enumerate(catalogues[0].specs) if number not in equal],
    )


def _filled(
    channel: Channel, memory: TensorMemory, pieces: list[Piece], digest: hashlib.blake2b
) -> Iterator[None]:
    cut = list(parcels(pieces, channel.parcel_bytes))
    rooms = channel.take(map(memory.buffer_for, cut), lambda part: digest.update(fold(part)))
    for parcel, room in zip(cut, rooms, strict=True):  # strict runs the channel to its end
        memory.scatter(parcel, room)
        yield


def _round_robin(several: list[Iterator[Any]]) -> None:
    """Advance all iterators in turn, one step each, until all are exhausted."""
    ended = object()
    while several:
        several = [each for each in several if next(each, ended) is not ended]


def _destinations(
    catalogue: _Catalogue, mine: Parts, room: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], set[int]]:
    """Return where to write each tensor, and the numbers of those that are the receiver's own."""
    own = dict(zip(mine.names, mine.tensors, strict=True))
    free: dict[tuple[torch.dtype, tuple[int, ...], str], list[torch.Tensor]] = {}
    for each in room:
        free.setdefault((each.dtype, tuple(each.shape), each.device.type), []).append(each)
    places, known = [], set()
    for number, spec in enumerate(catalogue.specs):
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype) or not _is_shape(spec.shape):
            raise unreadable(f"a tensor of {spec.dtype} {spec.shape}")
        kind = dtype, tuple(spec.shape), spec.device
        live = own.get(spec.name)
        if live is not None and (live.dtype, tuple(live.shape), live.device.type) == kind:
            places.append(live)
            known.add(number)
        elif free.get(kind):
            places.append(free[kind].pop())
        else:
            places.append(torch.empty(spec.shape, dtype=dtype, device=spec.device))
    return places, known


def _is_shape(shape: list[int]) -> bool:
    count = 1
    for size in shape:
        count *= size
    return all(size >= 0 for size in shape) and count <= _SIZE_MAX


def _equal(channel: Channel, theirs: _Catalogue, memory: TensorMemory, known: set[int]) -> set[int]:
    """Return the numbers of the tensors that the receiver already has."""
    if len(theirs.probes) != len(theirs.specs) * PROBE_BYTES:
        raise unreadable(f"{len(theirs.probes)} bytes of probes of {len(theirs.specs)} tensors")
    asked = [
        number
        for number in sorted(known)
        if probe(memory.flat[number]) == _probe_of(theirs, number)
    ]
    if not asked:
        return set()
    channel.say(msgspec.msgpack.encode(_Ask(asked)))
    own = [fold(memory.flat[number]) for number in asked]
    digests = channel.hear()
    if len(digests) != len(asked) * DIGEST_BYTES:
        raise unreadable(f"{len(digests)} bytes of digests of {len(asked)} tensors")
    return {
        number
        for at, number in enumerate(asked)
        if digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] == own[at]
    }


def _pieces_to_ask(
    catalogues: Sequence[_Catalogue], memory: TensorMemory, equal: set[int]
) -> list[list[Piece]]:
    first = catalogues[0]
    sizes = [0 if number in equal else flat.numel() for number, flat in enumerate(memory.flat)]
    same = [
        [
            each.specs == first.specs and _probe_of(each, number) == _probe_of(first, number)
            for number in range(len(sizes))
        ]
        for each in catalogues
    ]
    return stripes(sizes, same)


def _probe_of(catalogue: _Catalogue, number: int) -> bytes:
    return catalogue.probes[number * PROBE_BYTES : (number + 1) * PROBE_BYTES]


def _numbers(asked: _Ask, memory: TensorMemory) -> list[int]:
    if any(not 0 <= number < len(memory.flat) for number in asked.tensors):
        raise unreadable(f"digests of {asked.tensors} of {len(memory.flat)} tensors")
    return asked.tensors


def _checked(pieces: list[Piece], memory: TensorMemory) -> list[Piece]:
    for number, start, stop in pieces:
        size = memory.flat[number].numel() if 0 <= number < len(memory.flat) else -1
        if not 0 <= start < stop <= size:
            raise unreadable(f"bytes {start} to {stop} of tensor {number} of {size} bytes")
    return pieces


def _compare(announced: bytes, found: bytes) -> None:
    if not hmac.compare_digest(announced, found):
        raise StateError(
            f"the state did not arrive as it was sent: digest {found.hex()},"
            f" announced {announced[:DIGEST_BYTES].hex()}",
            slug="state-digest",
            expected="equal digests",
            next_step="receive the state again",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parcels(pieces: Iterable[Piece], parcel_bytes: int) -> Iterator[list[Piece]]:
    """Yield the contents of each parcel: a part of one tensor, or several small ones.

    Both sides cut the same pieces into the same parcels.
    """
    small: list[Piece] = []
    held = 0
    for number, start, stop in pieces:
        if stop - start >= min(_SMALL_BYTES, parcel_bytes):
            for at in range(start, stop, parcel_bytes):
                yield [(number, at, min(at + parcel_bytes, stop))]
            continue
        if held + stop - start > parcel_bytes:
            yield small
            small, held = [], 0
        small.append((number, start, stop))
        held += stop - start
    if small:
        yield small


class TensorMemory:
    """The bytes of `tensors`, each contiguous; call `finish` after they were written.

    Contiguous memory of the CPU is sent and received directly. Small or scattered pieces, and those
    of a device, go through a buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.flat = [raw_bytes(tensor) for tensor in tensors]

    def part(self, piece: Piece) -> torch.Tensor:
        """Return the bytes of a piece, without a copy."""
        number, start, stop = piece
        return self.flat[number][start:stop]

    def gather(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """Return the bytes of a parcel on the CPU; a copy only if they are not contiguous there."""
        parts = [self.part(piece).cpu() for piece in parcel]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def buffer_for(self, parcel: Sequence[Piece]) -> torch.Tensor:
        """Return a tensor to receive a parcel into; `scatter` moves the bytes to their tensors."""
        if len(parcel) == 1:
            part = self.part(parcel[0])
            if part.device.type == "cpu":
                return part
        return torch.empty(sum(stop - start for _, start, stop in parcel), dtype=torch.uint8)

    def scatter(self, parcel: Sequence[Piece], buffer: torch.Tensor) -> None:
        """Move the bytes of a parcel to their tensors."""
        at = 0
        for piece in parcel:
            part = self.part(piece)
            if part.data_ptr() != buffer.data_ptr():
                part.copy_(buffer[at : at + part.numel()])
            at += part.numel()

    def finish(self) -> None:
        """Write back tensors that are not contiguous."""
        for tensor, data in zip(self.tensors, self.flat, strict=True):
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))
