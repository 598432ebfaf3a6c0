"""Members compare their collectives, so that none was paired with one of another step.

gloo and NCCL pair the collectives of a group by their order alone. If a member makes one more than
the others, it is paired with a later one of theirs, and the sums are wrong without an error.
`CollectiveTally` counts what this member made. `Pairing` compares the tallies of all members at
each commit, over connections that have no part in that order. It compares them again when the
survivors of a broken world meet in the next one. Fails with MispairedError on all members, and as
the group does.

Comparisons are rounds: in each, every member adds up one number, its mark, with those of the
others. `start` begins a round before an update and does not wait, so the round runs beside the
update. `agree` takes its result if the member has made no collective since; otherwise it begins
another round and waits for it. A member commits only after a round in which all members had the
mark that it has at its commit. If marks differ, all members compare whole records, each once it is
at a commit. Members that began rounds at other places then have the same records.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from elastane.errors import JobError

KINDS = (
    *("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "barrier"),
    "other collective",
)
# By the beginning of the name of torch's operation; the first match counts.
_KIND_BY_NAME = (
    *(("allreduce", 0), ("broadcast", 1), ("allgather", 2), ("_allgather", 2)),
    *(("all_gather", 2), ("reduce_scatter", 3), ("_reduce_scatter", 3), ("alltoall", 4)),
    *(("all_to_all", 4), ("barrier", 5), ("", 6)),
)
# Kinds whose tensors have the same sizes on all members.
_SIZED = (0, 1)
# The sum of 65,536 marks has 64 bits.
_MARK_BYTES = 6
_NUMBERS = struct.Struct(f"<{5 + len(KINDS)}q")
_DIGEST_BITS = 62
_MASK = (1 << _DIGEST_BITS) - 1
# Any odd number that spreads small differences over all bits (Knuth's, for 62 bits).
_FACTOR = 0x1E3779B97F4A7C15


# How far a member came in the body of a step.
IN_BODY, UPDATED, ENDED = range(3)


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """The collectives of one member in one world since the previous commit.

    `world`: a number for the world; 0 without other members. `commits`: how many this member has
    completed there. `reached`: IN_BODY, or UPDATED if it keeps an update, or ENDED if it was at the
    next commit. `digest`: of all collectives in their order. `made`: the number of each of KINDS.
    """

    world: int
    step: int
    commits: int
    reached: int
    digest: int
    made: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many collectives it made."""
        return sum(self.made)

    def packed(self) -> list[int]:
        """Return the record as 64-bit numbers."""
        single = (self.world, self.step, self.commits, self.reached, self.digest)
        return [*single, *self.made]

    def mark(self) -> int:
        """Return a number that differs if the record does; the sum of many has 64 bits."""
        packed = _NUMBERS.pack(*self.packed())
        return int.from_bytes(hashlib.blake2b(packed, digest_size=_MARK_BYTES).digest(), "little")

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> CollectiveRecord:
        """Return the record that `packed` encoded."""
        world, step, commits, reached, digest, *made = numbers
        return cls(world, step, commits, reached, digest, tuple(made))

    def described(self) -> str:
        """Describe the collectives in words."""
        parts = [_several(n, kind) for n, kind in zip(self.made, KINDS, strict=True) if n]
        return ", ".join(parts) or "no collective"


_NOTHING = CollectiveRecord(0, 0, 0, IN_BODY, 0, (0,) * len(KINDS))


class CollectiveTally:
    """Counts one member's collectives since its last commit; several threads may begin them."""

    def __init__(self) -> None:
        self.clear()
        self._codes: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """Reset the count."""
        self._digest = 0
        self._made = [0] * len(KINDS)

    def note(self, name: str, tensors: Sequence[Any]) -> None:
        """Count a collective, by the name of torch's operation; `tensors` are its first ones."""
        code, kind = self._codes.get(name) or self._code(name)
        if kind in _SIZED:
            for each in tensors:
                if isinstance(each, torch.Tensor):
                    code += each.nbytes
        self._digest = (self._digest * _FACTOR + code + 1) & _MASK
        self._made[kind] += 1

    def record(self, world: int, step: int, commits: int, reached: int) -> CollectiveRecord:
        """Return the record of what was counted."""
        return CollectiveRecord(world, step, commits, reached, self._digest, tuple(self._made))

    def _code(self, name: str) -> tuple[int, int]:
        kind = next(kind for prefix, kind in _KIND_BY_NAME if name.startswith(prefix))
        code = self._codes[name] = zlib.crc32(name.encode()) << 28, kind
        return code


def odd_pair(records: Sequence[CollectiveRecord]) -> tuple[int, int]:
    """Return two ranks whose records differ: one of the most frequent record, and another. Pure."""
    ((usual, _),) = Counter(records).most_common(1)
    odd = next(rank for rank, record in enumerate(records) if record != usual)
    first, second = sorted((records.index(usual), odd))
    return first, second


def odd_survivors(
    records: Sequence[CollectiveRecord], committed: Sequence[CollectiveRecord] = ()
) -> tuple[int, int] | None:
    """Return two ranks whose collectives were paired wrongly, if one keeps its update. Pure.

    `records` has a record for each rank, of the last world that it was in. `committed` has the
    record of each rank at its last commit there.

    Members may have stopped at different points of a step, so only two rules hold for a pair of
    members at the same commit. Members that stopped at the same collective made the same ones. A
    member that got further made at least as many as the other. A pair that breaks a rule counts
    only if one of the two keeps its update: otherwise the step is retried.
    """
    for one, two in combinations(range(len(records)), 2):
        a, b = at_one_commit(records, committed or records, (one, two))
        if a.world and (a.world, a.commits) == (b.world, b.commits) and _contradict(a, b):
            return one, two
    return None


def at_one_commit(
    records: Sequence[CollectiveRecord],
    committed: Sequence[CollectiveRecord],
    pair: tuple[int, int],
) -> tuple[CollectiveRecord, CollectiveRecord]:
    """Return the records of two ranks at one commit. Pure.

    For a rank that is a commit ahead, this is the record of its last commit.
    """
    one, two = pair
    a, b = records[one], records[two]
    if a.commits == b.commits + 1:
        return committed[one], b
    if b.commits == a.commits + 1:
        return a, committed[two]
    return a, b


def _contradict(a: CollectiveRecord, b: CollectiveRecord) -> bool:
    """Whether one of two members keeps an update and their collectives break a rule."""
    if max(a.reached, b.reached) == IN_BODY:
        return False
    if a.count == b.count or a.reached == b.reached == ENDED:
        return a.digest != b.digest or a.made != b.made
    further, other = (a, b) if a.reached > b.reached else (b, a)
    return further.reached > other.reached and other.count > further.count


class PairedGroup(Protocol):
    """What `Pairing` needs of a group: `comms.elastic` implements it."""

    def size(self) -> int:
        """Return the world size."""

    def begin_aside(self, begin: Callable[[Any], Work]) -> Work:
        """Begin an operation that is not ordered with the group's collectives."""

    def end_aside(self, work: Work) -> None:
        """Wait for what `begin_aside` began."""


class Pairing:
    """Compares one member: `start` and `agree` in each step, `meet` as each world begins.

    All members call them. The group calls `left` when it enters another world.
    """

    def __init__(self, group: PairedGroup) -> None:
        self._group = group
        self.tally = CollectiveTally()
        self._commits = 0
        self._step = 0
        self._reached = IN_BODY
        # The last round in this world, and the tensor in which each round sums the marks.
        self._round: _Round | None = None
        self._total = torch.zeros(1, dtype=torch.int64)
        # What this member had made at its last commit in this world.
        self._committed = _NOTHING
        # The current record and the committed one of the last world that broke, until compared.
        self._left: tuple[CollectiveRecord, CollectiveRecord] | None = None

    def left(self, fence: str, size: int, *, broke: bool) -> None:
        """Leave a world: if it broke, keep the record of it; reset the count."""
        if broke and self._left is None and size > 1:
            world = zlib.crc32(fence.encode()) or 1
            self._left = self._record(world), replace(self._committed, world=world)
        # An interrupted round may still write into its tensor.
        self._round, self._total = None, torch.zeros(1, dtype=torch.int64)
        self.begin()

    def begin(self) -> None:
        """Reset the count; all members call this at one place of the program."""
        self.tally.clear()
        self._commits, self._reached, self._committed = 0, IN_BODY, _NOTHING

    def passed(self) -> None:
        """Count an operation of all members outside of a step like a commit."""
        self._committed = self._at_commit()
        self.tally.clear()
        self._commits += 1

    def start(self, step: int) -> None:
        """Begin a round for `step`, if the last one is over and had other collectives.

        It never waits: another member may still be in its body, and wait for a collective of this
        one. Raises PeerLostError if the world has ended.
        """
        self._step = step
        if self._group.size() == 1:
            return
        last = self._round
        if last is not None and not last.is_over:
            if not last.work.is_completed() or self._total.item() != last.total:
                return  # `agree` completes it
            last.is_over = last.is_equal = True
        if last is None or last.record != self._at_commit():
            self._begin_round()

    def agree(self, step: int) -> None:
        """Commit `step`, once all members have made the same collectives as this one.

        Raises MispairedError if they did not, PeerLostError if one is lost.
        """
        self._step = step
        self._wait_agreed()
        self._reached = IN_BODY
        self.passed()

    def insist(self) -> None:
        """Wait until all members are at this place, with the same collectives since their commit.

        For results that must be right after a commit: a save, a value, the end of the steps.
        Another member may have made more in the body of that step than this one, and still be in
        it. Raises as `agree` does. If no step was committed, the members have just met.
        """
        if self._commits:
            try:
                self._wait_agreed()
            finally:
                self._reached = IN_BODY

    def meet(self, *, updated: bool) -> None:
        """Compare what the members of this world did in the previous one, if they were in it.

        `updated`: this member keeps the update of an interrupted body.
        """
        mine, committed = self._left or (_NOTHING, _NOTHING)
        if updated and mine.reached == IN_BODY:
            mine = replace(mine, reached=UPDATED)
        own = torch.tensor([mine.packed(), committed.packed()], dtype=torch.int64)
        received = [torch.zeros_like(own) for _ in range(self._group.size())]
        # The group is a ProcessGroup too, which a protocol cannot express.
        dist.all_gather(received, own, group=cast(ProcessGroup, self._group))
        records, last = _unpacked(received)
        found = odd_survivors(records, last)
        if found is not None:
            raise _mispaired(found, *at_one_commit(records, last, found))
        self._left = None

    def _wait_agreed(self) -> None:
        if self._group.size() > 1:
            self._reached = ENDED
            while not self._is_agreed():
                self._begin_round()

    def _begin_round(self) -> None:
        """Begin the next round.

        A sum of one number is the fastest operation of gloo: four workers on two busy cores took
        0.7 ms for it, and 4 ms for an all-gather of the records (2026-11-24).
        """
        record = self._at_commit()
        mark = record.mark()
        self._total.fill_(mark)
        work = self._group.begin_aside(lambda aside: aside.allreduce([self._total]))
        self._round = _Round(record, mark * self._group.size(), work)

    def _is_agreed(self) -> bool:
        """Wait for the last round; return whether it covered this member's current collectives.

        Differing marks are compared before the next round, so all members do both in one order.
        """
        current = self._round
        if current is None:
            return False
        if not current.is_over:
            self._group.end_aside(current.work)
            current.is_over = True
            current.is_equal = self._total.item() == current.total
            if not current.is_equal:
                self._compare()
        return current.is_equal and current.record == self._at_commit()

    def _compare(self) -> None:
        """Compare whole records, after a round of differing marks; each member is at a commit."""
        own = torch.tensor([self._record(0).packed(), self._committed.packed()])
        received = torch.empty((self._group.size(), *own.shape), dtype=torch.int64)
        gather = self._group.begin_aside(lambda aside: aside.allgather([[*received]], [own]))
        self._group.end_aside(gather)
        records, last = _unpacked([*received])
        if len({*records}) > 1:
            found = odd_pair(records)
            raise _mispaired(found, *at_one_commit(records, last, found))

    def _at_commit(self) -> CollectiveRecord:
        """Return the record as it will be compared at the next commit."""
        return self.tally.record(0, self._step, self._commits, ENDED)

    def _record(self, world: int) -> CollectiveRecord:
        return self.tally.record(world, self._step, self._commits, self._reached)


@dataclass(slots=True)
class _Round:
    """One round: this member's record, the sum of marks if all are equal, and the result."""

    record: CollectiveRecord
    total: int
    work: Work
    is_over: bool = False
    is_equal: bool = False


def _unpacked(
    received: Sequence[torch.Tensor],
) -> tuple[list[CollectiveRecord], list[CollectiveRecord]]:
    """Return the current record of each rank, and the record of its last commit."""
    pairs = [each.tolist() for each in received]
    records = [CollectiveRecord.unpacked(now) for now, _ in pairs]
    return records, [CollectiveRecord.unpacked(then) for _, then in pairs]


class MispairedError(JobError):
    """Members made different collectives: the results that they computed together are wrong."""


def _mispaired(pair: tuple[int, int], a: CollectiveRecord, b: CollectiveRecord) -> MispairedError:
    rank, other = pair
    if a.step != b.step and a.reached == b.reached == ENDED:
        what = f"rank {rank} commits step {a.step}, and rank {other} step {b.step}"
    elif a.made == b.made:
        what = (
            f"rank {rank} and rank {other} each made {a.described()} in one step, in another order"
            " or of other sizes"
        )
    else:
        what = (
            f"rank {rank} made {a.described()} since the last commit,"
            f" and rank {other} {b.described()}"
        )
    return MispairedError(
        f"{what}: they were paired with those of other steps, and the results are wrong",
        slug="job-collectives",
        where=f"step {max(a.step, b.step)}",
        expected="the same collectives in the same order on all ranks from one commit to the next",
        next_step="let nothing that makes collectives (no_sync, metrics, evaluation) depend on a"
        " rank, or on a world size that was read before job.steps()",
    )


def _several(count: int, kind: str) -> str:
    return f"{count} {kind}" + ("s" if count > 1 and not kind.endswith("s") else "")
