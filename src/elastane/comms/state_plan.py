"""Whose state is right when a world begins, and who gives what of it to whom. Pure.

A worker can only have applied step s if its reduction of step s was complete, and then it holds
every member's contribution. So whoever has committed more is right, and nobody is behind by more
than the step that was in hand. A worker that has just come, or whose healing was cut short, holds
no state, however many steps it once knew of.

State travels in waves: who has it by then gives it in the next one. To a machine that holds none
it goes once, from all machines that do, a stripe from each; within a machine from one to another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# How many give to one at once: beyond that the receiver is what limits.
GIVERS_MAX = 8
# Below this a stripe of its own is not worth a message.
STRIPE_BYTES_MIN = 1 << 20

# The bytes of one tensor, by its number, from here up to there.
Piece: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one member says of itself: steps committed, and whether it holds their state.

    `torn`: it was receiving a state that did not come to its end, and holds half of each.
    `machine`: the same number on all members that can share memory; 0 is no machine.
    `cut_short`: the body of its last step broke off behind the update, and the rest was not run.
    """

    committed: int
    holds: bool
    torn: bool = False
    machine: int = 0
    cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Handover:
    """One member gets its state; of what is the same on all `givers`, a stripe from each.

    `near`: giver and receiver can share memory.
    """

    receiver: int
    givers: tuple[int, ...]
    near: bool


@dataclass(frozen=True, slots=True)
class Healing:
    """Whose state is right, by rank, and how it reaches the others before the world makes a step.

    `fresh`: nobody has made a step yet; that of rank 0 is where all begin. Members go through
    `waves` in their order; in one wave nobody gives twice, nor gives what it gets there.
    """

    committed: int
    right: tuple[int, ...]
    waves: tuple[tuple[Handover, ...], ...]
    fresh: bool

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who gets a state, in the order of ranks."""
        return tuple(sorted(each.receiver for wave in self.waves for each in wave))


def decide(standings: Sequence[MemberStatus]) -> Healing | None:
    """Return who heals whom; `standings` in the order of ranks, the same on all members.

    None: nobody holds a state, and some have half of one; all are to begin anew.
    """
    assert standings, "a world has members"
    machines = [standing.machine for standing in standings]
    holders = [rank for rank, standing in enumerate(standings) if standing.holds]
    if not holders and any(standing.torn for standing in standings):
        return None
    if not holders:
        return Healing(0, (0,), _waves((0,), machines), fresh=True)
    committed = max(standings[rank].committed for rank in holders)
    right = tuple(rank for rank in holders if standings[rank].committed == committed)
    whole = tuple(rank for rank in right if not standings[rank].cut_short)
    # Bodies that broke off may have done so at different places: one of them is taken for all.
    right = whole or right[:1]
    return Healing(committed, right, _waves(right, machines), fresh=False)


def _waves(right: Sequence[int], machines: Sequence[int]) -> tuple[tuple[Handover, ...], ...]:
    """One member of each machine without a holder first, then all others from one of their own."""
    holders: dict[int, list[int]] = {}
    seekers: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        # Who shares memory with nobody is on a machine of its own.
        place = machine or ~rank
        (holders if rank in right else seekers).setdefault(place, []).append(rank)
    heads = [seekers[place].pop(0) for place in seekers if place not in holders]
    near: defaultdict[int, list[Handover]] = defaultdict(list)
    for place, waiting in seekers.items():
        have = holders.get(place) or [head for head in heads if machines[head] == place]
        for number, wave in enumerate(_spread(have, waiting, near=True)):
            near[number] += wave
    # One of each machine: those of one machine share its network.
    far = _spread([ranks[0] for ranks in holders.values()], heads, near=False)
    return tuple(tuple(wave) for wave in (*far, *near.values()))


def _spread(have: Sequence[int], waiting: Sequence[int], *, near: bool) -> list[list[Handover]]:
    """Each wave, all who have it give; who has got it gives from the next one on."""
    have, waiting, waves = list(have), list(waiting), []
    while waiting:
        now, waiting = waiting[: len(have)], waiting[len(have) :]
        # Memory is no quicker for several.
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

    `same` says for each giver which tensors it holds as the first one does. Those that not all
    hold come from the first: a state is never put together of two that differ.
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
    """What members' digests of the same step say: who differs from whom.

    `groups`: the ranks that agree with each other, the largest group first. `right` is that of
    more than half of all, and empty where none is.
    """

    groups: tuple[tuple[int, ...], ...]
    right: tuple[int, ...]


def judge(digests: Sequence[bytes]) -> StateVerdict:
    """Return which replicas are to be believed; `digests` in the order of ranks."""
    assert digests, "a world has members"
    counted = Counter(digests).most_common()
    groups = [tuple(r for r, d in enumerate(digests) if d == digest) for digest, _ in counted]
    groups.sort(key=lambda ranks: (-len(ranks), ranks))
    is_majority = len(groups[0]) * 2 > len(digests)
    return StateVerdict(tuple(groups), groups[0] if is_majority else ())


def correct(verdict: StateVerdict, machines: Sequence[int], committed: int) -> Healing:
    """Return how those who differ get the state of the majority."""
    assert verdict.right, "there is a majority"
    return Healing(committed, verdict.right, _waves(verdict.right, machines), fresh=False)
