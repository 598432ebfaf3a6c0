"""Makes one save: the agreement of the ranks, the copy to shared memory, the server's orders.

A save costs one exchange of a few numbers among the ranks, and one copy of this rank's share. The
inputs of a layout are exchanged once, and again when the tensors or the ranks change. How it fails:
as the collective if a rank is lost, and then nothing was saved; a fault of the storage is reported
later, by the snapshot server.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache

import msgspec
import torch
import xxhash

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copying import StateCopier
from elastane.checkpoint.layout import Chunk, Layout, lay_out
from elastane.checkpoint.plan import RankStatus, SaveDetails, SaveOrder, SavePlan, SaveShare, shares
from elastane.checkpoint.registered import RandomStreams
from elastane.checkpoint.schedule import WriteThrottle
from elastane.checkpoint.state_source import SavingWorld
from elastane.comms.digest import raw_bytes
from elastane.errors import CheckpointError
from elastane.process import environment
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import SnapshotClient, SnapshotServerSilentError
from elastane.snapshots.limits import REQUEST_TIMEOUT_S
from elastane.snapshots.messages import WriteProgress
from elastane.storage.places import FolderIdentity

_log = logging.getLogger("elastane.checkpoint")
# The longest wait for a slot: the server answers at once unless its host is overloaded.
GRANT_S = 10.0
# Each node keeps the random streams of all ranks, 11 KB each, in worlds of at most this size. In
# larger worlds a lost node's ranks restart their streams if the state is restored from memory.
STREAMS_RANKS_MAX = 64
# The longest wait for storage in a script that requires a save.
WAIT_S = 3600.0


class SaveProposal(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells the others before a save; they exchange it as numbers.

    Rank 0's `nonce` and `word` (of the save schedule) count for all.
    """

    step: int
    identity: int
    standing: int
    planned: int  # The combination that the rank has a plan for.
    busy: int
    copying: int
    copies: int  # Whether this node replicates its part.
    copied: int  # The nonces of saves whose part another node has: the later one, the earlier one.
    copied_before: int
    kept: int  # The nonce of the last save that this rank has kept.
    safe: int  # The last save that all nodes have replicated, as far as this rank knows.
    together: int  # The last save that all ranks have kept, likewise.
    nonce: int
    word: int


class Saver:
    """The saver of one rank; all ranks call the same methods in the same order."""

    def __init__(
        self, world: SavingWorld, server: SnapshotClient, where: str, place: FolderIdentity
    ) -> None:
        self._world = world
        self.server = server
        self._where = where
        self._place = place
        self._planned_for = 0
        self._shared: tuple[Layout, SaveShare] | None = None
        self._plan: SavePlan | None = None
        self.copier = StateCopier()
        self._throttle = WriteThrottle(time.monotonic)
        self.blocked_s = self.write_s = 0.0
        self._kept = self._safe = self._together = 0
        self.progress = WriteProgress()  # The server's status as of the last save.
        self._logged: set[str] = set()
        self._coming: Future[SnapshotClient] | None = None  # The connection to the next server.

    def continue_from(self, nonce: str, *, missed: bool) -> None:
        """Set the save in memory from which all ranks were restored: its nonce, "" for none.

        `missed`: at least one node has nothing of it. Then it also counts as the last save of which
        all nodes have replicas, and they are kept until a later one is replicated. Otherwise the
        servers know which save that is.
        """
        self._together = int(nonce or "0", 16)
        self._safe = self._together if missed else 0

    def agree(self, captured: Captured, order: SaveOrder, word: int) -> list[SaveProposal]:
        """Exchange proposals; raises CheckpointError if the ranks save different steps."""
        members = self._world.members()
        busy = self._is_busy() or not self._place.ask()
        busy = self._throttles(order, busy=busy) or busy
        standing = msgspec.msgpack.encode(self._standing)
        copied = [int(nonce, 16) for nonce in reversed(self.progress.copied)] + [0, 0]
        own = SaveProposal(
            step=order.step,
            identity=_hash(captured.identity()),
            standing=_hash(standing),
            planned=self._planned_for,
            busy=int(busy),
            copying=int(self.progress.copying),
            copies=int(bool(self.server.replica_address)),
            copied=copied[0],
            copied_before=copied[1],
            kept=self._kept,
            safe=self._safe,
            together=self._together,
            nonce=secrets.randbits(32) or 1,
            word=word,
        )
        agreed = [SaveProposal(*each) for each in members.numbers(msgspec.structs.astuple(own))]
        steps = [each.step for each in agreed]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {', '.join(map(str, steps))}, by rank",
                expected="save() on all ranks, at the same step",
                next_step="call it on each rank; only one of them writes what all hold",
                slug="checkpoint-ranks",
            )
        return agreed

    def finish_copy(self) -> None:
        """Wait until the state that is being copied may change."""
        self.copier.finish()

    @property
    def doubtful(self) -> Sequence[int] | None:
        """The numbers of the tensors whose dtype and shape the next save checks; None for all."""
        looks_late = self.copier.may_overlap and self.copier.may_look_late
        return self._plan.sources.doubtful if self._plan is not None and looks_late else None

    def _throttles(self, order: SaveOrder, *, busy: bool) -> bool:
        """Whether this save stays in memory to spare storage."""
        if order.reason not in ("step", "time") or not self.server.survives:
            return False
        return self._throttle.rests(self._world.fence, busy=busy)

    def _is_busy(self) -> bool:
        """Whether the snapshot server cannot take a write; reconnects if it is lost."""
        timeout_s = REQUEST_TIMEOUT_S
        while self._coming is None or self._adopt(self._coming):
            try:
                progress = self.server.progress(self._world.fence)
            except SnapshotServerSilentError:
                return True
            except ConnectionError as error:
                _log.warning("%s; what it held in memory is lost [snapshot-server-lost]", error)
            else:
                self.write_s = progress.last_write_s
                self.progress = progress
                return progress.busy
            self._plan = None
            self._kept = 0
            self._coming = connect_in_background(self._where)
            wait({self._coming}, timeout_s)
            timeout_s = 0.0  # A step waits once, even if the next server is lost as well.
        return True

    def _adopt(self, coming: Future[SnapshotClient]) -> bool:
        """Use the next server if its connection is ready."""
        if not coming.done():
            return False
        try:
            self.server = coming.result()
        except OSError as error:
            self._log_once(f"no snapshot server can be reached: {error} [snapshot-server-lost]")
            self._coming = connect_in_background(self._where)
            return False
        self._coming = None
        return True

    @property
    def _standing(self) -> RankStatus:
        replica_address = replica_address_of(self.server)
        return RankStatus(
            self.server.id, self.server.survives, self._place.known, replica_address, self._where
        )

    def save(
        self, captured: Captured, order: SaveOrder, era: int, agreed: list[SaveProposal]
    ) -> tuple[Key, bool]:
        """Copy this rank's share, and send the server its orders.

        Returns the key, and whether the save is written to storage. If storage is busy it stays in
        memory, which only helps if the server outlives the workers.
        """
        began_s = time.monotonic()
        durable = not any(each.busy for each in agreed)
        if durable:
            self._throttle.begun(self._world.fence)
        key = Key(era, *self._world.fence, order.step)
        if not durable and not self.server.survives:
            return key, False
        layout, share = self._share_out(captured, agreed)
        self._update_safe(agreed)
        nonce = agreed[0].nonce
        streams = self._streams(share)
        details = SaveDetails(
            nonce=_word(nonce),
            began_s=began_s,
            durable=durable,
            copied=not any(each.copying for each in agreed),
            safe=_word(self._safe),
            together="" if layout.replicated else _word(self._together),
        )
        buffers = self._buffers(captured) if layout.replicated else {}
        # No collective follows: a failure from here on concerns this rank alone.
        server = self.server
        if self._plan is None:
            self._plan = SavePlan(server, self._where, layout, share, captured, self._world)
        plan, sources = self._plan, self._plan.sources
        small = captured.small() if share.local == 0 else None
        slot = server.grant(GRANT_S, details.together)

        def keep(behind: bool) -> None:
            snapshot = plan.snapshot(small, streams(), key, order, details)
            server.keep(slot, snapshot, heard=behind)
            self._kept = nonce

        views = sources.views(captured.tensors, buffers)
        places = plan.slot(slot).places
        self.copier.copy(places, views, sources.late, keep, captured.are_alike)
        self.blocked_s = time.monotonic() - began_s
        return key, durable

    def _update_safe(self, agreed: list[SaveProposal]) -> None:
        """Find the last save that all nodes have replicated, and the last that all ranks have kept.

        Both must stay. A rank that has just joined adopts what the others know.
        """
        kept = {each.kept for each in agreed}
        known = self._together or max(each.together for each in agreed)
        self._together = max(kept) if len(kept) == 1 and 0 not in kept else known
        # Nodes without any count too: a save that not all have replicated is not safe.
        several = [(each.copied, each.copied_before) for each in agreed if each.copies]
        common = set.intersection(*map(set, several)) - {0} if several else set()
        # All nodes have the earlier and the later save in the same order.
        newest = next((nonce for nonce in several[0] if nonce in common), 0) if several else 0
        self._safe = newest or self._safe or max(each.safe for each in agreed)

    def close(self) -> None:
        """Disconnect from the server, which completes its writes."""
        self.copier.close()
        self.server.close()
        if self._coming is not None:
            self._coming.add_done_callback(_close_client)

    def _buffers(self, captured: Captured) -> dict[int, torch.Tensor]:
        """Return rank 0's buffers by number; those of other ranks differ and are not saved.

        DDP likewise continues with rank 0's in its next forward.
        """
        members = self._world.members()
        if members.size == 1:
            return {}
        there = {buffer.data_ptr() for buffer in self._world.buffers() if buffer.numel()}
        numbers = [n for n, t in enumerate(captured.tensors) if t.numel() and t.data_ptr() in there]
        if not numbers:
            return {}
        own = [raw_bytes(captured.tensors[number]).cpu() for number in numbers]
        packed = torch.cat(own)
        members.spread(packed, 0)
        found, at = {}, 0
        for number, data in zip(numbers, own, strict=True):
            like = captured.tensors[number]
            part = packed[at : at + data.numel()].clone()
            found[number], at = part.view(like.dtype).view(like.shape), at + data.numel()
        return found

    def _streams(self, share: SaveShare) -> Callable[[], bytes]:
        """Capture this rank's random streams; those of all ranks if another node may need them.

        Returns a function that serializes them as they are now.
        """
        members, own = self._world.members(), RandomStreams()
        several = share.parts > 1 and members.size <= STREAMS_RANKS_MAX
        if share.places == 1 and not several:
            rank = members.rank
            return lambda: msgspec.msgpack.encode([(rank, own.packed())])
        received = members.texts(own.packed())
        return lambda: msgspec.msgpack.encode([*enumerate(received)] if share.local == 0 else [])

    def _share_out(
        self, captured: Captured, agreed: list[SaveProposal]
    ) -> tuple[Layout, SaveShare]:
        """Return the layout and this rank's share; exchanged again after a change."""
        known = [(each.identity, each.standing) for each in agreed]
        wanted = _hash(msgspec.msgpack.encode(known))
        # A rank that has just joined has no share, so all ranks take part in computing it.
        if self._shared is None or any(each.planned != wanted for each in agreed):
            self._shared = None
            self._plan = None
            self._planned_for = 0
            self._shared = self._exchange(captured, known)
            self._planned_for = wanted
        return self._shared

    def _exchange(
        self, captured: Captured, known: list[tuple[int, int]]
    ) -> tuple[Layout, SaveShare]:
        members = self._world.members()
        alike = len({identity for identity, _ in known}) == 1
        own = [self._standing, [] if alike else captured.chunks, [] if alike else captured.names]
        received = [
            msgspec.msgpack.decode(each, type=tuple[RankStatus, list[Chunk], list[str]])
            for each in members.texts(msgspec.msgpack.encode(own))
        ]
        if any(names != received[0][2] for _, _, names in received):
            raise CheckpointError(
                "the ranks hold states of different parts",
                expected="the same names on all ranks, whole or sharded (DTensor)",
                next_step="save parts that differ by rank with a Checkpointer of their own each",
                slug="checkpoint-ranks",
            )
        held = [captured.chunks] if alike else [chunks for _, chunks, _ in received]
        layout = lay_out(captured.specs, held)
        places = {standing.place for standing, _, _ in received}
        if not layout.replicated and len(places) > 1:
            raise CheckpointError(
                f"{self._where}: {len(places)} different folders on the nodes, and the state is"
                " sharded over them",
                expected="a folder that all nodes share, or an object store",
                next_step="Checkpointer(where) with such a place",
                slug="checkpoint-location",
            )
        standings = [standing for standing, _, _ in received]
        if members.rank == 0 and not layout.replicated:
            self._log_once(without_copies(standings))
        return layout, shares(layout, standings)[members.rank]

    def _log_once(self, text: str) -> None:
        if text and text not in self._logged:
            self._logged.add(text)
            _log.warning("%s", text)


def connect_in_background(where: str) -> Future[SnapshotClient]:
    """Connect to the next server in a thread: it exists only once its agent has started it."""
    coming: Future[SnapshotClient] = Future()

    def connect() -> None:
        try:
            coming.set_result(SnapshotClient.connect(where, timeout_s=REQUEST_TIMEOUT_S))
        except BaseException as error:
            coming.set_exception(error)

    threading.Thread(target=connect, name="elastane-snapshots", daemon=True).start()
    return coming


def _close_client(coming: Future[SnapshotClient]) -> None:
    if coming.exception() is None:
        coming.result().close()


def require_durable(
    server: SnapshotClient, key: Key, where: str, timeout_s: float = WAIT_S
) -> None:
    """Wait until a save is durable; raises CheckpointError with the reason if it is not."""
    try:
        failure = server.wait(key, timeout_s).failure_of(key)
        reason, slug = (failure.reason, failure.slug) if failure is not None else ("", "")
    except (ConnectionError, TimeoutError) as error:
        reason, slug = str(error), "snapshot-server-lost"
    if reason:
        raise not_saved(where, f"step {key.step}: {reason}", slug)


def not_saved(where: str, reason: str, slug: str) -> CheckpointError:
    """Return the error for a save that did not become durable."""
    return CheckpointError(
        f"not saved: {reason}",
        where=where,
        expected="storage that accepts it; earlier checkpoints stay",
        next_step="repair the storage that the message names; the next save tries again",
        slug=slug,
    )


def _word(nonce: int) -> str:
    return f"{nonce:08x}" if nonce else ""


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1


def replica_address_of(server: SnapshotClient) -> str:
    """Return where a snapshot server accepts replicas, as HOST:PORT; "" if it does not."""
    host, _, port = server.replica_address.rpartition(":")
    if not port:
        return ""
    host = host or _own_host(environment.get("MASTER_ADDR"), environment.get("GROUP_RANK"))
    return f"{host}:{port}" if host else ""


@lru_cache(maxsize=8)
def _own_host(master: str, node_rank: str) -> str:
    if not master or node_rank == "0":
        return _bracketed(master or "127.0.0.1")
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            master, 9, type=socket.SOCK_DGRAM
        ):
            # Nothing is sent: connecting a UDP socket asks the kernel for its route.
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return _bracketed(str(probe.getsockname()[0]))
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def without_copies(members: Sequence[RankStatus]) -> str:
    """Return a warning about nodes whose part of the state is on no other node, or ""."""
    accepts = {member.server: bool(member.replica_address) for member in members}
    if not any(accepts.values()):
        return ""  # Replication is off.
    slug = "snapshot-replicas"
    if len(accepts) == 1:
        return (
            "--snapshot-replicas: all workers are on one node, and there is no other to hold copies"
            f" of snapshots [{slug}]"
        )
    if not all(accepts.values()):
        count = sum(not there for there in accepts.values())
        return (
            f"--snapshot-replicas: {count} of {len(accepts)} nodes have none, and what only they"
            f" hold is lost with them; give all nodes the same options [{slug}]"
        )
    return ""
