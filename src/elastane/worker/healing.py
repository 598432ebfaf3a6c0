"""Members compare their state as a world begins, and take over the one that is right.

Owns the exchange, and what this member holds; who is right, and who gives to whom, is decided in
core. Fails as a collective fails, by a peer that is lost: who was receiving then holds nothing, and
who was giving holds what it held. JobError where no state is left that is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from elastane.checkpoint.registered import Tracked
from elastane.comms import near, transfer
from elastane.comms.channel import Channel, GroupChannel
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state_plan import Handover, Healing, MemberStatus, decide
from elastane.errors import JobError
from elastane.worker.room import room_for
from elastane.worker.undo import Undo

if TYPE_CHECKING:
    from elastane.worker.shards import Shards


class MemberProgress(Protocol):
    """How far a member is, with what a state needs besides what is tracked."""

    @property
    def next_step(self) -> int:
        """The number of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return it for another member."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another member's."""


class Health:
    """Whether this member holds the job's state, and the way to it."""

    def __init__(self, group: ElasticGroup, tracked: Tracked) -> None:
        self._group, self.tracked = group, tracked
        self._room: list[torch.Tensor] = []
        self.holds = False
        self.torn = False
        # Whether the last step broke off in its body, behind its update.
        self.cut_short = False
        # Of a state that is sharded over workers, and has replicas.
        self.shards: Shards | None = None

    def prepare(self) -> None:
        """Make room for a state that is to come, while nobody waits for this member yet."""
        if self.shards is not None:
            self.tracked.prepare()
        else:
            self._room = room_for(self.tracked.optimizers)

    @property
    def is_healing(self) -> bool:
        """Whether an optimizer steps for another reason than that a body says so."""
        return self.shards is not None and self.shards.is_healing

    def forget(self) -> None:
        """Forget what was agreed on: the step in hand was made."""
        if self.shards is not None:
            self.shards.forget()

    def agree(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Wait until an update may be made, where that is not for each member alone to say.

        None: until the step may end.
        """
        if self.shards is not None:
            self.shards.agree(optimizer)

    def put_back(self, undo: Undo) -> None:
        """End a step that did not happen here; what cannot be put back comes from another."""
        if self.shards is not None:
            self.shards.put_back()
        elif not undo.restore():
            self.half_written()

    def keeps(self, undo: Undo, *, is_cut: bool) -> bool:
        """Whether a step that failed here has happened: its update was made, as on all members.

        `is_cut`: the failure was in the body, and the rest of the body was not run. Then the step
        is retried where its update can be taken back. Where not, this member's state gives way to
        that of one whose body came to its end.
        """
        if not undo.is_whole or (is_cut and self.shards is None and undo.is_revocable):
            return False
        self.cut_short = is_cut
        return True

    def compare(self, progress: MemberProgress) -> None:
        """Bring all members of the world to one state: that of who is furthest."""
        if self.shards is not None:
            self.shards.compare(progress)
            return
        said = [progress.next_step, self.holds, self.torn, near.machine(), self.cut_short]
        heard = gathered(self._group, said)
        healing = decide([MemberStatus(n, bool(h), bool(t), m, bool(c)) for n, h, t, m, c in heard])
        if healing is None:
            raise JobError(
                "no worker of this world holds the state of the job",
                expected="one that was not lost before it had given its state to others",
                next_step="let the script load its checkpoint when it starts",
                slug="job-state-lost",
            )
        for handover in of_member(healing, self._group.rank()):
            if handover.receiver == self._group.rank():
                self._take(handover, progress)
            else:
                give(self._group, handover, self._state(progress))
        if healing.receivers:  # Who goes on from here knows that all others hold the state too.
            dist.barrier(group=self._group)
        self._group.check()
        self.whole()
        self._room = []

    def _take(self, handover: Handover, progress: MemberProgress) -> None:
        found = take(
            *(self._group, handover, {"tracked": self.tracked.state()}),
            room=self._room,
            when_writing=self.half_written,
        )
        self.half_written()  # Also where nothing of the tensors differed.
        self.tracked.load(found.state["tracked"])
        progress.load_state_dict(found.state["data"])
        self.whole()

    def half_written(self) -> None:
        """From now on, what this member held is being overwritten."""
        self.holds, self.torn = False, True

    def whole(self) -> None:
        """From now on, this member holds a state."""
        self.holds, self.torn, self.cut_short = True, False, False

    def _state(self, progress: MemberProgress) -> dict[str, Any]:
        return {"tracked": self.tracked.state(), "data": progress.state_dict()}


def gathered(group: ElasticGroup, numbers: Sequence[int]) -> list[list[int]]:
    """What each member says, by rank: as many numbers of 64 bits as this one."""
    said = torch.tensor(numbers, dtype=torch.int64)
    heard = [torch.zeros_like(said) for _ in range(group.size())]
    dist.all_gather(heard, said, group=group)
    return [each.tolist() for each in heard]


def of_member(healing: Healing, rank: int) -> list[Handover]:
    """What a member has to do, in its order."""
    waves = (each for wave in healing.waves for each in wave)
    return [each for each in waves if rank == each.receiver or rank in each.givers]


def give(group: ElasticGroup, handover: Handover, state: object) -> None:
    """Be one of the givers of a handover."""
    peer = handover.receiver
    channel = near.to_give(group, peer) if handover.near else GroupChannel(group, peer)
    try:
        transfer.give(channel, state)
    finally:
        channel.close()


def take(group: ElasticGroup, handover: Handover, into: object, **more: Any) -> transfer.StateTaken:
    """Be the receiver of a handover; `more` is for `transfer.take`."""
    channels: list[Channel] = []
    try:
        for peer in handover.givers:
            is_near = handover.near
            channels.append(near.to_take(group, peer) if is_near else GroupChannel(group, peer))
        return transfer.take(channels, into, **more)
    finally:
        for channel in channels:
            channel.close()
