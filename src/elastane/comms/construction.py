"""One construction of a process group, which can be aborted while torch waits in it.

Owns the store's connection, the creation of the gloo (and NCCL) groups, and the list of their
sockets. Three things can block it, and each has its remedy. The store's client is interrupted. A
connection to a peer is cut. For a peer that does not connect, this worker connects to its own
listener in the peer's name. It does not know what the group is for. It fails as torch does, with
RuntimeError.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName

from elastane.comms import sockets
from elastane.comms.sockets import Endpoint, SocketEntry, parse_entry
from elastane.comms.storeclient import GroupStoreClient
from elastane.errors import ConfigurationError

# Pause between two cuts of an aborted construction: connections come and go meanwhile.
_CUT_AGAIN_S = 0.005

_CUT_RARELY_S = 0.1

_KNOCKS_MAX = 20

# torch's default for one device.
_THREADS = 2

# Timeout for connecting to the own listener, on this host.
_KNOCK_S = 0.2

_GLOO_PREFIX = "gloo/"


@dataclass(frozen=True)
class Wiring:
    """The place of one worker in one world, and the address of the world's store.

    `fence` (round and attempt, as text) prefixes every key. `timeout_s` bounds the construction and
    every operation; it is the last resort, since losses are normally noticed earlier. `bind_addr`
    is the address to listen at; by default it is the one from which the store is reached. `serves`:
    this worker serves the store for as long as its world lasts, since no other process does.
    `members`: for a group of only some of a world's workers, their ranks in the world, in the order
    of this group's ranks. `device_type`: where the members' tensors are; `backend`, "nccl" or
    "gloo", takes those of "cuda". gloo copies them through the host.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    fence: str
    timeout_s: float = 1800.0
    device_type: str = "cpu"
    backend: str = "gloo"
    bind_addr: str = ""
    serves: bool = False
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)
        assert self.timeout_s > 0, self.timeout_s

    @property
    def uses_nccl(self) -> bool:
        """Whether collectives of tensors on a GPU are NCCL's."""
        return self.device_type == "cuda" and self.backend == "nccl"


class Made(NamedTuple):
    """The result of a construction.

    `aside`: a second gloo context between the same members, whose collectives are not ordered with
    those of `group`. None for a group of one, or of only some of a world's members.
    """

    group: ProcessGroup
    store: Store
    aside: ProcessGroupGloo | None


class Construction:
    """`run` makes the group; `end`, from any other thread, makes `run` return from any wait."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._meeting: MeetingStore | None = None
        self._ended = False
        self._over = threading.Event()
        # The store's connection, and those of the finished group.
        self.client: GroupStoreClient | None = None
        self.server: Store | None = None
        self.inodes: set[int] = set()

    def run(self) -> Made:
        """Make the group, its store and the second context."""
        try:
            store = self._reach_store()
            # One device for both contexts: they listen at one address, which identifies all of
            # their connections.
            device = _device(self._wiring)
            group = self._assemble(store, device)
            aside = self._aside(store, device)
            self.inodes = self._gloo_inodes()
            return Made(group, store, aside)
        except BaseException:
            if self.client is not None:
                self.client.close()
            raise
        finally:
            self._meeting = None
            self._over.set()

    def end(self) -> None:
        """Make `run` fail soon; returns at once."""
        self._ended = True
        if self.client is not None:
            self.client.interrupt()
        if not self._over.is_set():
            threading.Thread(target=self._cut_until_over, name="elastane-cut", daemon=True).start()

    def _cut_until_over(self) -> None:
        deadline = time.monotonic() + self._wiring.timeout_s
        knocks = 0
        pause_s = _CUT_AGAIN_S
        while time.monotonic() < deadline:
            meeting = self._meeting
            if meeting is not None:
                meeting.aborted = True
                # Connect several times: a connection may be cut before gloo has read which peer it
                # is for.
                if meeting.own is not None and knocks < _KNOCKS_MAX:
                    knocks += 1
                    sockets.knock(meeting.own, _KNOCK_S)
                peers = self._peers(meeting)
                sockets.cut(self._gloo_inodes() | sockets.connecting(peers))
            if self._over.wait(pause_s):
                return
            pause_s = min(_CUT_RARELY_S, pause_s * 1.5)

    def _gloo_inodes(self) -> set[int]:
        meeting = self._meeting
        if meeting is None or meeting.own is None:
            return set()
        return sockets.inodes(sockets.belongs_to(meeting.own.listener, self._peers(meeting)))

    def _peers(self, meeting: MeetingStore) -> set[Endpoint]:
        return {peer.listener for peer in list(meeting.peers)}

    def _reach_store(self) -> Store:
        wiring = self._wiring
        if wiring.world_size == 1:
            return HashStore()
        if wiring.serves:
            self.server = self._native_store(is_master=True)
        client = GroupStoreClient(wiring.master_addr, wiring.master_port, wiring.timeout_s)
        self.client = client
        if self._ended:
            client.interrupt()
        client.open()
        return PrefixStore(wiring.fence, client)

    def _assemble(self, store: Store, device: ProcessGroupGloo.Device) -> ProcessGroup:
        wiring = self._wiring
        group = ProcessGroup(store, wiring.rank, wiring.world_size)
        kind = ProcessGroup.BackendType
        group._set_default_backend(kind.NCCL if wiring.uses_nccl else kind.GLOO)
        gloo = self._gloo(store, device, _THREADS)
        group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
        if wiring.uses_nccl:
            group._register_backend(torch.device("cuda"), kind.NCCL, self._nccl())
        elif wiring.device_type == "cuda":
            group._register_backend(torch.device("cuda"), kind.GLOO, gloo)
        group._set_group_name(GroupName(f"elastane/{wiring.fence}"))
        return group

    def _aside(self, store: Store, device: ProcessGroupGloo.Device) -> ProcessGroupGloo | None:
        if self._wiring.world_size == 1 or self._wiring.members:
            return None
        return self._gloo(PrefixStore("aside", store), device, _THREADS)

    def _gloo(
        self, store: Store, device: ProcessGroupGloo.Device, threads: int
    ) -> ProcessGroupGloo:
        wiring = self._wiring
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=wiring.timeout_s)
        options._threads = threads
        self._meeting = meeting = MeetingStore(store)
        meeting.aborted = self._ended
        return ProcessGroupGloo(meeting, wiring.rank, wiring.world_size, options)

    def _nccl(self) -> TorchBackend:
        """Make NCCL's group; its communicators are made by the first collective.

        Its watchdog queries the store from threads of its own, so it gets torch's client, without
        Python.
        """
        from torch.distributed import ProcessGroupNCCL

        wiring = self._wiring
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=wiring.timeout_s)
        alone = wiring.world_size == 1
        store = HashStore() if alone else self._native_store(is_master=False)
        prefixed = PrefixStore(f"{wiring.fence}/nccl", store)
        return ProcessGroupNCCL(prefixed, wiring.rank, wiring.world_size, options)

    def _native_store(self, *, is_master: bool) -> Store:
        """Return torch's own store: as the server, or as a client of it."""
        return TCPStore(
            *(self._wiring.master_addr, self._wiring.master_port),
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._wiring.timeout_s),
        )


def _device(wiring: Wiring) -> ProcessGroupGloo.Device:
    """Return the device to listen at: the given address, else the one facing the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wiring.bind_addr:
        return ProcessGroupGloo.create_device(hostname=wiring.bind_addr)
    if interface:
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    local = _local_addr(wiring) if wiring.world_size > 1 else "127.0.0.1"
    # On the master's own host its name may resolve to a loopback address, at which other hosts
    # cannot reach this one.
    if local and (wiring.world_size == 1 or not _is_loopback(local)):
        return ProcessGroupGloo.create_device(hostname=local)
    return ProcessGroupGloo.create_default_device()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _local_addr(wiring: Wiring) -> str:
    for family, kind, protocol, _, where in socket.getaddrinfo(
        wiring.master_addr, wiring.master_port, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as sock:
            try:
                sock.connect(where)  # sends nothing: queries the routing table
                return str(sock.getsockname()[0])
            except OSError:
                continue
    return ""


class MeetingStore(Store):
    """The store that gloo sees during one construction: it records addresses, and can be aborted.

    gloo asks a store for its peers' addresses while it is being built. This one forwards all calls
    to the store `inner`, and refuses them once the world was aborted. Fails as the inner store
    does. An address that cannot be read raises ConfigurationError: gloo would crash on it, or its
    collectives could not be aborted later.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.own: SocketEntry | None = None
        self.peers: list[SocketEntry] = []
        self.aborted = False

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a key; this rank's own value contains the address where it listens."""
        self._refuse_if_aborted()
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.own = _entry(raw)
        self._inner.set(_GLOO_PREFIX + key, raw)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key, and record the address in it."""
        self.wait([key])
        raw = bytes(self._inner.get(_GLOO_PREFIX + key))
        self.peers.append(_entry(raw))
        return raw

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait for keys."""
        self._refuse_if_aborted()
        names = [_GLOO_PREFIX + key for key in keys]
        if limit is None:
            self._inner.wait(names)
        else:
            self._inner.wait(names, limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._refuse_if_aborted()
        return self._inner.check([_GLOO_PREFIX + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._refuse_if_aborted()
        return self._inner.add(_GLOO_PREFIX + key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._inner.delete_key(_GLOO_PREFIX + key)

    def set_timeout(self, limit: timedelta) -> None:
        """Bound later waits."""
        self._inner.set_timeout(limit)

    def _refuse_if_aborted(self) -> None:
        if self.aborted:
            raise RuntimeError("the world was aborted while its process group was being built")


def _entry(raw: bytes) -> SocketEntry:
    entry = parse_entry(raw)
    if entry is None:
        raise ConfigurationError(
            f"torch {torch.__version__}: the address that gloo published cannot be read"
            f" ({len(raw)} bytes)",
            slug="group-layout",
            expected="a PyTorch that this version of elastane knows, the same on all nodes",
            next_step="install torch 2.13, or a newer elastane",
        )
    return entry
