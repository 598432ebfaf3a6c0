"""The process group of an unmodified script: its collectives survive the loss of members.

`OrderedGroup` performs what `rules` decides. The program's threads issue operations, in one order.
A thread of its own waits for them in that order, delivers their results, votes, and after a fault
enters the next view with the survivors. So a member exchanges tables with the others while its
program computes. An operation that cannot be kept calls `restart`, which does not return: a
framework could catch an exception, and its training would then be wrong.

A program that passes boundaries and names its state (`share`) lets newcomers join there. The group
of a newcomer begins outside of any world; its first boundary is where it enters one.

Locking: one condition guards the rules and everything in flight. Operations are started while it is
held, so that their numbers have the order in which torch started them. It is never held in a wait
for another member.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed import BarrierOptions, Work
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from elastane.comms import ddp
from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import WorldGroup
from elastane.comms.untraced import (
    forget_compiled_code,
    is_traced,
    refuse_to_keep,
    skipped,
    untraced,
)
from elastane.comms.works import Waited, WorkLog
from elastane.errors import ConfigurationError, PeerLostError
from elastane.process.program_end import is_failure
from elastane.protocol.words import OTHER_PROGRAM
from elastane.synchrony import callsites, newcomers
from elastane.synchrony.calls import Call, ProgramStage, bucket_call, call_of, holds_counts
from elastane.synchrony.contributions import (
    BucketLayout,
    BucketSlice,
    Copied,
    Gradients,
    slices_among,
)
from elastane.synchrony.evaluation_sums import EvaluationSums
from elastane.synchrony.meeting import Meeting
from elastane.synchrony.newcomers import SharedState
from elastane.synchrony.operations import (
    Identity,
    Rule,
    Signature,
    Site,
    why_parts_are_lost,
)
from elastane.synchrony.optimizer_steps import OptimizerSteps
from elastane.synchrony.pending import (
    OrderedFuture,
    OrderedWork,
    PendingOperation,
    RestartingWork,
)
from elastane.synchrony.rank_reads import RankReads, is_of_framework, is_of_script, watch_variables
from elastane.synchrony.rules import (
    Delivery,
    Plan,
    Start,
    Table,
    View,
    ViewMember,
    ViewPhase,
    plan,
    why_not_issued,
)
from elastane.synchrony.size_reads import OwnSum, SizeReads

_MESSAGES = frozenset(("send", "recv"))
# A vote is a sum over the members; each adds twice its count, and one if its program has ended.
_ENDED = 1
# The number of worlds in a row that may end with no delivery and no lost member. After that the
# cause is not a loss, and more worlds would end the same way.
_VAIN_WORLDS_MAX = 10


class GroupHost(Protocol):
    """The worker that owns a group, with the methods that the group calls."""

    @property
    def world_has_ended(self) -> bool:
        """Whether the agent has ended this world, or sent a place in another one."""

    def enter(self, error: Exception | None) -> WorldGroup:
        """Return the next world of this worker, built; `error` ended the last one.

        Raises PeerLostError or RuntimeError if the world breaks meanwhile.
        """

    def restart(self, reason: str, *, state_lost: bool = False) -> NoReturn:
        """Restart all workers of the job; `state_lost`: none of them holds its state."""

    def left_out(self) -> NoReturn:
        """End this worker: the others have continued from the boundary at which it would join."""

    @property
    def follows(self) -> bool:
        """Whether the program uses a framework that adapts to each new rank and world size."""

    @property
    def has_own_loop(self) -> bool:
        """Whether the program has a loop of its own, though a framework follows changes."""

    @property
    def saves_together(self) -> bool:
        """Whether a framework saves for the program, and repeats a lost save on another worker."""

    @property
    def has_resumed(self) -> bool:
        """Whether the program has read the state of an optimizer before its first step."""

    def show(self, rank: int, size: int) -> None:
        """Let the program see another rank or world size."""

    def warn(self, text: str) -> None:
        """Write a warning to the output of this worker."""

    def stepped(self, steps: int) -> None:
        """Note that a backward pass was delivered, or another world entered."""

    def reach(self, number: int) -> None:
        """Note that the program is at the boundary of this number; may wait there.

        Without a shared state it is called before a forward for training: all before the backward
        pass of that number is done.
        """

    def destroyed(self) -> None:
        """Note that the program has ended its group, as those of all members."""

    def shared(self) -> None:
        """Note that newcomers may join this worker's world, or that this newcomer is ready."""


class _Callback(threading.local):
    """The members that a callback of a future sees, in the thread that it runs in; () outside."""

    def __init__(self) -> None:
        self.members: tuple[Identity, ...] = ()


class OrderedGroup(ElasticGroup):
    """A group whose operations all survivors deliver alike; `leave` ends it.

    `begin` starts it in a world, `begin_outside` without one.
    `keeps_ranks`: the script may keep a rank or a world size in a variable. Then it sees those of
    its first world until its end, unless a framework follows changes or newcomers may join; sums of
    floats are scaled to that size, and so are counts that it sums.
    """

    def __init__(self, host: GroupHost, *, keeps_ranks: bool) -> None:
        super().__init__()
        self._host = host
        self._changed = threading.Condition(threading.RLock())
        self._member = ViewMember(Identity(secrets.randbits(63)), keeps_ranks=keeps_ranks)
        self._pending: dict[int, PendingOperation] = {}
        # Results that this member keeps for others, and those that it got from others, by number.
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._handed: dict[int, list[torch.Tensor]] = {}
        self._layouts: dict[int, BucketLayout] = {}
        # By backward pass: the number of members that its gradients are divided by.
        self._divisors: dict[int, int] = {}
        # How many backward passes were delivered.
        self._units = 0
        self._open_task: int | None = None
        # The members that the program's ranks refer to, lost ones included where it sees its first
        # world; torch's tables and the environment show them.
        self._shown: tuple[Identity, ...] = ()
        self._callback = _Callback()
        # Whether the script has summed floats by a call of its own.
        self._has_summed = False
        self._sizes = SizeReads()
        self._evaluation_sums = EvaluationSums()
        # The sums of counts that the program has begun and not waited for, by number.
        self._counting: set[int] = set()
        # Whether the program has made a step of an optimizer, and whether the worker of rank 0 was
        # lost after the last one: it may have been saving what no other worker saves.
        self._has_stepped = self._lacks_first = False
        self._steps = OptimizerSteps(self._made_step, self._refuse_kept_size)
        self._reads = RankReads()
        # How many contexts of `members_left` the program is in, and the members of the first world.
        self._contexts = 0
        self._first: tuple[Identity, ...] = ()
        # Whether compiled code has kept the rank or size of the first world.
        self._is_compiled_in = False
        # The state that newcomers receive; None until the program has named it.
        self._shared: SharedState | None = None
        # Rank and world size that a newcomer's program sees before it joins.
        self._outside: tuple[int, int] | None = None
        self._has_left = False
        # Deliveries and members when worlds began to end without progress, and how many have since.
        self._stands_at: tuple[int, tuple[Identity, ...]] = (-1, ())
        self._vain_worlds = 0
        # The functions to call when the visible rank or world size changes.
        self._followers: list[Callable[[int, int], None]] = []
        self._thread = threading.Thread(target=self._run, name="elastane-deliver", daemon=True)

    def begin(self, world: WorldGroup, local_rank: int) -> None:
        """Enter the first world, which is built, with its other members.

        `local_rank`: of this worker among those of its node, whose ranks follow one another.
        """
        log = self._use(world)
        identities = Meeting(world, log).gather_identities(self._member.identity)
        members = tuple(Identity(each) for each in identities)
        with self._changed:
            self._member.begin(View(_number(world), members), members[world.rank - local_rank])
            self._show_if_changed()
        self._thread.start()

    def begin_outside(self, rank: int, size: int) -> None:
        """Begin without a world; the program sees this rank and size until it joins one."""
        self._outside = rank, size
        self.build_apart(True)
        self._host.show(rank, size)

    def on_change(self, call: Callable[[int, int], None]) -> None:
        """Call `call(rank, world_size)` whenever the program sees another one of these."""
        with self._changed:
            self._followers.append(call)

    def watch_optimizers(self) -> None:
        """Follow the steps of the program's optimizers, from here on."""
        self._steps.watch()

    def watch_variables(self) -> None:
        """Count the script's reads of RANK and WORLD_SIZE as questions, where these may change."""
        if not self._member.keeps_ranks:
            watch_variables({"RANK": self._asked_rank, "WORLD_SIZE": self.asked_size})

    @property
    def has_joined(self) -> bool:
        """Whether this worker is, or was, a member of a world."""
        return self._outside is None

    @contextlib.contextmanager
    def members_left(self) -> Iterator[None]:
        """Show the program the members that are left; all members enter and leave alike."""
        with self._changed:
            self._contexts += 1
            self._show_if_changed()
        try:
            yield
        finally:
            with self._changed:
                self._contexts -= 1
                self._show_if_changed()

    @property
    def members(self) -> tuple[Identity, ...]:
        """The members as the program sees them, in the order of their ranks.

        After the wait for an operation they are those whose contributions are in its result.
        """
        return self._member.visible

    @property
    def is_shared(self) -> bool:
        """Whether the program has named its state."""
        return self._shared is not None

    def share(self, state: SharedState) -> None:
        """Let newcomers join at the boundaries that the program passes from now on.

        `state`: all that a newcomer needs to continue like the others. Called once.
        """
        assert self._shared is None, "a program has one shared state"
        self._shared = state
        if self._is_compiled_in:
            forget_compiled_code()
        with self._changed:
            self._member.expect_newcomers()
        if self.has_joined:
            self._host.shared()

    def pass_boundary(self) -> None:
        """Pass a boundary of the program, the same one on all members; newcomers join here.

        No operation may be in flight that the program still waits for. Rank and world size may be
        others when this returns.
        """
        assert self._shared is not None, "share() comes first"
        if not self.has_joined:
            self._join(self._shared)
        else:
            with self._changed:
                self._changed.wait_for(self._member.arrive)
                self._show_if_changed()
                number = self._member.boundaries
            self._host.reach(number)
        self._depart()

    def _depart(self) -> None:
        """Leave the boundary in the view that is installed; renew what depends on its members."""
        with self._changed:
            before = self._member.visible
            self._changed.wait_for(self._departs)
            self._outside = None
            self.build_apart(False)
            self._show_if_changed()
            has_new = not {*before} >= {*self._member.visible}
        if has_new:  # The new DDP of a newcomer has other buckets than one that has trained.
            for module in self.ddps:
                ddp.renew(module)

    def _departs(self) -> bool:
        """Leave the boundary if the world continues: in the next one there may be newcomers."""
        is_over = self._host.world_has_ended or self.world_in_use.aborted
        return not is_over and self._member.depart()

    def _refuse_kept_size(self) -> None:
        """Restart before the program updates with sums that it may have divided by an old size.

        Under --ranks-may-change it asks for the size of each world, before or after its sums.
        """
        if (why := self._sizes.why_not_updated()) and self._may_keep_size:
            self._restart_for_size(why)

    @property
    def _may_keep_size(self) -> bool:
        """Whether the size that the program sees changes, and nothing else tells it so."""
        if self._host.follows:
            return self._host.has_own_loop and not self.is_shared
        return not (self._member.keeps_ranks or self.is_shared)

    def _restart_for_size(self, why: str) -> NoReturn:
        other = "" if self._host.follows else "start it without --ranks-may-change, or "
        self._host.restart(f"{why}: {other}ask for the size after the sum")

    def _made_step(self) -> None:
        """Record that the program has made a step of an optimizer."""
        self._has_stepped, self._lacks_first = True, False

    def leave(self) -> None:
        """Wait until all members have delivered everything, then end the group.

        Called when the program ends well: a member that left before could take a result with it.
        """
        with self._changed:
            self._member.leaves = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def shutdown(self) -> None:
        """Leave and close: destroy_process_group() uses this name.

        Without waiting for the others if the program fails, such as in a `finally`. They may wait
        for a collective that this worker does not reach, and its exit shows the failure.
        """
        if _fails():
            with self._changed:
                self._has_left = True
                self._changed.notify_all()
        else:
            self.leave()
            self._host.destroyed()
        self.close()

    @skipped
    def rank(self) -> int:
        """This worker's rank, as the program sees it."""
        self._ask("the rank")
        if is_of_script(sys._getframe(1)):
            self._asked_rank()
        return self._rank_seen

    @property
    def _rank_seen(self) -> int:
        if self._outside is not None:
            return self._outside[0]
        return self._seen.index(self._member.identity) if self._seen else 0

    def _asked_rank(self) -> None:
        """Record that the script has asked for its rank."""
        self._reads.asked(self._units)

    def asked_size(self) -> None:
        """Record that the world size was asked for, unless a framework did it for itself."""
        if not is_of_framework(sys._getframe(1)):
            self._sizes.asked()

    def counted(self, *, interrupted: bool) -> None:
        """Record that a framework has summed a few counts for the script."""
        if callsites.is_in_backward() or self._evaluates():
            return
        if interrupted:
            self._note_interrupted_count()
        else:
            self._sizes.summed(OwnSum.COUNT)

    @skipped
    def size(self) -> int:
        """The world size, as the program sees it."""
        self._ask("the world size")
        if is_of_script(sys._getframe(1)):
            self.asked_size()
        if self._outside is not None:
            return self._outside[1]
        return len(self._seen) or 1

    @property
    def _seen(self) -> tuple[Identity, ...]:
        """The members that the program's ranks refer to in this thread."""
        return self._callback.members or self._shown

    @skipped
    def _ask(self, what: str) -> None:
        """Note that compiled code keeps the answer; refuse it where that may change."""
        if not self.sees_first:
            refuse_to_keep(what)
        elif is_traced(sys._getframe(1)):
            self._is_compiled_in = True

    @property
    def rank_now(self) -> int:
        """This worker's rank among the members that are left at this place of the program."""
        if self._outside is not None:
            return self._outside[0]
        visible = self._member.visible
        return visible.index(self._member.identity) if visible else 0

    @property
    def _size_now(self) -> int:
        if self._outside is not None:
            return self._outside[1]
        return len(self._member.visible) or 1

    @property
    def sees_first(self) -> bool:
        """Whether the program sees its first world until its end."""
        is_plain = self._shared is None and not self._contexts and not self._host.follows
        return self._member.keeps_ranks and is_plain

    def monitored_barrier(self, *_timeouts: Any, **_options: Any) -> None:
        """Wait for all members, over any number of faults; the agents notice one that is lost."""
        work = self._operate("barrier", (BarrierOptions(),), {})
        assert work is not None, "a barrier has a work"
        work.wait()

    getRank = rank  # noqa: N815

    @skipped
    def getSize(self) -> int:  # noqa: N802
        """Return how many members are left: what a reducer divides gradients by.

        A new reducer calls it, and in each backward pass the first gradient.
        """
        module = ddp.constructed(sys._getframe(1), self)
        if module is not None:
            # A module that is gone leaves its layout: its buckets may look like the new one's.
            living = {id(each) for each in self.ddps}
            self._layouts = {key: self._layouts[key] for key in living & self._layouts.keys()}
            self._layouts[id(module)] = BucketLayout()
            self._ddps[id(module)] = weakref.ref(module)
        if callsites.is_in_backward():
            task = torch._C._current_graph_task_id()
            return self._divisors.setdefault(task, self._size_now)
        return self._size_now

    @property
    def in_flight(self) -> bool:
        """Whether an operation, or the end of this member, waits for other members."""
        member = self._member
        return member.delivered < member.issued or (member.leaves and not self._has_left)

    @property
    def counts(self) -> tuple[int, int]:
        """How many operations the program has issued, and how many were delivered to it."""
        return self._member.issued, self._member.delivered

    @property
    def traffic(self) -> int | None:
        """The bytes sent and received in this world so far."""
        world = self._world
        return None if world is None else world.traffic

    def before_forward(self, module: DistributedDataParallel) -> None:
        """Wait until no other member can need the buckets, which the next backward pass fills."""
        if hook := ddp.chained_hook(module):
            raise _refused_chain(f"the communication hook {hook}")
        number = self._wait_for_buckets() + 1
        if self._shared is None:
            self._host.reach(number)
        self._refresh(module)

    def before_backward(self, module: DistributedDataParallel) -> None:
        """As `before_forward`, for a pass that is not the first one after a forward.

        A framework that prepares the reducer for several passes calls it before each.
        """
        self._wait_for_buckets()
        ddp.rebuild_buckets(module)
        self._refresh(module)

    def _wait_for_buckets(self) -> int:
        """Wait until no other member can need them; return how many passes were delivered."""
        with self._changed:
            self._changed.wait_for(lambda: self._member.vote is None)
            return self._units

    def _refresh(self, module: DistributedDataParallel) -> None:
        layout = self._layouts.get(id(module))
        if layout is not None:
            layout.refresh(module)

    def _operate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
        if name in _MESSAGES and not self.apart:
            return self._message(name, args, kwargs)
        frame = sys._getframe(2)
        if self.apart:
            return newcomers.answer_apart(self, frame, name, args)
        with self._changed:
            self._refuse_delivering_thread(name)
            self._changed.wait_for(lambda: self._member.phase is ViewPhase.RUNNING)
            site, slices = self._site(frame, name, args)
            if site is Site.SHARDED:
                raise _refused_shards(name)
            if site in (Site.SCRIPT, Site.TRUE_SUM) and self.sees_first:
                site = Site.FIRST_SIZE
            call, own = self._call(name, args, kwargs, site)
            if self._shown != self._member.visible and (
                why := why_not_issued(call.signature, self._member.visible)
            ):
                self._host.restart(why)
            pending = self._issue(call, slices)
            if own is OwnSum.COUNT:
                self._counting.add(pending.number)
            self._pump()
            refusal = pending.refusal if pending.is_refused_at_call else None
            self._changed.notify_all()
        if refusal is not None:
            raise refusal
        return OrderedWork(pending, self._changed, self)

    def _call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site
    ) -> tuple[Call, OwnSum]:
        """Return a call, and what it may be to the script's gradients, after it is recorded.

        A step has many buckets. Of them nothing but the sums before them is to be recorded.
        """
        if site is Site.REDUCER:
            self._evaluation_sums.left()
            self._refuse_unasked_size()
            return bucket_call(*args), OwnSum.NOTHING
        stage = self._stage(site)
        call = call_of(name, args, kwargs, self._shown, site, stage)
        self._note_parts(call.signature)
        self._has_summed |= call.signature.may_be_divided
        own = self._own_sum(call, stage)
        self._sizes.summed(own)
        if site is Site.HOOK:
            self._refuse_unasked_size()
        self._note_ratio(call.signature, stage)
        return call, own

    def _stage(self, site: Site) -> ProgramStage:
        if callsites.is_in_backward():
            return ProgramStage.BACKWARD
        is_evaluation = site is Site.FIRST_SIZE and self._evaluates()
        return ProgramStage.EVALUATION if is_evaluation else ProgramStage.TRAINING

    def _own_sum(self, call: Call, stage: ProgramStage) -> OwnSum:
        """Return what a sum that the script makes itself may be to its gradients."""
        signature, is_in_backward = call.signature, stage is ProgramStage.BACKWARD
        if signature.may_be_divided and (is_in_backward or not self._layouts):
            return OwnSum.GRADIENTS
        # In a context all of it is made again over one membership, for a framework.
        is_exempt = is_in_backward or self._contexts or self._evaluates()
        may_weigh = signature.is_own_sum and not is_exempt
        return OwnSum.COUNT if may_weigh and holds_counts(call.inputs) else OwnSum.NOTHING

    def _refuse_unasked_size(self) -> None:
        """Restart before gradients that may be of an old size are reduced."""
        if (why := self._sizes.why_not_reduced()) and self._may_keep_size:
            self._restart_for_size(why)

    def _note_ratio(self, signature: Signature, stage: ProgramStage) -> None:
        """Restart before an evaluation gets sums over other numbers of members than it sees."""
        if stage is not ProgramStage.EVALUATION:
            self._evaluation_sums.left()
            return
        is_smaller = len(self._member.view.members) < len(self._first)
        if why := self._evaluation_sums.why_not_summed(signature, is_smaller=is_smaller):
            self._host.restart(why)

    def _evaluates(self) -> bool:
        """Whether the program is in an evaluation: without gradients, and no module trains.

        Neither sign is enough: some scripts never call `train()` again on rank 0, and others count
        under `no_grad()` while they train.
        """
        return not (torch.is_grad_enabled() or any(module.training for module in self.ddps))

    def _refuse_delivering_thread(self, name: str) -> None:
        """Refuse a collective of the thread that delivers them: it would never return.

        What this thread calls of the program are callbacks of futures and, while it meets the
        others, the functions of the shared state.
        """
        if threading.current_thread() is not self._thread:
            return
        if self._member.phase is ViewPhase.RUNNING:
            raise _refused_chain(f"a collective ({name}) in a callback of another one's future")
        self._host.restart(f"a collective ({name}) was called while the state was handed over")

    def _note_parts(self, signature: Signature) -> None:
        """Let a loss restart all once workers keep parts of a state; one may be lost already."""
        why = why_parts_are_lost(signature, self._steps.running)
        if why and not {*self._first} <= {*self._member.view.members}:
            self._host.restart(why)
        if why:
            self._member.refuse(why)

    def _message(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        """Send or receive; the loss of a member then restarts the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._member.phase is ViewPhase.RUNNING)
            self._member.refuse(f"torch.distributed.{name} was used, whose messages may be lost")
            try:
                work: Work = getattr(self.world.group, name)(*args, **kwargs)
            except (RuntimeError, PeerLostError) as error:
                self._host.restart(f"torch.distributed.{name} failed: {error}")
        return RestartingWork(work, self._host.restart, name)

    def _issue(self, call: Call, slices: list[BucketSlice] | None) -> PendingOperation:
        site, unit, divided_by = call.signature.site, None, 0
        is_reduced = site in (Site.REDUCER, Site.HOOK)
        if is_reduced and callsites.is_in_backward():
            unit = self._unit_of_pass()
        if site is Site.REDUCER:
            task = torch._C._current_graph_task_id()
            divided_by = self._divisors.get(task, self._size_now)
        elif call.signature.rule is Rule.RESCALE or call.signature.is_scaled:
            divided_by = self.size()  # torch's hook has divided, or the script will divide, by it
        if any(tensor.is_sparse for tensor in call.outputs):
            self._member.refuse(
                "sparse gradients were reduced, as of torch.nn.Embedding(sparse=True): their shape"
                " depends on the workers, so they cannot be handed over"
            )
        contribution = Copied(call.inputs) if slices is None else Gradients(call.inputs[0], slices)
        issued = self._member.issue(call.signature, unit=unit, divided_by=divided_by)
        if issued.restart:
            self._host.restart(issued.restart)
        pending = PendingOperation(issued.number, call, contribution)
        self._pending[issued.number] = pending
        if issued.start is not None:
            self._start(pending, issued.start)
        return pending

    def _site(
        self, frame: FrameType | None, name: str, args: tuple[Any, ...]
    ) -> tuple[Site, list[BucketSlice] | None]:
        """Return the site of a call, and for a reducer's bucket where the gradients lie in it.

        C++ also reduces what is no bucket: the flags of parameters that were used.
        """
        site = callsites.site_of(frame)
        if site is not Site.REDUCER:
            return site, None
        if name != "allreduce" or not args[0][0].is_floating_point():
            return Site.AUTHORITY, None
        is_bucket, slices = slices_among([*self._layouts.values()], args[0][0])
        return (site if is_bucket else Site.SCRIPT), slices

    def _is_delayed(self) -> bool:
        """Whether the reducer waits before the end of this pass: then it is no unit."""
        return any(layout.is_delayed for layout in self._layouts.values())

    def _unit_of_pass(self) -> int | None:
        """Return the unit of the backward pass that this thread is in; None if it is none."""
        task: int = torch._C._current_graph_task_id()
        if task == self._open_task:
            return task
        if callsites.is_in_nested_backward():
            # Its end is not the end of the pass, so members would switch within the pass.
            self._member.refuse(
                "gradients were reduced in a backward pass within another one, as of"
                " torch.utils.checkpoint; use_reentrant=False makes no such passes"
            )
        if self._is_delayed():
            return None
        self._open_task = task
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._close_unit, task))
        return task

    @skipped
    def _close_unit(self, task: int) -> None:
        """At the end of a backward pass, before the reducer waits for its buckets."""
        with self._changed:
            self._open_task = None
            self._divisors.clear()
            self._member.close_unit(task)
            self._show_if_changed()
            self._pump()
            self._changed.notify_all()

    def has_waited(self, *numbers: int) -> None:
        """Record that the program waited for operations; a callback of their future does not."""
        if self._callback.members:
            return
        with self._changed:
            # The last one first: where the world shrank between them, the others are not read yet.
            for number in sorted(numbers, reverse=True):
                self._member.waited(number)
            is_count = not self._counting.isdisjoint(numbers)
            self._counting.difference_update(numbers)
            if self._show_if_changed() and is_count:
                self._note_interrupted_count()

    def _note_interrupted_count(self) -> None:
        """Record that the program sees another world as a count returns, and its next forward."""
        self._sizes.interrupted_count()

        def begun(*_: object) -> None:
            handle.remove()
            self._sizes.begun_pass()

        handle = register_module_forward_pre_hook(begun)

    @contextlib.contextmanager
    def seeing(self, number: int) -> Iterator[None]:
        """Show this thread the members that the program sees once it has waited for an operation.

        A callback of its future divides by their number, and may run before that wait.
        """
        with self._changed:
            members = self._shown if self.sees_first else self._member.seen_after(number)
        before, self._callback.members = self._callback.members, members
        try:
            yield
        finally:
            self._callback.members = before

    # The thread that delivers.

    def _run(self) -> None:
        try:
            self._deliver_all()
        except Exception as error:
            # Without this thread the program would wait for its collectives for ever.
            self._host.restart(f"the delivery of collectives failed: {error!r}")

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due)
                if self._has_left:
                    return
                world, number = self.world_in_use, self._member.next_incomplete()
                pending = self._pending.get(number) if number is not None else None
                vote = self._member.vote
            try:
                if world.aborted:
                    raise self._peer_lost()
                if vote is not None:
                    self._vote(world, vote)
                elif pending is not None:
                    self._await(world, pending)
                else:
                    self._end(world)
            except (RuntimeError, PeerLostError) as error:
                self._recover(world, error)

    def _is_due(self) -> bool:
        member = self._member
        has_work = member.vote is not None or member.next_incomplete() is not None
        may_leave = member.leaves and member.delivered == member.issued
        return self._has_left or has_work or may_leave or self.world_in_use.aborted

    @property
    def world_in_use(self) -> WorldGroup:
        """The world that was entered last, whether it is over or not."""
        world = self._world
        assert world is not None, "begin() has set it"
        return world

    def _await(self, world: WorldGroup, pending: PendingOperation) -> None:
        pending.wait(world)
        with self._changed:
            if world.aborted:
                raise self._peer_lost()
            self._member.complete(pending.number, self._member.view, pending.refused_call())
            self._pump()
            self._changed.notify_all()

    def _vote(self, world: WorldGroup, count: int) -> None:
        self._agree(world, 2 * count)
        with self._changed:
            if world.aborted:
                raise self._peer_lost()
            self._member.vote_passed(self._member.view)
            self._prune()
            self._pump()
            self._changed.notify_all()

    def _end(self, world: WorldGroup) -> None:
        """Agree twice to leave: a member that has left knows that all know of the end."""
        if self._lacks_first and not self._host.saves_together:
            self._host.restart(
                "the worker of rank 0 was lost after the last step, and no other worker would"
                " repeat a save that it had begun"
            )
        self._warn_of_kept_rank()
        mark = 2 * self._member.delivered + _ENDED
        self._agree(world, mark)
        with self._changed:
            self._member.all_ended = True
        self._agree(world, mark)
        self._has_left = True

    def _warn_of_kept_rank(self) -> None:
        """Warn on the new worker of rank 0 if the program may not know that it is."""
        ends = self._member.leaves
        warning = self._reads.warning(self._units, ends=ends) if self.rank_now == 0 else ""
        if warning and not (self._member.keeps_ranks or self._host.follows):
            self._host.warn(warning)

    def _agree(self, world: WorldGroup, mark: int) -> None:
        """Wait until all members have given the same mark; another mark means another program."""
        if world.size == 1:
            return
        total = torch.tensor([mark], dtype=torch.int64)
        aside: Any = world.aside
        assert aside is not None, "a world of several members has one"
        Waited(aside.allreduce([total]), self._works, [total], sliced=True).wait()
        if world.aborted:
            raise self._peer_lost()
        if int(total.item()) != mark * world.size:
            self._host.restart(
                f"{OTHER_PROGRAM}: some have left it, or have issued other collectives"
            )

    def _pump(self) -> None:
        """Deliver what is complete; the lock is held."""
        while (delivery := self._member.deliver()) is not None:
            self._deliver(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        done = [self._pending.pop(number) for number in delivery.numbers]
        for pending in done:
            if pending.number in delivery.refused:
                pending.refuse(delivery.refused[pending.number])
            elif pending.number in delivery.handed:
                pending.accept(self._handed.pop(pending.number))
            elif pending.refusal is None and pending.call.signature.root in (
                None,
                self._member.identity,
            ):
                self._refuse_gather(pending)
                pending.scale_sum()
            if self._member.keeps(pending.number):
                self._kept[pending.number] = pending.result()
        self._prune()
        self._show_if_changed()
        if any(pending.call.signature.site in (Site.REDUCER, Site.HOOK) for pending in done):
            self._units += 1
            self._host.stepped(self._units)
            self._warn_of_kept_rank()
        for pending in done:
            pending.finish()

    def _refuse_gather(self, pending: PendingOperation) -> None:
        """Restart where a sum has a part of each worker: those of lost ones are missing."""
        alive = self._member.view.members
        lost = [rank for rank, each in enumerate(self._shown) if each not in alive]
        if lost and pending.gathers(self._rank_seen, len(self._shown), lost):
            self._host.restart(
                f"{pending.call.signature.described()} gathers a part from each worker, with zeros"
                " elsewhere, and the parts of lost workers are missing"
            )

    def _prune(self) -> None:
        for number in [n for n in self._kept if not self._member.keeps(n)]:
            del self._kept[number]

    def _show_if_changed(self) -> bool:
        """Let the program see the members of the rules' visible view; return whether they change.

        The first view is no change.
        """
        if self._member.restart:
            self._host.restart(self._member.restart)
        if not self._first:
            self._first = self._member.visible
        members = self._first if self.sees_first else self._member.visible
        if members == self._shown:
            return False
        has_changed = bool(self._shown)
        if has_changed:
            self._sizes.changed()
        self._shown = members
        self.show_members(range(self.size()))
        self._host.show(self.rank(), self.size())
        for call in self._followers:
            call(self.rank(), self.size())
        return has_changed

    # A fault.

    def _recover(self, world: WorldGroup, error: Exception) -> None:
        with self._changed:
            if self._has_left:  # The program fails, and has closed the world.
                return
            self._member.seal()
            self._handed.clear()
        world.abort()
        self._enter_next(error.with_traceback(None))

    def _join(self, shared: SharedState) -> None:
        """Enter a world at the boundary at which its members are, with their state."""
        self._host.shared()
        self._enter_next(None)
        self._thread.start()

    def _enter_next(self, error: Exception | None) -> None:
        while self._member.phase is not ViewPhase.RUNNING:
            self._refuse_vain_worlds(error)
            try:
                world = self._host.enter(error)
            except (RuntimeError, PeerLostError) as another:
                error = another.with_traceback(None)
                continue
            try:
                self._meet(world, self._use(world))
            except (RuntimeError, PeerLostError) as another:
                error = another.with_traceback(None)  # Its frames refer to this world's groups.
                world.abort()
                self._handed.clear()

    def _refuse_vain_worlds(self, error: Exception | None) -> None:
        with self._changed:
            stands_at = self._member.delivered, self._member.view.members
            self._vain_worlds = self._vain_worlds + 1 if stands_at == self._stands_at else 0
            self._stands_at = stands_at
            if self._vain_worlds >= _VAIN_WORLDS_MAX:
                self._member.refuse(
                    f"{_VAIN_WORLDS_MAX} worlds of the same workers have ended before any of their"
                    f" collectives was delivered; the last error: {error}"
                )

    def _meet(self, world: WorldGroup, log: WorkLog) -> None:
        meeting = Meeting(world, log)
        with self._changed:
            self._refuse_kept_sizes()
            own = self._member.table()
        tables = meeting.exchange(own)
        decided = plan(tables)
        if decided.restart:
            self._host.restart(decided.restart, state_lost=decided.state_lost)
        ranks = {table.identity: rank for rank, table in enumerate(tables)}
        for gift in decided.gifts:
            tensors = meeting.hand_over(ranks[gift.giver], self._held(gift.number))
            if self._member.identity in gift.takers:
                self._handed[gift.number] = tensors
        if own.is_new:
            self._enter_with_state(meeting, decided, tables)
            return
        if decided.newcomers:
            self._give_state(meeting, decided, ranks)
        self._install(world, decided, tables)

    def _refuse_kept_sizes(self) -> None:
        if self._has_summed and self._member.keeps_ranks and not self._layouts:
            self._member.refuse(
                "the script sums floats without DistributedDataParallel, and may divide them by"
                " a world size that it keeps in a variable; if it asks for it each time, add"
                " --ranks-may-change"
            )

    def _give_state(self, meeting: Meeting, decided: Plan, ranks: dict[Identity, int]) -> None:
        """Hand the state to all newcomers; return when each member knows that they have it."""
        assert self._shared is not None, "workers that share nothing have no newcomers"
        if self._member.identity == decided.survivors[0]:
            for newcomer in decided.newcomers:
                newcomers.give(meeting.world, meeting.log, ranks[newcomer], self._shared)
        meeting.come_together()

    def _enter_with_state(self, meeting: Meeting, decided: Plan, tables: list[Table]) -> None:
        """As a newcomer, take the state and install the view; the others wait for this."""
        assert self._shared is not None, "a newcomer shares its state before it joins"
        if self._member.identity in decided.newcomers:
            order = [table.identity for table in tables]
            giver = order.index(decided.survivors[0])
            newcomers.take(meeting.world, meeting.log, giver, self._shared)
        self._install(meeting.world, decided, tables)
        # It is a member from here on: if this fails, it recovers like the others.
        with contextlib.suppress(RuntimeError, PeerLostError):
            meeting.come_together()

    def _install(self, world: WorldGroup, decided: Plan, tables: Sequence[Table]) -> None:
        with self._changed:
            if world.aborted:
                raise self._peer_lost()
            is_new = self._member.phase is ViewPhase.NEW
            view = View(_number(world), tuple(table.identity for table in tables))
            self._note_lost_first(view, tables)
            starts = self._member.install(view, decided)
            if self._member.phase is ViewPhase.LEFT and is_new:
                self._host.left_out()
            if self._member.phase is ViewPhase.LEFT:
                self._host.restart("the others have continued without this worker")
            if self._member.phase is not ViewPhase.RUNNING:
                raise self._peer_lost()
            self._prune()
            try:
                for start in starts:
                    self._start(self._pending[start.number], start)
            except RuntimeError as failed:
                # It is no loss, and shows only here: the next meeting restarts the job.
                self._member.refuse(f"a collective could not be started again: {failed}")
                raise
            self._pump()
            self._host.stepped(self._units)
            self._changed.notify_all()

    def _note_lost_first(self, view: View, tables: Sequence[Table]) -> None:
        """Record whether rank 0 of the former view is lost, unless all programs had ended.

        Without a step or a checkpoint there is nothing yet that it alone may have saved.
        """
        is_lost = any(first not in view.members for first in self._member.view.members[:1])
        if not is_lost or any(table.all_ended for table in tables):
            return
        self._reads.first_lost(self._units)
        # A program that has read a checkpoint may have nothing to train, and save once more.
        self._lacks_first = self._lacks_first or self._has_stepped or self._host.has_resumed

    def _held(self, number: int) -> Sequence[torch.Tensor]:
        """Return this member's result of an operation, if it has one."""
        if number in self._kept:
            return self._kept[number]
        pending = self._pending.get(number)
        return pending.call.outputs if pending is not None else ()

    def _start(self, pending: PendingOperation, start: Start) -> None:
        """Start an operation in the current view; a failure shows as it is waited for."""
        root = None if start.root is None else self._member.view.members.index(start.root)
        pending.prepare(start)
        pending.begin(self.world_in_use, root, self._works)

    def _use(self, world: WorldGroup) -> WorkLog:
        """Make `world` the one that operations start in."""
        former, self._world = self._world, world
        self._works.close()
        log = self._works = WorkLog(world.refuses)
        release = log.releaser()

        def ended() -> None:
            release()
            with self._changed:
                self._changed.notify_all()

        world.when_aborted = ended
        if former is not None:
            former.close()
        return log


def _fails() -> bool:
    """Whether this thread handles an exception, other than the end of a program that ends well."""
    error = sys.exc_info()[1]
    return error is not None and is_failure(error)


def _number(world: WorldGroup) -> tuple[int, int]:
    """Return the number of a world's view: its round and attempt."""
    of_round, _, attempt = world.wiring.fence.partition(".")
    return int(of_round), int(attempt)


def _refused_shards(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} of FSDP or tensor parallelism: not possible with --in-place",
        slug="in-place-refused",
        expected="DistributedDataParallel: a lost worker's part of the parameters is on no other",
        next_step="start the script without --in-place: then a fault restarts all workers",
    )


def _refused_chain(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: not possible with --in-place",
        slug="in-place-refused",
        expected="collectives that the program starts in one order on all workers; callbacks run"
        " in another order on each",
        next_step="start the script without --in-place: then a fault restarts all workers; or use a"
        " hook with one collective, such as fp16_compress_hook",
    )


def watch_forwards() -> None:
    """Let each DDP over an OrderedGroup wait before a forward that a backward pass follows."""
    ours: Any = DistributedDataParallel
    before: Callable[..., Any] = ours._pre_forward

    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if self._use_python_reducer:  # Compiled code without breaks makes its sums, in no buckets.
            return before(self, *inputs, **kwargs)
        return wait(self, *inputs, **kwargs)

    @untraced
    def wait(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        prepared = before(self, *inputs, **kwargs)
        group = self.__dict__.get("process_group")
        if isinstance(group, OrderedGroup) and torch.is_grad_enabled():
            group.before_forward(self)
        return prepared

    ours._pre_forward = pre_forward


def watch_futures() -> None:
    """Let torch's functions that wait for several futures at once count as waits for operations.

    They wait in C++, which calls no method of a future.
    """
    torchs: Any = torch.futures
    in_torch = torchs.collect_all

    def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
        collected: torch.futures.Future[Any] = in_torch(futures)
        return OrderedFuture.of_all(futures, collected)

    def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
        return [future.wait() for future in collect_all(futures).wait()]

    torchs.collect_all, torchs.wait_all = collect_all, wait_all
