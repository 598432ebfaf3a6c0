"""Decides which member gives which shard to which, when a world begins. Pure.

A member makes an update only when all members hold their whole reductions (`Shards.agree`). If one
member has made an update, every other can make it from what it holds. A member whose body was cut
short after its update lacks what the rest of the body changes, and takes that from one whose body
completed, or from the first of those whose bodies were cut short, since they may have stopped at
different places. A member without its shard receives it from a member that holds the same one. No
update is undone.

What the code of a step changes of the parameters after the update, such as an average of them, no
member can make for its own shard later. A member that lacks such a change receives its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastane.comms.state_plan import Handover, MemberStatus, decide


class OwnChanges(IntEnum):
    """Whether a step changed parameters after its last update, such as an average of the weights.

    OUTSIDE: after the body, as under `if step.committed:`. INSIDE: in the body.
    """

    NONE = 0
    OUTSIDE = 1
    INSIDE = 2


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """What one member reports: its committed steps, and whether it holds its shard at that step.

    `torn`: it does not hold the initial state either, since half of it was overwritten or since it
    joined later. `ready`: it holds its whole reduction of the next step. `cut`: its body failed
    after the last update. `own`: what its last step changed after the update. `stuck`: it is ready,
    and cannot undo what its body has changed before. `machine`: as in `MemberStatus`.
    """

    committed: int
    holds: bool
    torn: bool
    ready: bool
    shard: int
    machine: int
    cut: bool = False
    own: OwnChanges = OwnChanges.NONE
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How all members reach `committed` steps, by rank.

    `leader` sends the `advancing` members what does not follow from their own shard, and they make
    the update unless they have made it. Then all perform the `handovers` in order. No member holds
    the `lost` shards; `own`: one may hold them that lacks a change after the update.
    """

    committed: int
    leader: int
    advancing: tuple[int, ...]
    handovers: tuple[Handover, ...]
    lost: tuple[int, ...]
    own: OwnChanges = OwnChanges.NONE


def plan(claims: Sequence[ShardClaim], shards: int) -> ShardPlan:
    """Return how a world comes to one state; `claims` by rank, the same on all members.

    `shards`: how many shards the state has. In a world without whole replicas a shard may be lost.
    """
    assert claims, "a world has members"
    committed = max((claim.committed for claim in claims if claim.holds), default=0)
    newest = [
        rank
        for rank, claim in enumerate(claims)
        if claim.holds and claim.committed == committed and not claim.stuck
    ]
    right = [rank for rank in newest if not claims[rank].cut] or newest[:1]
    own = max((claims[rank].own for rank in newest), default=OwnChanges.NONE)
    advancing = [rank for rank in newest if rank not in right and own < OwnChanges.INSIDE]
    if own is OwnChanges.NONE:
        advancing += [
            rank
            for rank, claim in enumerate(claims)
            if claim.holds and claim.ready and claim.committed == committed - 1
        ]
    advancing.sort()
    handovers: list[Handover] = []
    lost = []
    for shard in range(shards):
        ranks = [rank for rank, claim in enumerate(claims) if claim.shard == shard]
        givers = {rank for rank in ranks if rank in right or rank in advancing}
        if not givers and not committed:
            # Before the first step, members of the first world hold the common initial state.
            givers = {r for r in ranks if not (claims[r].torn or claims[r].stuck)}
        if not givers:
            lost.append(shard)
            continue
        handovers += _within(ranks, givers, claims)
    leader = right[0] if right else 0
    return ShardPlan(committed, leader, tuple(advancing), tuple(handovers), tuple(lost), own)


def _within(ranks: list[int], givers: set[int], claims: Sequence[ShardClaim]) -> list[Handover]:
    """Return the handovers among the members that hold the same shard."""
    healing = decide(
        [MemberStatus(0, rank in givers, machine=claims[rank].machine) for rank in ranks]
    )
    assert healing is not None and not healing.fresh, "a giver exists"
    return [
        Handover(ranks[each.receiver], tuple(ranks[giver] for giver in each.givers), each.near)
        for wave in healing.waves
        for each in wave
    ]
