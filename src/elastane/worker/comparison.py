"""Compare the members of a world: their DDP modules as it begins, their states as it trains.

Attributes of DDP decide which collectives a forward and a backward make. Members with different
attributes wait for each other forever, or sum tensors that do not belong together. Attributes that
a training loop switches are copied from one member. Constructor arguments are compared, and a
difference raises JobError with both values on all members. The comparison costs one small
all-gather in each world.

All members of a world hold the same parameters and optimizer state, to the last bit. If one
differs, its memory or processor is at fault, or its script used randomness of its own. `Replicas`
names such a member and heals it. Buffers and random streams are each member's own and are not
compared. Unless more than half of the members agree, it is unknown which state is right, and
JobError is raised.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms import ddp, near
from elastane.comms.digest import state_digest
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state_plan import StateVerdict, correct, judge
from elastane.errors import JobError
from elastane.worker.healing import Health, gathered, give, of_member, take

# A digest as two numbers of 64 bits.
_NUMBERS = struct.Struct("<2q")
_NAMES_MAX = 3
# A value in an error message is cut to this many characters.
_VALUE_CHARS = 120


class Replicas:
    """Compares one member; `verify` is a collective, and `differed` reports a difference here."""

    def __init__(
        self,
        group: ElasticGroup,
        tracked: RegisteredObjects,
        health: Health,
        differed: Callable[[int, str], None],
    ) -> None:
        self._group = group
        self._tracked = tracked
        self._health = health
        self._differed = differed

    def verify(self, committed: int) -> None:
        """Compare all members' state after `committed` steps, and heal one that differs."""
        digest = bytes.fromhex(state_digest(self._tracked.replicas()))
        received = gathered(self._group, [*_NUMBERS.unpack(digest), near.machine()])
        verdict = judge([_NUMBERS.pack(*words) for *words, _ in received])
        if len(verdict.groups) == 1:
            return
        if not verdict.right:
            raise _undecided(verdict, committed)
        rank = self._group.rank()
        if rank == verdict.right[0]:
            differing = [each for group in verdict.groups[1:] for each in group]
            _report(f"{_ranks(differing)} differ from {_ranks(verdict.right)}", committed)
        healing = correct(verdict, [machine for *_, machine in received], committed)
        for handover in of_member(healing, rank):
            if handover.receiver == rank:
                found = take(
                    self._group,
                    handover,
                    self._tracked.replicas(),
                    when_writing=self._health.half_written,
                )
                self._tracked.load_replicas(found.state)
                self._health.whole()
                names = _short(found.differed)
                others = _ranks(verdict.right)
                text = f"rank {rank} on node {_node()} differed from {others}: {names}"
                self._differed(committed, _report(text, committed))
            else:
                give(self._group, handover, self._tracked.replicas())
        self._group.check()


def _report(what: str, committed: int) -> str:
    text = f"replicas after {committed} steps: {what}; the state of the majority is taken"
    sys.stderr.write(f"elastane: {text}\n")
    return text


def _short(names: list[str]) -> str:
    shown = [name.removeprefix("state") for name in names[:_NAMES_MAX]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _node() -> str:
    return os.environ.get("ELASTANE_NODE") or socket.gethostname()


def _undecided(verdict: StateVerdict, committed: int) -> JobError:
    groups = "; ".join(_ranks(group) for group in verdict.groups)
    return JobError(
        f"replicas differ after {committed} steps, and no more than half of them agree: {groups}",
        where=f"node {_node()}",
        expected="the same parameters and optimizer state on all workers, to the last bit",
        next_step="let the script load its checkpoint when it starts; see what draws on its own",
        slug="job-replicas",
    )


def align_ddps(group: ElasticGroup, committed: int) -> None:
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
