"""State from those who hold it to one who does not, or not quite, over channels.

The receiver asks: each giver says what it has, with a probe of each tensor; where a probe is that
of the receiver's own tensor, digests tell whether the whole is, and only what differs is wanted, a
stripe from each giver. It is written where the receiver's tensors lie; a digest of all that was
sent comes last. A receiver has the state only when `take` returned: whatever raises before leaves
it without, and what it was receiving into is then void.

Channels raise as they do; StateError where what came is not what was sent, or cannot be read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from elastane.comms.channel import Channel, decoded, unreadable
from elastane.comms.digest import DIGEST_BYTES, PROBE_BYTES, fold, probe
from elastane.comms.memory import TensorMemory, parcels
from elastane.comms.state import Parts, build, flatten
from elastane.comms.state_plan import Piece, stripes
from elastane.errors import StateError

# Numbers in one tensor.
_SIZE_MAX = 1 << 40


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
    """Of these tensors the receiver wants digests."""

    tensors: list[int]


class _Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """These pieces the receiver wants, and then no more."""

    pieces: list[Piece]


_CATALOGUE = msgspec.msgpack.Decoder(_Catalogue)
_WANT = msgspec.msgpack.Decoder(_Want)
_FROM_TAKER: msgspec.msgpack.Decoder[_Ask | _Want] = msgspec.msgpack.Decoder(_Ask | _Want)


@dataclass(frozen=True)
class StateTaken:
    """What `take` found: the state, how many bytes came, and which tensors were not equal.

    Tensors that the receiver did not have are among the latter.
    """

    state: Any
    bytes_sent: int
    differed: list[str]


def give(channel: Channel, state: object) -> int:
    """Give the other side what it wants of `state`, which must not change meanwhile.

    Returns how many bytes of tensors that were.
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
    asked: _Ask | _Want = decoded(channel.hear(), _FROM_TAKER)
    if isinstance(asked, _Ask):
        channel.say(b"".join(fold(memory.flat[n]) for n in _numbers(asked, memory)))
        asked = decoded(channel.hear(), _WANT)
    assert isinstance(asked, _Want), "what the decoder is for"
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
    """The state that all givers hold; each of them is in `give`.

    Tensors of `into` are filled in place where name, kind and shape are those that come; else one
    of `room` that fits is used, else one is made. `when_writing` is called before the first
    tensor of `into` is changed.
    """
    raws = [channel.hear() for channel in channels]
    heard = [decoded(raw, _CATALOGUE) for raw in raws]
    mine = flatten(into) if into is not None else Parts(b"", [], [])
    tensors, known = _places(heard[0], mine, room)
    memory = TensorMemory(tensors)
    equal = _equal(channels[0], heard[0], memory, known)
    wants = _wants(heard, memory, equal)
    if any(wants):
        when_writing()
    for channel, pieces in zip(channels, wants, strict=True):
        channel.say(msgspec.msgpack.encode(_Want(pieces)))
    digests = [hashlib.blake2b(raw, digest_size=DIGEST_BYTES) for raw in raws]
    rows = zip(channels, wants, digests, strict=True)
    _in_turn([_filled(channel, memory, pieces, digest) for channel, pieces, digest in rows])
    for channel, digest in zip(channels, digests, strict=True):
        _compare(channel.hear(), digest.digest())
    memory.finish()
    return StateTaken(
        build(heard[0].tree, tensors),
        sum(stop - start for pieces in wants for _, start, stop in pieces),
        [spec.name for number, spec in enumerate(heard[0].specs) if number not in equal],
    )


def _filled(
    channel: Channel, memory: TensorMemory, pieces: list[Piece], digest: hashlib.blake2b
) -> Iterator[None]:
    cut = list(parcels(pieces, channel.parcel_bytes))
    rooms = channel.take(map(memory.room, cut), lambda part: digest.update(fold(part)))
    for parcel, room in zip(cut, rooms, strict=True):  # Strict: the channel comes to its end.
        memory.settle(parcel, room)
        yield


def _in_turn(several: list[Iterator[Any]]) -> None:
    """Go through all at once, a step of each at a time."""
    ended = object()
    while several:
        several = [each for each in several if next(each, ended) is not ended]


def _places(
    catalogue: _Catalogue, mine: Parts, room: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], set[int]]:
    """Where each tensor is to be; and which of those are the receiver's own, by number."""
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
    """Which tensors the receiver has already, by number."""
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
    heard = channel.hear()
    if len(heard) != len(asked) * DIGEST_BYTES:
        raise unreadable(f"{len(heard)} bytes of digests of {len(asked)} tensors")
    return {
        number
        for at, number in enumerate(asked)
        if heard[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] == own[at]
    }


def _wants(heard: Sequence[_Catalogue], memory: TensorMemory, equal: set[int]) -> list[list[Piece]]:
    first = heard[0]
    sizes = [0 if number in equal else flat.numel() for number, flat in enumerate(memory.flat)]
    same = [
        [
            each.specs == first.specs and _probe_of(each, number) == _probe_of(first, number)
            for number in range(len(sizes))
        ]
        for each in heard
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
