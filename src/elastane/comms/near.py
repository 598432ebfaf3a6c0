"""Members of one machine: their short messages over the group, their memory read where it lies.

The taker reads the giver's memory by `process_vm_readv`: one copy, by the taker alone, with nothing
shared that could be left behind. The giver says where it lies and what its digest is, and may be
stopped or killed meanwhile: without the digest at the end nothing that was read is believed. Where
the kernel does not let one read the other, as in some containers, both stay with the group. It
takes two thirds of the processor time of a transfer over loopback (43 and 60 ms for 100 MB with the
digests; a ring in shared memory 52; 2026-11-21), and about the same time.

Fails as the group does; PeerLostError where the giver is gone while it is being read.
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
# The most that Linux gives; other numbers name more than one process.
_PID_MAX = 1 << 22
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a giver can be read: its process, and what lies there as a proof that it is this."""

    pid: int
    address: int
    token: bytes


_PLACE = msgspec.msgpack.Decoder(_Place)
_PID = msgspec.msgpack.Decoder(int)
_ADDRESSES = msgspec.msgpack.Decoder(list[int])


class _Area(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("count", ctypes.c_size_t))


def machine() -> int:
    """A number that is the same for all who may read each other; 0 where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = Path("/proc/self/ns/pid").readlink()  # Process ids are each namespace's own.
    except OSError:
        return 0
    found = hashlib.blake2b(f"{boot} {processes} {os.getuid()}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1 or 1


def to_take(group: ElasticGroup, peer: int) -> Channel:
    """The channel from a giver of this machine; the giver is in `to_give`."""
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
    """The channel to a taker of this machine; the taker is in `to_take`."""
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
    """One side; `pid` is the giver's where this is the taker's."""

    # It is read and digested while it is in the processor's cache.
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
        self.hear()  # The taker has read all.

    def take(self, rooms: Iterable[torch.Tensor], seen: Seen) -> Iterator[torch.Tensor]:
        """Fill flat CPU tensors of bytes, of the sizes that are put; each comes when it is full."""
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
        """Let nobody read this process any more."""
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
        f"the state of another worker of this machine cannot be read any more: {error}",
        slug="peer-lost",
        expected="a giver that lives until all was read",
        next_step="take the state again in the next world",
    )


def _allow(pid: int) -> None:
    """Let one process read this one, where Yama lets nobody; 0 is nobody."""
    # Elsewhere it is an unknown option, and no matter.
    _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
