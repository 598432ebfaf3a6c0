"""Hands the state of a job to workers that join it at a boundary of the program.

One survivor gives, each newcomer takes, over the connections of the world that they are about to
enter. A newcomer has the state only when `take` returns: a transfer that is cut off raises as the
group does, and the next world hands the state over again. Before it joins, a newcomer's program
runs alone: `answer_apart` completes what needs no other worker.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, Work

from elastane.comms import ddp, transfer
from elastane.comms.channel import GroupChannel
from elastane.comms.group import WorldGroup
from elastane.comms.works import Completed, Waited, WorkLog
from elastane.errors import ConfigurationError
from elastane.synchrony import callsites
from elastane.synchrony.operations import Site

SLUG = "joins-later"


class SharedState(Protocol):
    """The state of a program that a newcomer needs; equal on all members at a boundary."""

    def state(self) -> object:
        """Return the state, with the tensors that are in use."""

    def load(self, state: Any) -> None:
        """Accept the state of another member, whose tensors are in place already."""


class _Messages:
    """The sends and receives of a world that end when the world does."""

    def __init__(self, world: WorldGroup, log: WorkLog) -> None:
        self._group = world.group
        self._log = log

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Send to a rank."""
        return Waited(self._group.send(tensors, peer, tag), self._log, [], sliced=False)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        """Receive from a rank."""
        return Waited(self._group.recv(tensors, peer, tag), self._log, [], sliced=False)


def _channel(world: WorldGroup, log: WorkLog, peer: int) -> GroupChannel:
    messages: Any = _Messages(world, log)
    return GroupChannel(messages, peer)


def give(world: WorldGroup, log: WorkLog, taker: int, shared: SharedState) -> None:
    """Send this member's state to the rank `taker`; the program waits at a boundary meanwhile."""
    transfer.give(_channel(world, log, taker), shared.state())


def take(world: WorldGroup, log: WorkLog, giver: int, shared: SharedState) -> None:
    """Receive the state from the rank `giver` and load it."""
    taken = transfer.take([_channel(world, log, giver)], shared.state())
    shared.load(taken.state)


def answer_apart(
    group: ProcessGroup, frame: FrameType | None, name: str, args: tuple[Any, ...]
) -> Work:
    """Complete an operation of a worker that has not joined, as if all had contributed the same.

    For barriers, for broadcasts of what each member knows, and for the constructor of DDP, which
    compares its parameters and takes those of rank 0. The state of the job arrives at the boundary.
    `frame`: it called the group's method.
    """
    is_notice = name == "broadcast" and callsites.site_of(frame) is Site.AUTHORITY
    if name != "barrier" and not is_notice and not ddp.is_constructed(frame, group):
        raise ConfigurationError(
            f"a collective ({name}) before the first step, by a worker that joins a running job:"
            " the others are at their steps and take no part",
            slug=SLUG,
            expected="before the first batch only barriers and the construction of"
            " DistributedDataParallel",
            next_step="move the collective after the first batch, or let each worker compute the"
            " value by itself",
        )
    if name == "allgather":
        outputs, inputs = args[:2]
        for places, own in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(own)
    tensors = args[0] if args and isinstance(args[0], list | tuple) else []
    return Completed([t for t in tensors if isinstance(t, torch.Tensor)])
