"""A process group of torch that stays the same object when its world changes.

`ElasticGroup` is the group that a user and DDP hold. It forwards every operation to the group of
the current world; `replace` sets another, with another rank and size. It does not know the reason.
After a failure, or once the world was aborted, every operation raises PeerLostError at once, until
`replace`. Pending operations fail as torch reports it. Before an optimizer steps, `check` has to be
called: an operation may have failed that was not waited for.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

from elastane.comms import ddp
from elastane.comms.group import TRANSPORT, WorldGroup
from elastane.comms.pairing import Pairing
from elastane.comms.untraced import refuse_to_keep, skipped
from elastane.comms.works import Completed, Together, Waited, WorkLog
from elastane.errors import ConfigurationError, JobError, PeerLostError

# Pause between two queries of a device.
_POLL_S = 0.0002

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    "_end_coalescing",
)
# Waits for these may time out without harm (gloo, 2.13).
SLICED = frozenset(
    (
        *("allreduce", "broadcast", "allgather", "barrier", "reduce", "alltoall_base"),
        *("all_gather_single", "_allgather_base"),
    )
)
# `check` does not wait for these: a receive may be meant for a later step.
_MESSAGES = ("send", "recv")
_QUESTIONS = (
    *("_start_coalescing", "_get_backend", "_backend_id", "_has_hooks", "_wait_for_pending_works"),
    *(
        "monitored_barrier",
        "set_timeout",
        "_get_sequence_number_for_group",
        "_set_sequence_number_for_group",
    ),
)
T = TypeVar("T", bound=Callable[..., Any])
# (tensor to send from or receive into, rank of the peer, tag).
Message: TypeAlias = tuple[torch.Tensor, int, int]


def members_left(group: object) -> contextlib.AbstractContextManager[None]:
    """Return `ElasticGroup.members_left` of `group`; no other group shows members that are lost."""
    return group.members_left() if isinstance(group, ElasticGroup) else contextlib.nullcontext()


class ElasticGroup(ProcessGroup):
    """The group of the current world; `replace` changes the world beneath its users."""

    def __init__(
        self, name: str = "elastane", when_begun: Callable[[], None] | None = None
    ) -> None:
        """`when_begun` is called at the beginning of each operation, by its thread."""
        super().__init__(0, 1)  # type: ignore[call-arg]  # as torch has it for subclasses
        self._label = name
        self._world: WorldGroup | None = None
        self._works = WorkLog()
        # By id, in the order of construction, which is the same on all members.
        self._ddps: dict[int, weakref.ref[DistributedDataParallel]] = {}
        self._registered = False
        self._when_begun = when_begun
        self._guard: Callable[[str], None] | None = None
        self.apart = False
        self.pairing = Pairing(self)
        self.parts: tuple[ElasticGroup, ...] = ()

    def members_left(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which rank and size are those of the members that are left.

        The code in it asks for them in each call, on all members alike.
        """
        return contextlib.nullcontext()

    def counted(self, *, interrupted: bool) -> None:
        """Record that a framework has summed a few counts for the script.

        `interrupted`: since it was called for that, the program sees another world.
        """

    def asked_size(self) -> None:
        """Record that the script has asked a framework for the world size."""

    def guard_by(self, guard: Callable[[str], None]) -> None:
        """Call `guard` with the name of each of torch's operations before it; it may refuse it."""
        self._guard = guard

    def build_apart(self, apart: bool) -> None:
        """Set whether this member builds alone: no other member takes part in its operations."""
        self.apart = apart

    def consist_of(self, parts: tuple[ElasticGroup, ...]) -> None:
        """Count the failures and waits of these groups of some of the members here too."""
        self.parts = parts

    def register(self) -> None:
        """Register the group with torch.distributed, as the default group if there is none."""
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
        _register(self, self._label, backends)
        _set_members(self, _members(self._world))
        ddp.accept_builtin_hooks(ElasticGroup)
        self._registered = True

    def show_members(self, members: Iterable[int]) -> None:
        """Set the members that torch's tables show: ranks of the job, in the group's order."""
        if self._registered:
            _set_members(self, members)

    def unregister(self) -> None:
        """Remove the group from torch.distributed's tables."""
        if self._registered:
            self._registered = False
            _unregister(self)

    def replace(self, world: WorldGroup, *, keeps: bool = False) -> None:
        """Continue in `world`, which is built; forget the failure of the former world.

        The former world is closed, unless `keeps` is set: then the caller owns it. Never call this
        while a forward or backward runs, since each DDP over this group gets a new reducer.
        """
        broke = self.failed
        former, self._world = self._world, world
        self._works.close()
        self._works = WorkLog(world.refuses)
        world.when_aborted = self._works.releaser()
        if former is not None and former is not world:
            self.pairing.left(former.wiring.fence, former.size, broke=broke)
        if former is not None and former is not world and not keeps:
            former.close()
        if self._registered:
            _set_members(self, _members(world))
        for module in self.ddps:
            ddp.renew(module)

    @property
    def ddps(self) -> list[DistributedDataParallel]:
        """The living DDP modules over this group, in the order of construction."""
        found = [module for ref in [*self._ddps.values()] if (module := ref()) is not None]
        self._ddps = {id(module): self._ddps[id(module)] for module in found}
        return found

    def hush(self) -> None:
        """Stop all DDPs over this group from reducing or broadcasting, as `no_sync()` does."""
        for module in self.ddps:
            ddp.hush(module)

    def close(self) -> None:
        """End the world, and remove this group from torch's tables. Idempotent."""
        self.unregister()
        world, self._world = self._world, None
        self._works.close()
        self._works = WorkLog()
        if world is not None:
            world.close()

    def abort(self) -> None:
        """End the current world, from any thread: see `WorldGroup.abort`."""
        world = self._world
        if world is not None:
            world.abort()

    @property
    def world(self) -> WorldGroup:
        """The current world; raises PeerLostError if there is none."""
        world = self._world
        if world is None:
            raise self._peer_lost()
        return world

    @property
    def failed(self) -> bool:
        """Whether an operation failed since the last `replace`, or the world was aborted."""
        world = self._world
        if world is None or world.aborted:
            return True
        self._works.sift()
        return self._works.failure is not None or any(part.failed for part in self.parts)

    @property
    def in_flight(self) -> bool:
        """Whether an operation waits for other members; from any thread."""
        world = self._world
        own = world is not None and not world.aborted and self._works.in_flight
        return own or any(part.in_flight for part in self.parts)

    @property
    def traffic(self) -> int | None:
        """The bytes sent to and received from other members so far; from any thread.

        None if that is unknown: NCCL uses other ways, and pending operations may have ended.
        """
        if not any(group._works.is_waited_for for group in (self, *self.parts)):
            return None
        worlds = [group._world for group in (self, *self.parts)]
        counts = [world.traffic if world is not None else None for world in worlds]
        return None if None in counts else sum(count for count in counts if count is not None)

    def check(self) -> None:
        """Wait for every collective; raises PeerLostError if one failed or the world ended.

        Raises RuntimeError if torch has refused one: see `WorldGroup.refuses`.

        On a device this also waits for the device, so that no failure can surface later.
        """
        for part in self.parts:
            part.check()
        self._works.wait()
        world = self.world
        if world.wiring.device_type == "cuda":
            reached = torch.cuda.current_stream().record_event()
            while not reached.query() and not world.aborted:
                time.sleep(_POLL_S)
        if self.failed:
            raise self._peer_lost()
        if self._works.refusal is not None:
            raise self._works.refusal

    def rank(self) -> int:
        """This worker's rank in the current world; 0 without one."""
        refuse_to_keep("the rank")
        world = self._world
        return 0 if world is None else world.rank

    def size(self) -> int:
        """The size of the current world; 1 without one."""
        refuse_to_keep("the world size")
        world = self._world
        return 1 if world is None else world.size

    # C++ uses these names: DDP's reducer, functional collectives.
    getRank = rank  # noqa: N815

    def getSize(self) -> int:  # noqa: N802
        """Return `size`; called by the reducer of a new DDP, which is recorded here."""
        module = ddp.constructed(sys._getframe(1), self)
        if module is not None:
            self._ddps[id(module)] = weakref.ref(module)
        return self.size()

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name for logs; from torch's own names, DDP would read options."""
        return "elastane"

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name under which the group is registered with torch."""
        return self._label

    getGroupDesc = getGroupName  # noqa: N815

    @property
    def group_name(self) -> GroupName:
        """The name under which the group is registered with torch."""
        return GroupName(self._label)

    @property
    def group_desc(self) -> str:
        """The name again."""
        return self._label

    def shutdown(self) -> None:
        """Call `close`; destroy_process_group() uses this name."""
        self.close()

    def exchange(self, receives: Sequence[Message], sends: Sequence[Message]) -> Work:
        """Receive and send all of these messages as one operation, which `check` waits for.

        For gloo. The peer exchanges the same messages, in any order.
        """
        world = self._usable()
        tensors = [tensor for tensor, _, _ in receives]
        try:
            group = world.group
            works = [group.recv([tensor], peer, tag) for tensor, peer, tag in receives]
            works += [group.send([tensor], peer, tag) for tensor, peer, tag in sends]
        except (RuntimeError, PeerLostError) as error:
            self._raise_if_lost(error)
            raise
        waited = Waited(Together(works), self._works, tensors, sliced=False)
        self._works.add(waited)
        return waited

    def begin_aside(self, begin: Callable[[Any], Work]) -> Work:
        """Begin an operation over a second context between the members of the world.

        It is not ordered with this group's collectives. For worlds of several members. Only
        `end_aside` waits for the operation, so until then it is not in flight.
        """
        world = self._usable()
        assert world.aside is not None, "a world of one, or a group of some members"
        try:
            return begin(world.aside)
        except RuntimeError as error:
            self._works.note(error)
            raise self._peer_lost() from error

    def end_aside(self, work: Work) -> None:
        """Wait for what `begin_aside` began; raises PeerLostError if a member is lost."""
        try:
            if work.is_completed():
                work.wait()
            else:
                Waited(work, self._works, [], sliced=True).wait()
        except RuntimeError as error:
            self._works.note(error)
            raise self._peer_lost() from error

    def split_group(self, *_args: Any, **_kwargs: Any) -> ProcessGroup | None:
        """Refuse: an elastic group has no subgroups."""
        _NoSubgroups().check([])
        return None

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work | None:  # type: ignore[override]
        """Receive from the only peer; refused if there are several.

        gloo does not report lost connections to a receive from any source (2.13), so its wait could
        not be ended.
        """
        if self.size() == 2:
            return self._operate("recv", (tensors, 1 - self.rank(), tag), {})
        raise ConfigurationError(
            "torch.distributed.recv without a source: it could not be ended when a peer dies",
            slug="any-source",
            where=f"rank {self.rank()} of {self.size()}",
            expected="the rank to receive from",
            next_step="pass src=, or exchange the sender's rank in a collective before",
        )

    @property
    def _device_types(self) -> list[torch.device]:
        # A worker without a world completes, or refuses, its collectives on the CPU.
        return [torch.device("cpu")] if self.apart else self.world.group._device_types

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
        if self.apart:
            if name != "barrier" and not ddp.is_constructed(sys._getframe(2), self):
                raise _early(name)
            return _answered_apart(name, args)
        world = self._usable()
        if self._guard is not None:
            self._guard(name)
        tensors = _tensors(args)
        if name not in _MESSAGES:
            self.pairing.tally.note(name, tensors)
        try:
            work: Work | None = getattr(world.group, name)(*args, **kwargs)
        except (RuntimeError, PeerLostError) as error:
            self._raise_if_lost(error)
            raise
        if work is None:
            return None
        waited = Waited(work, self._works, tensors, sliced=name in SLICED)
        if name not in _MESSAGES:
            self._works.add(waited)
        return waited

    def _usable(self) -> WorldGroup:
        """Return the world, for an operation that begins."""
        world = self._world
        if world is None or world.aborted or self._works.failure is not None:
            raise self._peer_lost()
        if self._when_begun is not None:
            self._when_begun()
        return world

    def _raise_if_lost(self, error: Exception) -> None:
        """Raise PeerLostError if an operation could not begin because its world is gone.

        A message may be the first operation to find a closed connection.
        """
        if TRANSPORT in str(error):
            self._works.note(error)
        if self.failed:
            raise self._peer_lost() from error

    def _peer_lost(self) -> PeerLostError:
        world = self._world
        fence = "none" if world is None else world.wiring.fence
        why = str(self._works.failure or "the world was ended").partition("\n")[0]
        return PeerLostError(
            f"world {fence}: a collective cannot complete: {why}",
            slug="peer-lost",
            where=f"rank {self.rank()} of {self.size()}",
            expected="all members alive; what this step computed is void",
            next_step="run the step again in the next world",
        )


def _answered_apart(name: str, args: tuple[Any, ...]) -> Work:
    """Complete an operation as if all members had contributed what this one does.

    For a barrier, and for the constructor of DDP, which compares its parameters and takes those of
    rank 0. The right state arrives with the first step.
    """
    if name == "allgather":
        outputs, inputs = args[:2]
        for places, own in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(own)
    return Completed(_tensors(args))


def _early(name: str) -> JobError:
    return JobError(
        f"a collective ({name}) before job.steps(), by a worker that came later: the others are at"
        " their steps and take no part",
        expected="a model that each worker builds by itself; its state comes with the first step."
        " DDP's constructor and barriers are answered without the others",
        next_step="begin alike on all workers by the seed or from a file; or"
        " elastane.init(wait_for_place=False), whose group has one member until the first step",
        slug="job-early",
    )


# torch.distributed's functions find a group by these tables (private names of its
# distributed_c10d, 2.13). With an entry there they work over a group that init_process_group did
# not make.
class _NoSubgroups(Store):
    """The store that `new_group` finds: it refuses every call, since there are no subgroups."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ConfigurationError(
            "torch.distributed.new_group, or a use of the group's store: an elastic group has"
            " neither subgroups nor a store",
            slug="subgroup",
            expected="collectives over the whole world; its ranks change when it does",
            next_step="use collectives over the whole group; instead of values in its store,"
            " broadcast_object_list()",
        )

    set = get = add = wait = check = delete_key = compare_set = _refuse


def _register(group: ProcessGroup, name: str, backends: str) -> None:
    """Register `group`; it becomes the default group if there is none."""
    world = c10d._world
    tag = f"ptd:{name}"
    world.pg_map[group] = (backends.rpartition(":")[2], _NoSubgroups())
    world.pg_names[group] = GroupName(name)
    world.pg_backend_config[group] = backends
    world.pg_to_tag[group] = tag
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)
    _register_process_group(GroupName(name), group)
    if world.default_pg is None:
        c10d._update_default_pg(group)


def _set_members(group: ProcessGroup, members: Iterable[int]) -> None:
    """Set the members of the group: ranks of the job, in the order of the group's ranks."""
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(members)}


def _unregister(group: ProcessGroup) -> None:
    """Unregister `group`, also as the default group."""
    world = c10d._world
    if group not in world.pg_map:
        return  # destroy_process_group() has removed it
    if world.default_pg is group:
        c10d._update_default_pg(None)
    name = world.pg_names[group]
    tag = world.pg_to_tag[group]
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)
    world.pg_to_tag.pop(group)
    world.pg_coalesce_state.pop(group, None)
    for each in ("", tag):
        world.tags_to_pg[each].remove(group)
    _unregister_process_group(name)


def _members(world: WorldGroup | None) -> Iterable[int]:
    """Return the members of a world, as ranks of the job, in its order."""
    if world is None:
        return range(1)
    return world.wiring.members or range(world.size)


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors of the first argument, which DDP takes from an operation's future."""
    first = args[0] if args else None
    return list(first) if isinstance(first, (list, tuple)) else []


def _operation(name: str) -> Callable[..., Work | None]:
    def operation(self: ElasticGroup, *args: Any, **kwargs: Any) -> Work | None:
        return self._operate(name, args, kwargs)

    operation.__name__ = name
    return skipped(operation)


def _question(name: str) -> Callable[..., Any]:
    def question(self: ElasticGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.world.group, name)(*args, **kwargs)

    question.__name__ = name
    return skipped(question)


# Signatures are torch's own, several for one name; arguments are forwarded unchanged.
for _name in _COLLECTIVES + _MESSAGES:
    if hasattr(ProcessGroup, _name):
        setattr(ElasticGroup, _name, _operation(_name))
for _name in _QUESTIONS:
    if hasattr(ProcessGroup, _name):
        setattr(ElasticGroup, _name, _question(_name))
for _method in (ElasticGroup.rank, ElasticGroup.size, ElasticGroup.getSize):
    skipped(_method)
