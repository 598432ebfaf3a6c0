"""Compare replicas at a fixed interval of steps: name one that differs, and heal it.

All members of a world hold the same parameters and optimizer state, to the last bit. If one
differs, its memory or processor is at fault, or its script used randomness of its own. Buffers and
random streams are each member's own and are not compared. If no more than half of the members
agree, nothing tells which state is right, and JobError is raised.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms import near
from elastane.comms.digest import state_digest
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state_plan import StateVerdict, correct, judge
from elastane.errors import JobError
from elastane.worker.healing import Health, gathered, give, of_member, take

# A digest as two numbers of 64 bits.
_NUMBERS = struct.Struct("<2q")
_NAMES_MAX = 3


class Replicas:
    """Compares one member; `verify` is a collective, and `differed` reports a difference here."""

    def __init__(
        self,
        group: ElasticGroup,
        tracked: RegisteredObjects,
        health: Health,
        differed: Callable[[int, str], None],
    ) -> None:
        self._group, self._tracked, self._health = group, tracked, health
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
                    *(self._group, handover, self._tracked.replicas()),
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
