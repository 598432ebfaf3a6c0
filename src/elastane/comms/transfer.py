"""State from one donor to receivers, over a process group.

Bytes go in chunks through two small buffers, so neither side holds the state twice; a digest of
all that was sent comes last. A receiver has the state only when `receive` returned: whatever
raises before that leaves it without, and what it was receiving into is then void.

Sends and receives of the group are used, and raise as the group does. StateError where what came
is not what was sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed import ProcessGroup, Work

from elastane.comms.digest import DIGEST_BYTES, fold, raw_bytes
from elastane.comms.state import build, flatten
from elastane.errors import StateError

CHUNK_BYTES = 8 << 20
_TAG = 0x5717
_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 1 << 30


class _Header(msgspec.Struct, frozen=True):
    tree: bytes
    tensors: list[tuple[str, list[int], str]]


def send(
    group: ProcessGroup,
    state: object,
    receivers: Sequence[int],
    pace: Callable[[int], None] | None = None,
) -> int:
    """Send `state` to the ranks `receivers`; how many bytes of tensors each got.

    `pace` is called after each chunk with its bytes, and may sleep. The state must not change
    meanwhile.
    """
    tree, tensors = flatten(state)
    header = msgspec.msgpack.encode(
        _Header(tree, [(_name(t.dtype), list(t.shape), t.device.type) for t in tensors])
    )
    length = torch.tensor(list(len(header).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)
    _send_all(group, length, receivers)
    _send_all(group, torch.frombuffer(bytearray(header), dtype=torch.uint8), receivers)
    digest = hashlib.blake2b(header, digest_size=DIGEST_BYTES)
    sent = 0
    pending: list[Work] = []
    for chunk in _chunks(tensors):
        digest.update(fold(chunk))
        for work in pending:
            work.wait()
        pending = [group.send([chunk], rank, _TAG) for rank in receivers]
        sent += chunk.numel()
        if pace is not None:
            pace(chunk.numel())
    for work in pending:
        work.wait()
    _send_all(group, torch.tensor(list(digest.digest()), dtype=torch.uint8), receivers)
    return sent


def receive(group: ProcessGroup, donor: int, into: object = None) -> Any:
    """The state that the rank `donor` sends.

    Tensors of `into` are filled in place where kind and shape are those that come; the others are
    made. Raises StateError where what came is not whole.
    """
    length = int.from_bytes(bytes(_take(group, _LENGTH_BYTES, donor).numpy()), "little")
    if length > _HEADER_BYTES_MAX:
        raise _unreadable(f"a header of {length} bytes")
    raw = bytes(_take(group, length, donor).numpy())
    try:
        header = msgspec.msgpack.decode(raw, type=_Header)
    except msgspec.DecodeError as error:
        raise _unreadable(str(error)) from error
    tensors = _places(header, [] if into is None else flatten(into)[1])
    digest = hashlib.blake2b(raw, digest_size=DIGEST_BYTES)
    _fill(group, donor, tensors, digest.update)
    announced = bytes(_take(group, DIGEST_BYTES, donor).numpy())
    if not hmac.compare_digest(announced, digest.digest()):
        raise StateError(
            f"the state of rank {donor} did not arrive as it was sent: digest"
            f" {digest.hexdigest()}, announced {announced.hex()}",
            slug="state-digest",
            expected="equal digests",
            next_step="receive the state again",
        )
    return build(header.tree, tensors)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors in turn, in one of two buffers; each is free after the next."""
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
    which = at = 0
    for tensor in tensors:
        data, start = raw_bytes(tensor), 0
        while start < data.numel():
            count = min(CHUNK_BYTES - at, data.numel() - start)
            buffers[which][at : at + count].copy_(data[start : start + count])
            at, start = at + count, start + count
            if at == CHUNK_BYTES:
                yield buffers[which]
                which, at = 1 - which, 0
    if at:
        yield buffers[which][:at]


def _fill(
    group: ProcessGroup, donor: int, tensors: Sequence[torch.Tensor], seen: Callable[[bytes], None]
) -> None:
    left = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    chunk, at = torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        data, start = raw_bytes(tensor), 0
        while start < data.numel():
            if at == chunk.numel():
                chunk, at = _take(group, min(CHUNK_BYTES, left), donor), 0
                seen(fold(chunk))
                left -= chunk.numel()
            count = min(chunk.numel() - at, data.numel() - start)
            data[start : start + count].copy_(chunk[at : at + count])
            at, start = at + count, start + count
        if data.data_ptr() != tensor.data_ptr():
            # It was not contiguous, and `data` a copy.
            tensor.copy_(data.view(tensor.dtype).reshape(tensor.shape))


def _places(header: _Header, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    places = []
    for number, (name, shape, device) in enumerate(header.tensors):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
            raise _unreadable(f"a tensor of {name} {shape}")
        old = given[number] if number < len(given) else None
        if old is not None and old.dtype == dtype and list(old.shape) == shape:
            places.append(old)
        else:
            places.append(torch.empty(shape, dtype=dtype, device=device))
    return places


def _take(group: ProcessGroup, count: int, donor: int) -> torch.Tensor:
    data = torch.empty(count, dtype=torch.uint8)
    group.recv([data], donor, _TAG).wait()
    return data


def _send_all(group: ProcessGroup, data: torch.Tensor, receivers: Sequence[int]) -> None:
    for work in [group.send([data], rank, _TAG) for rank in receivers]:
        work.wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unreadable(what: str) -> StateError:
    return StateError(
        f"the state that a donor sent cannot be read: {what}",
        slug="state-wire",
        expected="what another worker of this version of elastane sends",
        next_step="run the same version on all nodes",
    )
