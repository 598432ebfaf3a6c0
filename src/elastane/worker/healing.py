"""Members compare their training state as a world begins, and copy it from a state holder.

Owns the exchange, and whether this member holds the state. `comms.state_plan` decides which state
is right and which member gives to which. Fails as a collective fails, by a lost peer: a receiver
then holds no state, and a giver keeps its own. JobError if no member holds a whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms import near, transfer
from elastane.comms.channel import Channel, GroupChannel
from elastane.comms.elastic import ElasticGroup
from elastane.comms.state_plan import Handover, Healing, MemberStatus, decide
from elastane.errors import JobError
from elastane.worker.undo import Undo

_log = logging.getLogger(__name__)

_OWN = "torch.optim."


class MemberProgress(Protocol):
    """How far a member is, and the part of its state that is not in registered objects."""

    @property
    def next_step(self) -> int:
        """Return the number of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return it for another member."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept it from another member."""


class ShardHealing(Protocol):
    """Heals a state that is sharded over workers: `worker.shard_healing` implements it."""

    is_healing: bool

    def forget(self) -> None:
        """Drop the agreement on the current step."""

    def agree(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Wait until all members can make the update of `optimizer`, or end the step."""

    def put_back(self) -> None:
        """Undo a step that failed here, or keep it until it is known which member was ahead."""

    def compare(self, progress: MemberProgress) -> None:
        """Bring all members of a world to one state."""


class Health:
    """Whether this member holds the job's state, and how it receives it."""

    def __init__(self, group: ElasticGroup, tracked: RegisteredObjects) -> None:
        self._group = group
        self.tracked = tracked
        self._reserved: list[torch.Tensor] = []
        self.holds = False
        self.torn = False
        self._came_later = False
        # Whether the last step failed in its body after its update.
        self.cut_short = False
        self.shards: ShardHealing | None = None

    def heal_by(self, shards: ShardHealing) -> None:
        """Heal a state that is sharded over workers and has replicas."""
        self.shards = shards

    def prepare(self) -> None:
        """Expect a state from another member: this worker joins a running job.

        Allocates memory for it before other members wait for this one.
        """
        self._came_later = True
        if self.shards is not None:
            self.tracked.prepare()
        else:
            self._reserved = room_for(self.tracked.optimizers)

    @property
    def is_healing(self) -> bool:
        """Whether an optimizer steps as part of healing, and not of a body."""
        return self.shards is not None and self.shards.is_healing

    def forget(self) -> None:
        """Drop what the members agreed on: the current step is over."""
        if self.shards is not None:
            self.shards.forget()

    def agree(self, optimizer: torch.optim.Optimizer | None) -> None:
        """For sharded state, wait until all members can make the update of `optimizer`.

        None: wait until the step may end. Other states need no agreement.
        """
        if self.shards is not None:
            self.shards.agree(optimizer)

    def put_back(self, undo: Undo) -> None:
        """End a step that failed here; parts that cannot be restored come from another member."""
        if self.shards is not None:
            self.shards.put_back()
        elif not undo.restore():
            self.half_written()

    def keeps(self, undo: Undo, *, is_cut: bool) -> bool:
        """Return whether a step that failed here still counts: all members made its update.

        `is_cut`: the body failed, so its rest was not run. Then the step is retried if its update
        can be undone. Otherwise this member's state is replaced by that of a member whose body
        completed.
        """
        if not undo.is_whole or (is_cut and self.shards is None and undo.is_revocable):
            return False
        self.cut_short = is_cut
        return True

    def compare(self, progress: MemberProgress) -> None:
        """Bring all members of the world to the newest state."""
        if self.shards is not None:
            self.shards.compare(progress)
            return
        own = [progress.next_step, self.holds, self.torn, near.machine(), self.cut_short]
        statuses = gathered(self._group, [*own, self._came_later])
        healing = decide(
            [
                MemberStatus(n, bool(h), bool(t), m, bool(c), bool(later))
                for n, h, t, m, c, later in statuses
            ]
        )
        if healing is None:
            raise JobError(
                "no worker of this world holds the state of the job",
                expected="one that was not lost before it had given its state to others",
                next_step="let the script load its checkpoint when it starts",
                slug="job-state-lost",
            )
        for handover in of_member(healing, self._group.rank()):
            if handover.receiver == self._group.rank():
                self._receive(handover, progress)
            else:
                give(self._group, handover, self._state(progress))
        if healing.receivers:
            # After the barrier, each member knows that all others hold the state too.
            dist.barrier(group=self._group)
        self._group.check()
        self.whole()
        self._reserved = []

    def _receive(self, handover: Handover, progress: MemberProgress) -> None:
        found = take(
            self._group,
            handover,
            {"tracked": self.tracked.state()},
            room=self._reserved,
            when_writing=self.half_written,
        )
        self.half_written()  # Also if no tensor differed and nothing was written yet.
        self.tracked.load(found.state["tracked"])
        progress.load_state_dict(found.state["data"])
        self.whole()

    def half_written(self) -> None:
        """Record that this member's state is being overwritten."""
        self.holds = False
        self.torn = True

    def whole(self) -> None:
        """Record that this member holds a whole state."""
        self.holds = True
        self.torn = False
        self.cut_short = False

    def _state(self, progress: MemberProgress) -> dict[str, Any]:
        return {"tracked": self.tracked.state(), "data": progress.state_dict()}


def gathered(group: ElasticGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers that each member contributes, by rank: as many 64-bit integers as here."""
    own = torch.tensor(numbers, dtype=torch.int64)
    received = [torch.zeros_like(own) for _ in range(group.size())]
    dist.all_gather(received, own, group=group)
    return [each.tolist() for each in received]


def of_member(healing: Healing, rank: int) -> list[Handover]:
    """Return the handovers that a member takes part in, in order."""
    waves = (each for wave in healing.waves for each in wave)
    return [each for each in waves if rank == each.receiver or rank in each.givers]


def give(group: ElasticGroup, handover: Handover, state: object) -> None:
    """Send this member's part of a handover."""
    peer = handover.receiver
    channel = near.to_give(group, peer) if handover.near else GroupChannel(group, peer)
    try:
        transfer.give(channel, state)
    finally:
        channel.close()


def take(group: ElasticGroup, handover: Handover, into: object, **more: Any) -> transfer.StateTaken:
    """Receive a handover; `more` is for `transfer.take`."""
    channels: list[Channel] = []
    try:
        for peer in handover.givers:
            is_near = handover.near
            channels.append(near.to_take(group, peer) if is_near else GroupChannel(group, peer))
        return transfer.take(channels, into, **more)
    finally:
        for channel in channels:
            channel.close()


def room_for(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return touched tensors like those that optimizers without a state will hold.

    Memory that is first touched while it is being received costs more than the receiving: 20 to 50
    ms for the 67 MB of AdamW (2026-11-21). A joining worker waits for its place anyway, so it
    allocates the memory then. A wrong guess wastes memory until the state has arrived, or saves no
    time.
    """
    found = []
    for optimizer in optimizers:
        # Constructing an optimizer that is not torch's may have side effects.
        if optimizer.state or not type(optimizer).__module__.startswith(_OWN):
            continue
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            count = _moments(type(optimizer), settings)
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.device.type == "cpu":
                    found += [torch.ones_like(parameter.detach()) for _ in range(count)]
    return found


def _moments(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> int:
    """Return how many tensors of a parameter's shape such an optimizer holds for it.

    A copy of the optimizer steps over one parameter of two numbers. This also makes torch load what
    the first step needs.
    """
    probe = torch.nn.Parameter(torch.ones(2))
    probe.grad = torch.ones(2)
    try:
        # The settings of a group are arguments of the constructor.
        make: Callable[..., torch.optim.Optimizer] = kind
        twin = make([{"params": [probe], **settings}])
        twin.step()
    except (TypeError, ValueError, RuntimeError) as error:
        _log.debug("the state of a %s cannot be predicted: %s", kind.__name__, error)
        return 0
    held = twin.state[probe].values()
    return sum(isinstance(each, torch.Tensor) and each.shape == probe.shape for each in held)
