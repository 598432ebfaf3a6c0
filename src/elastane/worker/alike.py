"""Members make each DistributedDataParallel alike as a world begins, or say how they differ.

A forward or a backward makes the collectives that attributes of DDP decide. Members with different
ones wait for one another for ever, or add up what does not belong together. What a training loop
switches is taken from one member; what was given to the constructor is compared, and JobError names
both sides on all members. Costs one small all-gather in each world.
"""

from __future__ import annotations

import gc
import json
import zlib
from typing import Any

import torch
import torch.distributed as dist

from elastane.comms import ddp
from elastane.comms.elastic import ElasticGroup
from elastane.errors import JobError
from elastane.worker.healing import gathered

# The entries of a list that differ are cut to this many characters.
_VALUE_CHARS = 120


def make_alike(group: ElasticGroup, committed: int) -> None:
    """Compare this member's DDPs with the others', and switch them alike.

    Switches are those of the member that has `committed` the most steps, the first such rank.
    """
    _refuse_stateful(group)
    if group.size() == 1:
        return
    mine = _told(group)
    if _agree(gathered(group, [zlib.crc32(mine), len(mine), committed])):
        return
    gc.collect()  # A DDP that the script has dropped may be alive yet, in a cycle.
    mine = _told(group)
    heard = gathered(group, [len(mine), committed])
    told = [json.loads(text) for text in _texts(group, mine, [length for length, _ in heard])]
    group.check()
    difference = differing([each["made"] for each in told])
    if difference:
        raise _differ(difference, f"rank {group.rank()} of {group.size()}")
    steps = [committed for _, committed in heard]
    right = told[steps.index(max(steps))]["switches"]
    for module, values in zip(group.ddps, right, strict=True):
        ddp.switch(module, values)


def differing(made: list[list[dict[str, Any]]]) -> str:
    """Say in words what differs first among the DDPs of the members; "" where nothing does."""
    first = made[0]
    for rank, other in enumerate(made[1:], 1):
        if len(other) != len(first):
            return f"rank 0 has {len(first)} DistributedDataParallel, and rank {rank} {len(other)}"
        for number, (ours, theirs) in enumerate(zip(first, other, strict=True)):
            for name, value in ours.items():
                if value != theirs.get(name):
                    here, there = _apart(value, theirs.get(name))
                    return (
                        f"{name} of DistributedDataParallel {number}: {here} on rank 0,"
                        f" {there} on rank {rank}"
                    )
    return ""


def _apart(ours: Any, theirs: Any) -> tuple[str, str]:
    """Return two values as text, of lists only what the other one lacks."""
    if isinstance(ours, list) and isinstance(theirs, list) and {*ours} != {*theirs}:
        return _lacking(ours, theirs), _lacking(theirs, ours)
    return str(ours)[:_VALUE_CHARS], str(theirs)[:_VALUE_CHARS]


def _lacking(ours: list[Any], theirs: list[Any]) -> str:
    only = [each for each in ours if each not in theirs]
    return str(only)[:_VALUE_CHARS] if only else "no others"


def _told(group: ElasticGroup) -> bytes:
    modules = group.ddps
    said = {
        "made": [ddp.described(module) for module in modules],
        "switches": [ddp.switches(module) for module in modules],
    }
    return json.dumps(said).encode()


def _agree(heard: list[list[int]]) -> bool:
    return len({(crc, length) for crc, length, _ in heard}) == 1


def _texts(group: ElasticGroup, mine: bytes, lengths: list[int]) -> list[bytes]:
    """Return each member's text, by rank."""
    longest = max(lengths)
    own = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
    heard = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(heard, own, group=group)
    return [each.numpy().tobytes()[:length] for each, length in zip(heard, lengths, strict=True)]


def _refuse_stateful(group: ElasticGroup) -> None:
    for module in group.ddps:
        name = ddp.stateful_hook(module)
        if name:
            raise JobError(
                f"a DistributedDataParallel has a communication hook with a {name}",
                where=f"rank {group.rank()} of {group.size()}",
                expected="hooks that do the same on all members: a worker that joins later begins"
                " with another state, and one that repeats a step has counted it twice",
                next_step="a hook without a state, as fp16_compress_hook, or none",
                slug="job-ddp",
            )


def _differ(difference: str, where: str) -> JobError:
    return JobError(
        f"the members' models would make different collectives: {difference}",
        where=where,
        expected="each DistributedDataParallel made with the same arguments on all members, also"
        " by one that joins later",
        next_step="set what changes over a training (requires_grad) from step.number, before each"
        " step; take arguments from no variable of one node",
        slug="job-ddp",
    )
