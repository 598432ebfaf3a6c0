"""Members compare which collectives they made, so that none was paired with that of another step.

gloo and NCCL pair the collectives of a group by their order alone: a member that makes one more
than the others has it paired with a later one of theirs, and the sums are wrong without an error.
`CollectiveTally` counts what this member made. `Pairing` compares the tallies of all members at
each commit, over connections that have no part in that order, and again when the survivors of a
broken world meet in the next one. Fails with MispairedError on all members, and as the group does.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastane.errors import JobError

if TYPE_CHECKING:
    from elastane.comms.elastic import ElasticGroup

KINDS = (
    *("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "barrier"),
    "other collective",
)
# By how the name of torch's operation begins; the first that fits.
_KIND_BY_NAME = (
    *(("allreduce", 0), ("broadcast", 1), ("allgather", 2), ("_allgather", 2)),
    *(("all_gather", 2), ("reduce_scatter", 3), ("_reduce_scatter", 3), ("alltoall", 4)),
    *(("all_to_all", 4), ("barrier", 5), ("", 6)),
)
# Of these the tensors have the same sizes on all members.
_SIZED = (0, 1)
# The sum of 65,536 of them has 64 bits.
_MARK_BYTES = 6
_DIGEST_BITS = 62
_MASK = (1 << _DIGEST_BITS) - 1
# Any odd number that spreads small differences over all bits (Knuth's, for 62 bits).
_FACTOR = 0x1E3779B97F4A7C15


# How far a member came in the body of a step.
IN_BODY, UPDATED, ENDED = range(3)


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """What one member did in one world since the commit before.

    `world`: a number for the world; 0 where there was none with other members. `commits`: how many
    this member has completed there. `reached`: IN_BODY, or UPDATED where it keeps an update, or
    ENDED where it was at the next commit. `digest`: of all collectives in their order. `made`: how
    many of each of KINDS.
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
        """Return it as numbers of 64 bits."""
        single = (self.world, self.step, self.commits, self.reached, self.digest)
        return [*single, *self.made]

    def mark(self) -> int:
        """Return a number that differs where a record does; the sum of many has 64 bits."""
        packed = struct.pack(f"<{5 + len(KINDS)}q", *self.packed())
        return int.from_bytes(hashlib.blake2b(packed, digest_size=_MARK_BYTES).digest(), "little")

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> CollectiveRecord:
        """Return what `packed` gave."""
        world, step, commits, reached, digest, *made = numbers
        return cls(world, step, commits, reached, digest, tuple(made))

    def described(self) -> str:
        """Say in words what it made."""
        parts = [_several(n, kind) for n, kind in zip(self.made, KINDS, strict=True) if n]
        return ", ".join(parts) or "no collective"


class CollectiveTally:
    """The collectives of one member since its last commit; several threads may begin them."""

    def __init__(self) -> None:
        self.clear()
        self._codes: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """Begin to count from zero."""
        self._digest = 0
        self._made = [0] * len(KINDS)

    def note(self, name: str, tensors: Sequence[Any]) -> None:
        """Count a collective, by the name of torch's operation; `tensors` are its first ones."""
        code, kind = self._codes.get(name) or self._code(name)
        if kind in _SIZED:
            code += sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        self._digest = (self._digest * _FACTOR + code + 1) & _MASK
        self._made[kind] += 1

    def record(self, world: int, step: int, commits: int, reached: int) -> CollectiveRecord:
        """Return what was counted."""
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


def odd_survivors(records: Sequence[CollectiveRecord]) -> tuple[int, int] | None:
    """Return two ranks of which one keeps an update that was not paired rightly. Pure.

    `records`: of the last world that each was in. Members may have been at different places of a
    body. So only this is certain: at the same collective they had made the same, and nobody had
    made more than a member that was further. Where nobody keeps an update, nothing is wrong yet.
    """
    for (one, a), (two, b) in combinations(enumerate(records), 2):
        if not a.world or (a.world, a.commits) != (b.world, b.commits):
            continue
        if max(a.reached, b.reached) == IN_BODY:
            continue
        is_same = a.digest == b.digest and a.made == b.made
        if a.count == b.count or a.reached == b.reached == ENDED:
            is_wrong = not is_same
        else:
            further, other = (a, b) if a.reached > b.reached else (b, a)
            is_wrong = further.reached > other.reached and other.count > further.count
        if is_wrong:
            return one, two
    return None


class Pairing:
    """One member's: `agree` at each commit, `meet` as each world begins, by all members.

    The group calls `left` as it goes over to another world.
    """

    def __init__(self, group: ElasticGroup) -> None:
        self._group = group
        self.tally = CollectiveTally()
        self._commits = 0
        self._step = 0
        self._reached = IN_BODY
        # Of the last world that broke, until it was compared.
        self._left: CollectiveRecord | None = None

    def left(self, fence: str, size: int, *, broke: bool) -> None:
        """Leave a world; keep what was done there if it broke, and begin to count anew."""
        if broke and self._left is None and size > 1:
            self._left = self._record(zlib.crc32(fence.encode()) or 1)
        self.begin()

    def begin(self) -> None:
        """Begin to count anew, where all members are at one place."""
        self.tally.clear()
        self._commits, self._reached = 0, IN_BODY

    def passed(self) -> None:
        """Count what all members have done together outside of a step as done, like a commit."""
        self.tally.clear()
        self._commits += 1

    def agree(self, step: int) -> None:
        """Wait until all members are at the commit of `step`, having made the same collectives.

        Raises MispairedError where they did not, PeerLostError where one is lost.
        """
        self._step = step
        if self._group.size() > 1:
            self._reached = ENDED
            self._insist(self._record(0))
        self._commits += 1
        self._reached = IN_BODY
        self.tally.clear()

    def meet(self, *, updated: bool) -> None:
        """Compare what the members of this world did in the one before, where they were there.

        `updated`: this one keeps the update of a body that was cut short.
        """
        mine = self._left or CollectiveRecord(0, 0, 0, IN_BODY, 0, (0,) * len(KINDS))
        if updated and mine.reached == IN_BODY:
            mine = replace(mine, reached=UPDATED)
        said = torch.tensor(mine.packed(), dtype=torch.int64)
        heard = [torch.zeros_like(said) for _ in range(self._group.size())]
        dist.all_gather(heard, said, group=self._group)
        records = [CollectiveRecord.unpacked(each.tolist()) for each in heard]
        found = odd_survivors(records)
        if found is not None:
            raise _mispaired(records, found)
        self._left = None

    def _insist(self, mine: CollectiveRecord) -> None:
        """Raise MispairedError on all members, where one has another record.

        A sum of one number is the quickest that gloo has: four workers on two busy cores took
        0.7 ms for it, and 4 ms for an all-gather of the records (2026-11-24).
        """
        total = torch.tensor([mine.mark()])
        self._group.aside(lambda aside: aside.allreduce([total]))
        if total.item() == self._group.size() * mine.mark():
            return
        said = torch.tensor(mine.packed())
        heard = torch.empty((self._group.size(), len(said)), dtype=torch.int64)
        self._group.aside(lambda aside: aside.allgather([[*heard]], [said]))
        records = [CollectiveRecord.unpacked(each) for each in heard.tolist()]
        raise _mispaired(records, odd_pair(records))

    def _record(self, world: int) -> CollectiveRecord:
        return self.tally.record(world, self._step, self._commits, self._reached)


class MispairedError(JobError):
    """Members made different collectives: what they computed together is wrong."""


def _mispaired(records: Sequence[CollectiveRecord], pair: tuple[int, int]) -> MispairedError:
    rank, other = pair
    a, b = records[rank], records[other]
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
        f"{what}: they were paired with those of other steps, and what came of it is wrong",
        slug="job-collectives",
        where=f"step {max(a.step, b.step)}",
        expected="the same collectives in the same order on all ranks from one commit to the next",
        next_step="let nothing that makes collectives (no_sync, metrics, evaluation) depend on a"
        " rank, or on a world size that was read before job.steps()",
    )


def _several(count: int, kind: str) -> str:
    return f"{count} {kind}" + ("s" if count > 1 and not kind.endswith("s") else "")
