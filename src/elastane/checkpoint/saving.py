"""One save: what all ranks agree on first, the copy into the keeper's memory, the keeper's orders.

A save costs one exchange of a few numbers among the ranks, and one copy of this rank's share. What
a layout needs is exchanged once, and again when the state's tensors or the ranks change. Fails
with the collective where a rank is lost, and then nothing was saved; a fault of the storage comes
later, from the keeper.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import msgspec
import torch
import xxhash

from elastane.checkpoint.capture import Captured
from elastane.checkpoint.copying import Copier
from elastane.checkpoint.doors import door_of, without_copies
from elastane.checkpoint.folder_identity import StoragePath
from elastane.checkpoint.layout import Chunk, Layout, lay_out
from elastane.checkpoint.plan import SaveDetails, SaveOrder, SavePlan
from elastane.checkpoint.registered import RandomStreams
from elastane.checkpoint.save_schedule import SaveInterval
from elastane.checkpoint.shares import RankStatus, SaveShare, shares
from elastane.checkpoint.state_source import SavingWorld
from elastane.comms.digest import raw_bytes
from elastane.errors import CheckpointError
from elastane.protocol.checkpoints import Key
from elastane.protocol.limits import KEEPER_PATIENCE_S
from elastane.snapshots.client import Keeper, KeeperSilentError
from elastane.snapshots.messages import WriteProgress

_log = logging.getLogger("elastane.checkpoint")
# How long a save waits for its slot: the keeper answers at once unless it is held up itself.
GRANT_S = 10.0
# Each node keeps the random streams of all ranks, 11 KB each, in worlds of so many at most; in
# greater ones those of a lost node's ranks begin anew when its state is taken from memory.
STREAMS_RANKS_MAX = 64
# How long a script that insists on a save waits for the storage.
WAIT_S = 3600.0


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks tell each other before a save, as numbers.

    Of `nonce` and `word`, which is the cadence's, rank 0's counts.
    """

    step: int
    identity: int
    standing: int
    planned: int  # for which of these the rank has a plan
    busy: int
    copying: int
    copies: int  # whether this node has copies of its part made
    copied: int  # the nonces of the saves whose part another node has: the later, the earlier one
    copied_before: int
    kept: int  # the nonce of the last save that this rank has kept
    safe: int  # what it takes for the last that all nodes have copied
    together: int  # and for the last that all ranks have kept
    nonce: int
    word: int


class Saver:
    """One rank's; all ranks call the same in the same order."""

    def __init__(self, world: SavingWorld, keeper: Keeper, where: str, place: StoragePath) -> None:
        self._world, self.keeper, self._where = world, keeper, where
        self._place = place
        self._planned_for = 0
        self._shared: tuple[Layout, SaveShare] | None = None
        self._plan: SavePlan | None = None
        self.copier, self._pace = Copier(), SaveInterval()
        self.blocked_s = self.write_s = 0.0
        self._kept = self._safe = self._together = 0
        self.progress = WriteProgress()  # the keeper's, as of the last save
        self._told: set[str] = set()
        self._coming: Future[Keeper] | None = None  # the connection to the next keeper

    def go_on_from(self, nonce: str, *, missed: bool) -> None:
        """All ranks go on from this save in memory, or from none in memory ("").

        `missed`: a node that has nothing of it may go again. Else the keepers know what is safe.
        """
        self._together = int(nonce or "0", 16)
        self._safe = self._together if missed else 0

    def agree(self, captured: Captured, order: SaveOrder, word: int) -> list[Agreed]:
        """Return what all ranks say; CheckpointError where they save different steps."""
        members = self._world.members()
        busy = self._is_busy() or not self._place.look()
        busy = self._rests(order, busy=busy) or busy
        standing = msgspec.msgpack.encode(self._standing)
        copied = [int(nonce, 16) for nonce in reversed(self.progress.copied)] + [0, 0]
        own = Agreed(
            step=order.step,
            identity=_hash(captured.identity()),
            standing=_hash(standing),
            planned=self._planned_for,
            busy=int(busy),
            copying=int(self.progress.copying),
            copies=int(bool(self.keeper.door)),
            copied=copied[0],
            copied_before=copied[1],
            kept=self._kept,
            safe=self._safe,
            together=self._together,
            nonce=secrets.randbits(32) or 1,
            word=word,
        )
        heard = [Agreed(*said) for said in members.numbers(msgspec.structs.astuple(own))]
        steps = [each.step for each in heard]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks save different steps: {', '.join(map(str, steps))}, by rank",
                expected="save() on all ranks, at the same step",
                next_step="call it on each rank; only one of them writes what all hold",
                slug="checkpoint-ranks",
            )
        return heard

    def settle(self) -> None:
        """Wait until what is being copied may change."""
        self.copier.settle()

    @property
    def doubtful(self) -> Sequence[int] | None:
        """Which tensors must be known to be as they were before the next save; None: all."""
        looks_late = self.copier.may_overlap and self.copier.may_look_late
        return self._plan.sources.doubtful if self._plan is not None and looks_late else None

    def _rests(self, order: SaveOrder, *, busy: bool) -> bool:
        """Whether storage is spared this save, which memory has."""
        if order.reason not in ("step", "time") or not self.keeper.survives:
            return False
        return self._pace.rests(self._world.fence, busy=busy)

    def _is_busy(self) -> bool:
        """Whether the keeper takes nothing to write; one that is lost is followed by another."""
        patience_s = KEEPER_PATIENCE_S
        while self._coming is None or self._has_come(self._coming):
            try:
                progress = self.keeper.progress(self._world.fence)
            except KeeperSilentError:
                return True
            except ConnectionError as error:
                _log.warning("%s; what it held in memory is lost [keeper-lost]", error)
            else:
                self.write_s, self.progress = progress.last_write_s, progress
                return progress.busy
            self._plan, self._kept = None, 0
            self._coming = connect_behind(self._where)
            wait({self._coming}, patience_s)
            patience_s = 0.0  # A step waits once, though the next keeper may be lost as well.
        return True

    def _has_come(self, coming: Future[Keeper]) -> bool:
        """Go on with the next keeper, where its connection stands by now."""
        if not coming.done():
            return False
        try:
            self.keeper = coming.result()
        except OSError as error:
            self._tell_once(f"no keeper of snapshots can be reached: {error} [keeper-lost]")
            self._coming = connect_behind(self._where)
            return False
        self._coming = None
        return True

    @property
    def _standing(self) -> RankStatus:
        door = door_of(self.keeper)
        return RankStatus(
            self.keeper.id, self.keeper.survives, self._place.known, door, self._where
        )

    def save(
        self, captured: Captured, order: SaveOrder, era: int, heard: list[Agreed]
    ) -> tuple[Key, bool]:
        """Copy this rank's share, and give the keeper its orders.

        Returns under which key, and whether it is written out: where storage is behind, it stays
        in memory, which is of use only where the keeper outlives the workers.
        """
        began_s = time.monotonic()
        durable = not any(each.busy for each in heard)
        if durable:
            self._pace.begun(self._world.fence)
        key = Key(era, *self._world.fence, order.step)
        if not durable and not self.keeper.survives:
            return key, False
        layout, share = self._share_out(captured, heard)
        self._look_back(heard)
        nonce = heard[0].nonce
        streams = self._streams(share)
        told = SaveDetails(
            nonce=_word(nonce),
            durable=durable,
            copied=not any(each.copying for each in heard),
            safe=_word(self._safe),
            together="" if layout.replicated else _word(self._together),
        )
        buffers = self._buffers(captured) if layout.replicated else {}
        # From here on nothing is exchanged: what fails, fails on this rank alone.
        keeper = self.keeper
        if self._plan is None:
            self._plan = SavePlan(keeper, self._where, layout, share, captured, self._world)
        plan, sources = self._plan, self._plan.sources
        small = captured.small() if share.local == 0 else None
        slot = keeper.grant(GRANT_S, told.together)

        def keep(behind: bool) -> None:
            keeper.keep(slot, plan.snapshot(small, streams(), key, order, told), heard=behind)
            self._kept = nonce

        views = sources.views(captured.tensors, buffers)
        places = plan.slot(slot).places
        self.copier.copy(places, views, sources.late, keep, captured.are_alike)
        self.blocked_s = time.monotonic() - began_s
        return key, durable

    def _look_back(self, heard: list[Agreed]) -> None:
        """Find the last save of which all nodes have copies, and the last that all have kept.

        Both are to stay. Where there is none, who has just come takes over what the others know.
        """
        kept = {each.kept for each in heard}
        known = self._together or max(each.together for each in heard)
        self._together = max(kept) if len(kept) == 1 and 0 not in kept else known
        # Also of who has none: a save that not all have kept must not be taken for a safe one.
        several = [(each.copied, each.copied_before) for each in heard if each.copies]
        common = set.intersection(*map(set, several)) - {0} if several else set()
        # The earlier one is no later on any node.
        newest = next((nonce for nonce in several[0] if nonce in common), 0) if several else 0
        self._safe = newest or self._safe or max(each.safe for each in heard)

    def close(self) -> None:
        """Let go of the keeper, which ends what it is writing."""
        self.copier.close()
        self.keeper.close()
        if self._coming is not None:
            self._coming.add_done_callback(_let_go)

    def _buffers(self, captured: Captured) -> dict[int, torch.Tensor]:
        """Return rank 0's buffers by their numbers; each rank's own statistics are none of a job's.

        DDP goes on with rank 0's too, in its next forward.
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
        """Take this rank's random streams; all ranks' where another node may have to give.

        Returns what packs them as they are now.
        """
        members, own = self._world.members(), RandomStreams()
        several = share.parts > 1 and members.size <= STREAMS_RANKS_MAX
        if share.places == 1 and not several:
            rank = members.rank
            return lambda: msgspec.msgpack.encode([(rank, own.packed())])
        heard = members.texts(own.packed())
        return lambda: msgspec.msgpack.encode([*enumerate(heard)] if share.local == 0 else [])

    def _share_out(self, captured: Captured, heard: list[Agreed]) -> tuple[Layout, SaveShare]:
        """Return the layout and this rank's share; exchanged anew where something has changed."""
        known = [(each.identity, each.standing) for each in heard]
        wanted = _hash(msgspec.msgpack.encode(known))
        # One that has just come has no share yet, and all take part in giving it one.
        if self._shared is None or any(each.planned != wanted for each in heard):
            self._shared, self._plan, self._planned_for = None, None, 0
            self._shared = self._exchanged(captured, known)
            self._planned_for = wanted
        return self._shared

    def _exchanged(
        self, captured: Captured, known: list[tuple[int, int]]
    ) -> tuple[Layout, SaveShare]:
        members = self._world.members()
        alike = len({identity for identity, _ in known}) == 1
        own = [self._standing, [] if alike else captured.chunks, [] if alike else captured.names]
        heard = [
            msgspec.msgpack.decode(said, type=tuple[RankStatus, list[Chunk], list[str]])
            for said in members.texts(msgspec.msgpack.encode(own))
        ]
        if any(names != heard[0][2] for _, _, names in heard):
            raise CheckpointError(
                "the ranks hold states of different parts",
                expected="the same names on all ranks, whole or sharded (DTensor)",
                next_step="save parts that differ by rank with a Checkpointer of their own each",
                slug="checkpoint-ranks",
            )
        held = [captured.chunks] if alike else [chunks for _, chunks, _ in heard]
        layout = lay_out(captured.specs, held)
        places = {standing.place for standing, _, _ in heard}
        if not layout.replicated and len(places) > 1:
            raise CheckpointError(
                f"{self._where}: {len(places)} different folders on the nodes, and the state is"
                " sharded over them",
                expected="a folder that all nodes share, or an object store",
                next_step="Checkpointer(where) with such a place",
                slug="checkpoint-place",
            )
        standings = [standing for standing, _, _ in heard]
        if members.rank == 0 and not layout.replicated:
            self._tell_once(without_copies(standings))
        return layout, shares(layout, standings)[members.rank]

    def _tell_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)


def connect_behind(where: str) -> Future[Keeper]:
    """Connect to the next keeper in another thread: it is not there before its agent starts it."""
    coming: Future[Keeper] = Future()

    def connect() -> None:
        try:
            coming.set_result(Keeper.connect(where, patience_s=KEEPER_PATIENCE_S))
        except BaseException as error:
            coming.set_exception(error)

    threading.Thread(target=connect, name="elastane-keeper", daemon=True).start()
    return coming


def _let_go(coming: Future[Keeper]) -> None:
    if coming.exception() is None:
        coming.result().close()


def insist_durable(keeper: Keeper, key: Key, where: str, timeout_s: float = WAIT_S) -> None:
    """Wait until a save is durable; CheckpointError with the reason where it is not."""
    try:
        failure = keeper.wait(key, timeout_s).failure_of(key)
        reason, slug = (failure.reason, failure.slug) if failure is not None else ("", "")
    except (ConnectionError, TimeoutError) as error:
        reason, slug = str(error), "keeper-lost"
    if reason:
        raise not_saved(where, f"step {key.step}: {reason}", slug)


def not_saved(where: str, reason: str, slug: str) -> CheckpointError:
    """Return the error for a save that did not become durable."""
    return CheckpointError(
        f"not saved: {reason}",
        where=where,
        expected="storage that takes it; the checkpoints before it stay",
        next_step="mend what is named; the next save tries anew",
        slug=slug,
    )


def _word(nonce: int) -> str:
    return f"{nonce:08x}" if nonce else ""


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1
