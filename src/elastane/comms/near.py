"""Transfer between members of one machine: the receiver reads the giver's memory directly.

Messages go over the group. The receiver reads the giver's memory by `process_vm_readv`: one copy,
and nothing shared that could be left behind. The giver sends addresses and a digest. It may be
stopped or killed meanwhile: without the digest at the end, the data read is discarded. If the
kernel forbids reading, as in some containers, both sides use the group. It takes two thirds of the
processor time of a transfer over loopback (43 and 60 ms for 100 MB with the digests; a ring in
shared memory 52; 2026-11-21), and about the same time.

Fails as the group does; PeerLostError if the giver disappears while it is being read.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from elastane.comms.channel import Channel, GroupChannel, Seen, decoded, unreadable
from elastane.comms.elastic import ElasticGroup
from elastane.errors import PeerLostError

_TOKEN_BYTES = 16
_YES = b"\1"
_PR_SET_PTRACER = 0x59616D61
# Linux gives no higher pids; other numbers name several processes.
_PID_MAX = 1 << 22
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a giver can be read: its process, and a token that proves it is that process."""

    pid: int
    address: int
    token: bytes


_PLACE = msgspec.msgpack.Decoder(_Place)
_PID = msgspec.msgpack.Decoder(int)
_ADDRESSES = msgspec.msgpack.Decoder(list[int])


class _Area(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("count", ctypes.c_size_t))


def machine() -> int:
    """Return a number that is equal for processes that may read each other; 0 if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Process ids are only unique within a namespace.
        processes = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return 0
    found = hashlib.blake2b(f"{boot} {processes} {os.getuid()}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1 or 1


def to_take(group: ElasticGroup, peer: int) -> Channel:
    """Return the channel from a giver of this machine, which calls `to_give`."""
    over = GroupChannel(group, peer)
    over.say(msgspec.msgpack.encode(os.getpid()))
    place = decoded(over.hear(), _PLACE)
    found = torch.empty(_TOKEN_BYTES, dtype=torch.uint8)
    try:
        _read(place.pid, place.address, found)
    except OSError:
        found.zero_()
    is_read = bytes(found.numpy()) == place.token
    over.say(_YES if is_read else b"")
    return NearChannel(over, place.pid) if is_read else over


def to_give(group: ElasticGroup, peer: int) -> Channel:
    """Return the channel to a receiver of this machine, which calls `to_take`."""
    over = GroupChannel(group, peer)
    reader = decoded(over.hear(), _PID)
    if not 0 < reader <= _PID_MAX:
        raise unreadable(f"process {reader}")
    _allow(reader)
    token = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    place = _Place(os.getpid(), token.data_ptr(), bytes(token.numpy()))
    over.say(msgspec.msgpack.encode(place))
    return NearChannel(over, 0) if over.hear() else over


class NearChannel:
    """One end; `pid` is the giver's, on the receiver's side."""

    # Small enough to be digested while it is in the processor's cache.
    parcel_bytes = 1 << 20

    def __init__(self, over: GroupChannel, pid: int) -> None:
        self._over, self._pid = over, pid

    def say(self, raw: bytes) -> None:
        """Send a message."""
        self._over.say(raw)

    def hear(self) -> bytes:
        """Wait for a message."""
        return self._over.hear()

    def put(self, data: Iterable[torch.Tensor], seen: Seen) -> None:
        """Send flat CPU tensors of bytes; they must not change until this returns."""
        held = list(data)
        self.say(msgspec.msgpack.encode([each.data_ptr() for each in held]))
        for each in held:
            seen(each)
        self.hear()  # The receiver has read all.

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Receive into flat CPU tensors of bytes, of the sizes sent; yield each when it is full."""
        addresses = decoded(self.hear(), _ADDRESSES)
        for number, room in enumerate(rooms):
            if number == len(addresses):
                raise unreadable(f"{number} places of more")
            try:
                _read(self._pid, addresses[number], room)
            except OSError as error:
                raise _lost(error) from error
            seen(room)
            yield room
        self.say(_YES)

    def close(self) -> None:
        """Forbid other processes to read this one again."""
        _allow(0)


def _read(pid: int, address: int, room: torch.Tensor) -> None:
    """Fill a flat CPU tensor from another process; raises OSError."""
    done = 0
    while done < room.numel():
        here = _Area(room.data_ptr() + done, room.numel() - done)
        there = _Area(address + done, room.numel() - done)
        count = _LIBC.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += count


def _lost(error: OSError) -> PeerLostError:
    return PeerLostError(
        f"the memory of another worker of this machine can no longer be read: {error}",
        slug="peer-lost",
        expected="a giver that lives until its state was read",
        next_step="receive the state again in the next world",
    )


def _allow(pid: int) -> None:
    """Allow one process to read this one, if Yama restricts that; 0 is no process."""
    # Without Yama the option is unknown, and reading is not restricted.
    _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
