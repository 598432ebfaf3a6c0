"""Sharded state (`fully_shard`) that recovers in place: replicas of a shard heal it.

Owns what a step adds for that, and how the members of a world come to one state again. An update is
made only once all members hold their whole reductions. Otherwise one shard could be a step ahead of
another that no member could advance. That costs an all-reduce of one number a step.
`worker.shard_plan` decides which member is ahead, and `comms.mesh` the mesh coordinates. Fails as a
collective fails, and by JobError if no member holds some shard.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from elastane.checkpoint.registered import RegisteredObjects
from elastane.comms import near
from elastane.comms.elastic import ElasticGroup
from elastane.comms.mesh import MeshGroups
from elastane.comms.state_plan import Handover
from elastane.errors import JobError
from elastane.worker import healing
from elastane.worker.healing import MemberProgress
from elastane.worker.shard_plan import OwnChanges, ShardClaim, ShardPlan, plan
from elastane.worker.undo import Undo


class Agreement(Enum):
    """How far the members are with an update.

    READY: this member holds what the update needs. REACHED: all members do.
    """

    NONE = auto()
    READY = auto()
    REACHED = auto()


class Shards:
    """The shards of one worker; `compare` is a collective of a world, `agree` of each step."""

    def __init__(
        self,
        group: ElasticGroup,
        mesh: MeshGroups,
        health: healing.Health,
        undo: Undo,
        *,
        came_later: bool,
    ) -> None:
        self._group = group
        self._mesh = mesh
        self._tracked = health.tracked
        self._health = health
        self._undo = undo
        undo.follow()
        self._came_later = came_later
        self.is_healing = False
        self._agreement = Agreement.NONE
        # The optimizer whose update was agreed on last, or is being agreed on; None: the body's
        # end.
        self._next: torch.optim.Optimizer | None = None

    def forget(self) -> None:
        """Drop the agreement: the current step is over."""
        self._agreement = Agreement.NONE
        self._next = None

    def agree(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Wait until all members hold what an update needs, and have made the earlier updates.

        Called once for each optimizer in its turn, and with None at the end of a body in which not
        all of them stepped. A member that is a step ahead then knows that the others lack one
        update at most, and can make it. Raises as a collective does. With a single replica it does
        not wait, since the loss of a worker restarts all workers.
        """
        is_known = self._undo.is_whole if optimizer is None else self._next is optimizer
        if self._agreement is Agreement.REACHED and is_known:
            return
        self._agreement = Agreement.READY
        self._next = optimizer
        try:
            if not self._mesh.is_sole:
                dist.all_reduce(torch.ones(1), group=self._group)
        except RuntimeError:
            self._group.check()
            raise
        self._group.check()
        self._agreement = Agreement.REACHED

    def put_back(self) -> None:
        """End a failed step: undo it, or keep it until it is known which member was ahead."""
        if self._agreement is not Agreement.READY:
            if not self._undo.restore():
                self._health.half_written()  # The update itself failed, at an unknown place.
            self.forget()

    def compare(self, progress: MemberProgress) -> None:
        """Bring all members of a world to one state."""
        reset(self._tracked)
        found = plan(self._claims(progress), self._mesh.shards)
        if found.lost:
            raise self._lost(found)
        rank = self._group.rank()
        if self._agreement is not Agreement.NONE and rank not in found.advancing:
            if not self._undo.restore():
                self._health.half_written()
            self.forget()
        self.is_healing = True
        try:
            self._advance(found, progress)
            for handover in found.handovers:
                if rank == handover.receiver:
                    self._receive(handover, progress)
                elif rank in handover.givers:
                    healing.give(self._group, handover, self._state(progress))
        finally:
            self.is_healing = False
        if found.advancing or found.handovers:
            dist.barrier(group=self._group)
        self._group.check()
        self._health.whole()
        self._undo.healed()

    def _claims(self, progress: MemberProgress) -> list[ShardClaim]:
        health = self._health
        torn = not health.holds and (health.torn or self._came_later)
        ready = self._agreement is not Agreement.NONE
        own = [progress.next_step, health.holds, torn, ready, self._mesh.coordinate]
        own += [near.machine(), health.cut_short, self._own_changes()]
        received = healing.gathered(self._group, [*own, ready and self._undo.is_stuck])
        return [
            ShardClaim(
                n,
                bool(holds),
                bool(torn),
                bool(ready),
                self._mesh.shard_of(coordinate),
                machine,
                bool(cut),
                OwnChanges(changes),
                bool(stuck),
            )
            for n, holds, torn, ready, coordinate, machine, cut, changes, stuck in received
        ]

    def _own_changes(self) -> OwnChanges:
        """Return what no member can change for another, in parameters and in sharded other state.

        An average in an object that is no module may change in each step.
        """
        states = [thing.state_dict() for thing in self._tracked.others]
        if any(isinstance(each, DTensor) for each in tree_leaves(states)):
            return OwnChanges.INSIDE
        return self._undo.own_changes

    def _advance(self, found: ShardPlan, progress: MemberProgress) -> None:
        """Let ready members make the update that others have made, and cut ones take its rest."""
        rank = self._group.rank()
        for each in found.advancing:
            handover = Handover(each, (found.leader,), near=False)
            if rank == found.leader:
                healing.give(self._group, handover, self._small(progress))
            elif rank == each:
                small = healing.take(self._group, handover, None).state
                self._update(small)
                progress.load_state_dict(small["data"])

    def _update(self, small: dict[str, Any]) -> None:
        tracked = self._tracked
        if self._next is not None:
            self._next.step()
        for optimizer, groups in zip(tracked.optimizers, small["settings"], strict=True):
            for group, held in zip(optimizer.param_groups, groups, strict=True):
                group.update(held)
        for thing, state in zip(tracked.others, small["others"], strict=True):
            thing.load_state_dict(state)
        for parameter in tracked.parameters():
            parameter.grad = None
        self.forget()

    def _small(self, progress: MemberProgress) -> dict[str, Any]:
        """Return what the rest of a body may have changed and is the same on all members."""
        tracked = self._tracked
        settings = [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in tracked.optimizers
        ]
        others = [thing.state_dict() for thing in tracked.others]
        return {"settings": settings, "others": others, "data": progress.state_dict()}

    def _receive(self, handover: Handover, progress: MemberProgress) -> None:
        for parameter in self._tracked.parameters():
            parameter.grad = None  # A state with gradients cannot be prepared.
        self._tracked.prepare()
        own = self._tracked.state()
        found = healing.take(
            self._group,
            handover,
            {"tracked": local(own)},
            when_writing=self._health.half_written,
        )
        self._health.half_written()
        self._tracked.load(placed(own, found.state["tracked"]))
        progress.load_state_dict(found.state["data"])
        self._health.whole()
        self._undo.received()

    def _state(self, progress: MemberProgress) -> dict[str, Any]:
        return {"tracked": local(self._tracked.state()), "data": progress.state_dict()}

    def _lost(self, found: ShardPlan) -> JobError:
        numbers = ", ".join(map(str, found.lost))
        what = f"all workers that held shard {numbers} are lost"
        expected = "one worker that holds it"
        if found.own is not OwnChanges.NONE:
            what += ", or were interrupted before the step changed their weights after its update"
            expected = "one worker that completed the step, such as its average of the weights"
        return JobError(
            what,
            where=f"rank {self._group.rank()} of {self._group.size()}, step {found.committed}",
            expected=f"of each shard, {expected}",
            next_step="a Checkpointer in the script: all workers start again and continue from it",
            slug="job-state-lost",
        )


def local(state: Any) -> Any:
    """Return a state in which this worker's own shards replace the sharded tensors."""
    if isinstance(state, DTensor):
        return _part(state)
    if isinstance(state, dict):
        return {key: local(each) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(local(each) for each in state)
    return state


def _part(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part


def placed(own: Any, found: Any) -> Any:
    """Return the state `found`, of another's `local`, with this worker's sharded tensors."""
    if isinstance(found, torch.Tensor):
        if isinstance(own, DTensor):
            part = _part(own)
            if part.data_ptr() != found.data_ptr():
                part.copy_(found)
            return own
        if own is None and found.dim():
            raise _unplaced(found)
        return found
    if isinstance(found, dict):
        mine = own if isinstance(own, dict) else {}
        return {key: placed(mine.get(key), each) for key, each in found.items()}
    if type(found) in (list, tuple):
        parts = [*own] if isinstance(own, (list, tuple)) and len(own) == len(found) else []
        parts = parts or [None] * len(found)
        return type(found)(placed(*pair) for pair in zip(parts, found, strict=True))
    return found


def reset(tracked: RegisteredObjects) -> None:
    """Make sharded modules drop an interrupted forward or backward, and its gradients.

    torch (2.13) keeps gradients of parameters that were gathered at that moment.
    """
    for module in tracked.modules:
        for each in module.modules():
            if not isinstance(each, FSDPModule):
                continue
            state = each._get_fsdp_state()
            if state._is_root:
                each.reset_iter_state()
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def _unplaced(found: torch.Tensor) -> JobError:
    return JobError(
        f"an optimizer of another worker holds a tensor of {tuple(found.shape)} that has no place"
        " here",
        expected="an optimizer whose first step creates all of its state, as torch's own do",
        next_step="make that tensor when the optimizer is made",
        slug="job-track",
    )
