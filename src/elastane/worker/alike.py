"""Compare the DistributedDataParallel modules of all members as a world begins, and align them.

Attributes of DDP decide which collectives a forward and a backward make. Members with different
attributes wait for each other forever, or sum tensors that do not belong together. Attributes that
a training loop switches are copied from one member. Constructor arguments are compared, and a
difference raises JobError with both values on all members. The comparison costs one small
all-gather in each world.
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

# A value in an error message is cut to this many characters.
_VALUE_CHARS = 120


def make_alike(group: ElasticGroup, committed: int) -> None:
    """Compare the DDPs of all members, and give them the switches of one member.

    That member is the one with the most steps `committed`, and of several the lowest rank.
    """
    _refuse_stateful(group)
    if group.size() == 1:
        return
    own_text = _description(group)
    if _are_equal(gathered(group, [zlib.crc32(own_text), len(own_text), committed])):
        return
    gc.collect()  # A DDP that the script dropped may be kept alive by a reference cycle.
    own_text = _description(group)
    received = gathered(group, [len(own_text), committed])
    descriptions = [
        json.loads(text) for text in _texts(group, own_text, [length for length, _ in received])
    ]
    group.check()
    difference = differing([each["made"] for each in descriptions])
    if difference:
        raise _differ(difference, f"rank {group.rank()} of {group.size()}")
    steps = [committed for _, committed in received]
    right = descriptions[steps.index(max(steps))]["switches"]
    for module, values in zip(group.ddps, right, strict=True):
        ddp.switch(module, values)


def differing(made: list[list[dict[str, Any]]]) -> str:
    """Describe the first difference between the members' DDPs; "" if there is none."""
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
    """Return two values as text; of two lists only the entries that the other list lacks."""
    if isinstance(ours, list) and isinstance(theirs, list) and {*ours} != {*theirs}:
        return _lacking(ours, theirs), _lacking(theirs, ours)
    return str(ours)[:_VALUE_CHARS], str(theirs)[:_VALUE_CHARS]


def _lacking(ours: list[Any], theirs: list[Any]) -> str:
    only = [each for each in ours if each not in theirs]
    return str(only)[:_VALUE_CHARS] if only else "no others"


def _description(group: ElasticGroup) -> bytes:
    modules = group.ddps
    said = {
        "made": [ddp.described(module) for module in modules],
        "switches": [ddp.switches(module) for module in modules],
    }
    return json.dumps(said).encode()


def _are_equal(received: list[list[int]]) -> bool:
    return len({(crc, length) for crc, length, _ in received}) == 1


def _texts(group: ElasticGroup, own_text: bytes, lengths: list[int]) -> list[bytes]:
    """Return the text of each member, by rank."""
    longest = max(lengths)
    own = torch.frombuffer(bytearray(own_text.ljust(longest)), dtype=torch.uint8)
    received = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(received, own, group=group)
    return [each.numpy().tobytes()[:length] for each, length in zip(received, lengths, strict=True)]


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
