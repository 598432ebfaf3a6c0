"""A process group of torch that stays when its world changes.

`ElasticGroup` is what a user holds, and DDP: it passes every operation to the group of the current
world, and `replace` gives it another, with another rank and size. It must not know why. Once
something failed, or the world was ended, every further operation raises PeerLostError at once,
until `replace`; what was in flight fails as torch says it. Whoever steps an optimizer asks `check`
first: an operation may have failed that nobody has waited for.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

from elastane.comms import ddp, tables
from elastane.comms.group import WorldGroup
from elastane.comms.pairing import Pairing
from elastane.comms.works import Completed, Together, Waited, WorkLog
from elastane.errors import ConfigurationError, JobError, PeerLostError

# Between two looks at a device.
_POLL_S = 0.0002

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    "_end_coalescing",
)
# A wait for these that is given a time does no harm when that is over (gloo, 2.13).
_SLICED = frozenset(
    (
        *("allreduce", "broadcast", "allgather", "barrier", "reduce", "alltoall_base"),
        *("all_gather_single", "_allgather_base"),
    )
)
# Never waited for by `check`: a receive may be meant for a later step.
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
# A tensor to send from or to receive into, the peer's rank, and a tag.
Message: TypeAlias = tuple[torch.Tensor, int, int]
# In what gloo says of a connection, and in nothing that it says of wrong arguments.
_TRANSPORT = "/gloo/transport/"


class ElasticGroup(ProcessGroup):
    """The group of the current world; `replace` changes it under whoever uses this one."""

    def __init__(self, name: str = "elastane") -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # as torch has it for subclasses
        self._label = name
        self._world: WorldGroup | None = None
        self._works = WorkLog()
        # By id, in the order in which they were made, which is the same on all members.
        self._ddps: dict[int, weakref.ref[DistributedDataParallel]] = {}
        self._registered = False
        # Called as each operation begins, by the thread that begins it.
        self.when_begun: Callable[[], None] | None = None
        # Asked before each of torch's operations, by its name; it refuses by raising.
        self.guard: Callable[[str], None] | None = None
        # Whether this member builds apart from the others: they take part in no operation of its.
        self.apart = False
        self.pairing = Pairing(self)
        # Groups of some of the members: what fails or waits there, fails or waits here.
        self.parts: tuple[ElasticGroup, ...] = ()

    def register(self) -> None:
        """Make torch.distributed's functions take this group, as their default if there is none."""
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
        tables.enter(self, self._label, backends)
        tables.resize(self, _members(self._world))
        self._registered = True

    def unregister(self) -> None:
        """Take the group out of torch.distributed's tables."""
        if self._registered:
            self._registered = False
            tables.leave(self)

    def replace(self, world: WorldGroup, *, keeps: bool = False) -> None:
        """Go on in `world`, which is built; forgets the failure of the former one.

        Closes the former one, unless it `keeps` it: that is the caller's then.

        Never while a forward or backward runs: each DDP over this group gets a new reducer.
        """
        broke = self.failed
        former, self._world = self._world, world
        self._works.clear()
        world.when_aborted = self._works.releaser()
        if former is not None and former is not world:
            self.pairing.left(former.wiring.fence, former.size, broke=broke)
        if former is not None and former is not world and not keeps:
            former.close()
        if self._registered:
            tables.resize(self, _members(world))
        for module in self.ddps:
            ddp.renew(module)

    @property
    def ddps(self) -> list[DistributedDataParallel]:
        """Each DistributedDataParallel over this group that is alive, in the order of creation."""
        found = [module for ref in [*self._ddps.values()] if (module := ref()) is not None]
        self._ddps = {id(module): self._ddps[id(module)] for module in found}
        return found

    def hush(self) -> None:
        """Let no DDP over this group reduce or broadcast anything by itself, as in `no_sync()`."""
        for module in self.ddps:
            ddp.hush(module)

    def close(self) -> None:
        """End the world and take this group out of torch's tables. Idempotent."""
        self.unregister()
        world, self._world = self._world, None
        self._works.clear()
        if world is not None:
            world.close()

    def abort(self) -> None:
        """End the current world, from any thread: see `WorldGroup.abort`."""
        world = self._world
        if world is not None:
            world.abort()

    @property
    def world(self) -> WorldGroup:
        """The current world; raises PeerLostError where there is none."""
        world = self._world
        if world is None:
            raise self._lost()
        return world

    @property
    def failed(self) -> bool:
        """Whether anything failed since the last `replace`, or the world was ended."""
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
        """The bytes that went over connections to other members so far; from any thread.

        None where they say nothing: NCCL has other ways, and what is in flight may have ended.
        """
        if not any(group._works.is_waited_for for group in (self, *self.parts)):
            return None
        worlds = [group._world for group in (self, *self.parts)]
        counts = [world.traffic if world is not None else None for world in worlds]
        return None if None in counts else sum(count for count in counts if count is not None)

    def check(self) -> None:
        """Wait for every collective; raises PeerLostError where one failed or the world ended.

        On a device this waits for the device too, so that no failure can surface later.
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
            raise self._lost()

    def rank(self) -> int:
        """This worker's rank in the current world; 0 where there is none."""
        world = self._world
        return 0 if world is None else world.rank

    def size(self) -> int:
        """The size of the current world; 1 where there is none."""
        world = self._world
        return 1 if world is None else world.size

    # By these names C++ asks: DDP's reducer, functional collectives.
    getRank = rank  # noqa: N815

    def getSize(self) -> int:  # noqa: N802
        """As `size`; the reducer of a new DDP asks, and the DDP is noted."""
        module = ddp.constructed(sys._getframe(1), self)
        if module is not None:
            self._ddps[id(module)] = weakref.ref(module)
        return self.size()

    def getBackendName(self) -> str:  # noqa: N802
        """What a log says of the backend; of one of torch's own DDP reads options."""
        return "elastane"

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """By what the group is registered with torch."""
        return self._label

    getGroupDesc = getGroupName  # noqa: N815

    @property
    def group_name(self) -> GroupName:
        """By what the group is registered with torch."""
        return GroupName(self._label)

    @property
    def group_desc(self) -> str:
        """As the name."""
        return self._label

    def shutdown(self) -> None:
        """As `close`, by the name that destroy_process_group() uses."""
        self.close()

    def exchange(self, receives: Sequence[Message], sends: Sequence[Message]) -> Work:
        """Receive and send all of these, as one operation; `check` waits for it as for any.

        For gloo. The peer exchanges the same messages, in any order.
        """
        world = self._usable()
        tensors = [tensor for tensor, _, _ in receives]
        try:
            group = world.group
            works = [group.recv([tensor], peer, tag) for tensor, peer, tag in receives]
            works += [group.send([tensor], peer, tag) for tensor, peer, tag in sends]
        except (RuntimeError, PeerLostError) as error:
            self._begun_badly(error)
            raise
        waited = Waited(Together(works), self._works, tensors, sliced=False)
        self._works.add(waited)
        return waited

    def begin_aside(self, begin: Callable[[Any], Work]) -> Work:
        """Begin an operation over a second context between the members of the world.

        That has no place in the order of this group's collectives. For worlds of several. Nobody
        waits for the operation but `end_aside`, so until then it is not in flight.
        """
        world = self._usable()
        assert world.aside is not None, "a world of one, or a group of some members"
        try:
            return begin(world.aside)
        except RuntimeError as error:
            self._works.note(error)
            raise self._lost() from error

    def end_aside(self, work: Work) -> None:
        """Wait for what `begin_aside` began; raises PeerLostError where a member is lost."""
        try:
            if work.is_completed():
                work.wait()
            else:
                Waited(work, self._works, [], sliced=True).wait()
        except RuntimeError as error:
            self._works.note(error)
            raise self._lost() from error

    def split_group(self, *_args: Any, **_kwargs: Any) -> ProcessGroup | None:
        """Refused: an elastic group has no subgroups."""
        tables.NoSubgroups().check([])
        return None

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work | None:  # type: ignore[override]
        """Receive from the only peer there is; refused where there are several.

        gloo tells a receiver from anybody of no lost connection (2.13): nobody could end its wait.
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
        return self.world.group._device_types

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
        if self.apart:
            if name != "barrier" and not ddp.is_constructed(sys._getframe(2), self):
                raise _early(name)
            return _answered_apart(name, args)
        world = self._usable()
        if self.guard is not None:
            self.guard(name)
        tensors = _tensors(args)
        if name not in _MESSAGES:
            self.pairing.tally.note(name, tensors)
        try:
            work: Work | None = getattr(world.group, name)(*args, **kwargs)
        except (RuntimeError, PeerLostError) as error:
            self._begun_badly(error)
            raise
        if work is None:
            return None
        waited = Waited(work, self._works, tensors, sliced=name in _SLICED)
        if name not in _MESSAGES:
            self._works.add(waited)
        return waited

    def _usable(self) -> WorldGroup:
        """The world, for an operation that begins."""
        world = self._world
        if world is None or world.aborted or self._works.failure is not None:
            raise self._lost()
        if self.when_begun is not None:
            self.when_begun()
        return world

    def _begun_badly(self, error: Exception) -> None:
        """Raise PeerLostError where an operation could not begin for want of its world.

        A message that begins may be the first to meet a closed connection.
        """
        if _TRANSPORT in str(error):
            self._works.note(error)
        if self.failed:
            raise self._lost() from error

    def _lost(self) -> PeerLostError:
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
    """Complete an operation as if every other member had contributed what this one does.

    For the constructor of DDP, which compares its parameters and takes those of rank 0, and for a
    barrier. The state that is right comes with the first step.
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


def _members(world: WorldGroup | None) -> Iterable[int]:
    """The ranks in the job of who is in a world, in its order."""
    if world is None:
        return range(1)
    return world.wiring.members or range(world.size)


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What DDP takes from the future of an operation: the tensors of its first argument."""
    first = args[0] if args else None
    return list(first) if isinstance(first, (list, tuple)) else []


def _operation(name: str) -> Callable[..., Work | None]:
    def operation(self: ElasticGroup, *args: Any, **kwargs: Any) -> Work | None:
        return self._operate(name, args, kwargs)

    operation.__name__ = name
    return operation


def _question(name: str) -> Callable[..., Any]:
    def question(self: ElasticGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.world.group, name)(*args, **kwargs)

    question.__name__ = name
    return question


# Signatures are torch's own, several for one name; they are passed on as they come.
for _name in _COLLECTIVES + _MESSAGES:
    if hasattr(ProcessGroup, _name):
        setattr(ElasticGroup, _name, _operation(_name))
for _name in _QUESTIONS:
    if hasattr(ProcessGroup, _name):
        setattr(ElasticGroup, _name, _question(_name))
