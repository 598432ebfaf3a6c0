"""Decides which state is right when a world begins, and which member sends it to which. Pure.

A worker can only have applied step s if its reduction of step s was complete, and then it holds
every member's contribution. So the member with the most committed steps is right, and no member is
behind by more than the current step. A worker that has just joined, or whose healing was
interrupted, holds no state, even if it once did.

State travels in waves: a member that has received it sends it in the next wave. To a machine
without a holder it is sent once, in stripes from all machines that hold it. Within a machine it
goes from one member to another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# The most givers to one receiver: beyond that the receiver is the limit.
GIVERS_MAX = 8
# A smaller stripe is not worth a message of its own.
STRIPE_BYTES_MIN = 1 << 20

# (number of the tensor, first byte, end byte).
Piece: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one member reports: the steps it committed, and whether it holds their state.

    `torn`: it was receiving a state and was interrupted, so it holds parts of two. `machine`: the
    same number on all members that can share memory; 0 if unknown. `cut_short`: the body of its
    last step failed after the update, and its rest was not run. `came_later`: it joined a running
    job, so it restored no checkpoint.
    """

    committed: int
    holds: bool
    torn: bool = False
    machine: int = 0
    cut_short: bool = False
    came_later: bool = False


@dataclass(frozen=True, slots=True)
class Handover:
    """One member receives its state, in stripes from all `givers` as far as they agree.

    `near`: giver and receiver can share memory.
    """

    receiver: int
    givers: tuple[int, ...]
    near: bool


@dataclass(frozen=True, slots=True)
class Healing:
    """The ranks whose state is right, and how the others receive it before the next step.

    `fresh`: no step was made since all workers started, and all begin from the state of the first
    rank that started with them. Members perform the `waves` in order. Within one wave no member
    sends twice, or sends what it receives in that wave.
    """

    committed: int
    right: tuple[int, ...]
    waves: tuple[tuple[Handover, ...], ...]
    fresh: bool

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive a state, in order."""
        return tuple(sorted(each.receiver for wave in self.waves for each in wave))


def decide(statuses: Sequence[MemberStatus]) -> Healing | None:
    """Return which members heal which; `statuses` by rank, the same on all members.

    None: no member holds a whole state, and some hold parts of two, or all have joined a job whose
    state is lost; all have to restart.
    """
    assert statuses, "a world has members"
    machines = [status.machine for status in statuses]
    holders = [rank for rank, status in enumerate(statuses) if status.holds]
    if not holders and any(status.torn for status in statuses):
        return None
    if not holders:
        # A worker that started with the job and has no state has made no step, and no step was made
        # without it.
        first = next((rank for rank, each in enumerate(statuses) if not each.came_later), None)
        if first is None:
            return None
        return Healing(0, (first,), _waves((first,), machines), fresh=True)
    committed = max(statuses[rank].committed for rank in holders)
    right = tuple(rank for rank in holders if statuses[rank].committed == committed)
    whole = tuple(rank for rank in right if not statuses[rank].cut_short)
    # Interrupted bodies may have stopped at different places, so all members take the state of one.
    right = whole or right[:1]
    return Healing(committed, right, _waves(right, machines), fresh=False)


def _waves(right: Sequence[int], machines: Sequence[int]) -> tuple[tuple[Handover, ...], ...]:
    """First serve one member of each machine without a holder, then the rest from their machine."""
    holders: dict[int, list[int]] = {}
    seekers: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        # A member that shares no memory counts as a machine of its own.
        place = machine or ~rank
        (holders if rank in right else seekers).setdefault(place, []).append(rank)
    heads = [seekers[place].pop(0) for place in seekers if place not in holders]
    near: defaultdict[int, list[Handover]] = defaultdict(list)
    for place, waiting in seekers.items():
        have = holders.get(place) or [head for head in heads if machines[head] == place]
        for number, wave in enumerate(_spread(have, waiting, near=True)):
            near[number] += wave
    # One giver per machine: the members of a machine share its network.
    far = _spread([ranks[0] for ranks in holders.values()], heads, near=False)
    return tuple(tuple(wave) for wave in (*far, *near.values()))


def _spread(have: Sequence[int], waiting: Sequence[int], *, near: bool) -> list[list[Handover]]:
    """In each wave all holders send; a receiver is a holder from the next wave on."""
    have, waiting, waves = list(have), list(waiting), []
    while waiting:
        now, waiting = waiting[: len(have)], waiting[len(have) :]
        # Several givers do not make memory faster.
        most = 1 if near else GIVERS_MAX
        wave = [
            Handover(each, tuple(have[number :: len(now)][:most]), near)
            for number, each in enumerate(now)
        ]
        waves.append(wave)
        have += now
    return waves


def stripes(sizes: Sequence[int], same: Sequence[Sequence[bool]]) -> list[list[Piece]]:
    """Return what each giver sends of tensors of `sizes` bytes, in the order of `same`.

    `same` says for each giver which tensors it holds like the first giver. Tensors that do not
    agree on all givers come from the first: a state is never assembled from two that differ.
    """
    givers = len(same)
    assert givers and all(len(each) == len(sizes) for each in same), (sizes, same)
    shared = [all(each[number] for each in same) for number in range(len(sizes))]
    total = sum(size for number, size in enumerate(sizes) if shared[number])
    count = max(1, min(givers, total // STRIPE_BYTES_MIN))
    found: list[list[Piece]] = [[] for _ in range(givers)]
    at = 0
    for number, size in enumerate(sizes):
        if not shared[number]:
            found[0] += [(number, 0, size)] * (size > 0)
            continue
        for giver in range(count):
            start = max(at, total * giver // count)
            stop = min(at + size, total * (giver + 1) // count)
            if start < stop:
                found[giver].append((number, start - at, stop - at))
        at += size
    return found


@dataclass(frozen=True, slots=True)
class StateVerdict:
    """What members' digests of the same step show: which members agree.

    `groups`: the ranks that agree with each other, the largest group first. `right` is the group
    with more than half of all members; empty if there is none.
    """

    groups: tuple[tuple[int, ...], ...]
    right: tuple[int, ...]


def judge(digests: Sequence[bytes]) -> StateVerdict:
    """Group ranks by digest; a group of more than half is right. `digests[r]` is that of rank r."""
    assert digests, "a world has members"
    counted = Counter(digests).most_common()
    groups = [tuple(r for r, d in enumerate(digests) if d == digest) for digest, _ in counted]
    groups.sort(key=lambda ranks: (-len(ranks), ranks))
    is_majority = len(groups[0]) * 2 > len(digests)
    return StateVerdict(tuple(groups), groups[0] if is_majority else ())


def correct(verdict: StateVerdict, machines: Sequence[int], committed: int) -> Healing:
    """Return how the other members receive the state of the majority."""
    assert verdict.right, "there is a majority"
    return Healing(committed, verdict.right, _waves(verdict.right, machines), fresh=False)
