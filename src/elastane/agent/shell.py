"""The agent's loop: events in, effects out, one after the other.

Owns the queue, the timer and the signals. An exception here is our bug: the process ends with a
trace, the orphan reaper ends the workers, and the coordinator sees the connection break.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from elastane.agent.link import CoordinatorLink
from elastane.agent.process_group_store import OfferedPort
from elastane.agent.rules import AgentCore, Readings
from elastane.agent.worker import GroupSetup
from elastane.agent.workers import LocalWorkerGroup
from elastane.errors import ExitCode
from elastane.process.control_socket import CheckpointWritten
from elastane.process.kernel import suspended_s
from elastane.process.process import reap_orphans
from elastane.process.reach import answers
from elastane.protocol.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    EndGroupWorker,
    Exit,
    GroupEffect,
    InterruptGroup,
    MarkGroup,
    RegroupWorkers,
    ReleaseGroup,
    ShowGroupStacks,
    StartGroup,
    StartWorkers,
    StopGroup,
    Transmit,
    TryAddresses,
    WorldEffect,
    WriteEvent,
)
from elastane.protocol.events import (
    AddressesTried,
    AgentEvent,
    GroupAble,
    GroupGone,
    Linked,
    ReplicaDiffered,
    Signalled,
    Tick,
    Warm,
    WorkerFailed,
)
from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import NodeCopies, Probe, ProbeResult
from elastane.protocol.model import PortOffer

_log = logging.getLogger("elastane.agent")


@dataclass(frozen=True)
class Outlets:
    """The receivers of all effects that do not concern the workers.

    `set_deadline` passes on until when workers may live if this process stands still: nanoseconds
    of CLOCK_BOOTTIME, 0 without a bound. `fault_seen` is called after each fault of a worker here.
    `copies` returns the newest copies of the workers' state.
    """

    link: CoordinatorLink
    log_event: Callable[[LogEvent], None]
    set_deadline: Callable[[int], None]
    fault_seen: Callable[[], None]
    copies: Callable[[], NodeCopies | None]


class AgentShell:
    """Carries out the decisions of `core` for one node; `queue` holds the events for it."""

    def __init__(
        self,
        core: AgentCore,
        setup: GroupSetup,
        port: OfferedPort,
        queue: asyncio.Queue[AgentEvent],
        outlets: Outlets,
    ) -> None:
        self._core = core
        self._setup = setup
        self._port = port
        self._queue = queue
        self._outlets = outlets
        self._group: LocalWorkerGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trying: asyncio.Task[None] | None = None

    def post(self, event: AgentEvent) -> None:
        """Queue an event; call it from the loop's thread."""
        self._queue.put_nowait(event)

    def checkpoint_saved(self, where: str) -> None:
        """Report a checkpoint of an `elastane.Checkpointer` in the workers, which is durable.

        It saves nothing before `restore()` was called.
        """
        if self._group is not None:
            self._group.report_checkpoint(CheckpointWritten(where, resumed=True))

    def handle_signals(self, names: Sequence[str], repeated: Sequence[str] = ()) -> None:
        """Leave the job on these signals, except those that the parent process ignores.

        So a job that was started under nohup outlives its terminal. `repeated` are those that a
        scheduler sends more than once.
        """
        loop = asyncio.get_running_loop()
        for name in names:
            if signal.getsignal(signal.Signals[name]) is signal.SIG_IGN:
                continue
            event = Signalled(name, may_repeat=name in repeated)
            loop.add_signal_handler(signal.Signals[name], self.post, event)

    async def run(self) -> Exit:
        """Work until the rules say that the agent must exit."""
        warm = asyncio.ensure_future(self._report_warm())
        self.post(Tick())
        try:
            while True:
                event = self._with_offer(await self._queue.get())
                # Orphans of workers that soon end are adopted and reaped here, so no zombies pile
                # up.
                reap_orphans()
                effects = self._core.handle(event, time.monotonic(), self._readings())
                self._bound_workers()
                for effect in effects:
                    if isinstance(effect, Exit):
                        return self._final_exit(effect)
                    self._perform(effect)
                if isinstance(event, WorkerFailed | ReplicaDiffered):
                    self._outlets.fault_seen()
                if self._core.outcome is not None:
                    self._outlets.link.retire()
                self._set_timer()
        finally:
            warm.cancel()
            if self._trying is not None:
                self._trying.cancel()
            if self._timer is not None:
                self._timer.cancel()

    def _readings(self) -> Readings:
        """Return what the workers' status pages show, and how long this host slept."""
        group = self._group
        if group is None:
            return Readings(copies=self._outlets.copies(), slept_s=suspended_s())
        return Readings(
            progress=group.drain.progress(),
            met=group.drain.met(),
            waiting=group.hang_monitor.waits.at,
            all_wait=group.hang_monitor.waits.forever,
            paces=group.hang_monitor.paces,
            unanswered=group.hang_monitor.unanswered.addresses,
            copies=self._outlets.copies(),
            slept_s=suspended_s(),
        )

    def _bound_workers(self) -> None:
        """Pass the deadline on before any effect, so that a group starts under it."""
        until_s = self._core.train_until_s
        until_ns = 0 if until_s is None else int(until_s * 1e9)
        self._outlets.set_deadline(until_ns)
        if self._group is not None:
            self._group.allow_until(until_ns)

    def _with_offer(self, event: AgentEvent) -> AgentEvent:
        """Offer a new port in each session, and the port held now rather than when posted."""
        match event:
            case Linked():
                return Linked(self._new_port())
            case GroupAble():
                return structs.replace(event, offer=self._port.offer)
            case _:
                return event

    def _new_port(self) -> PortOffer:
        """Hold a new port; others may know the previous one."""
        return self._port.open()

    def _final_exit(self, exit_: Exit) -> Exit:
        """Return the exit, or another one if this node proved unfit for workers."""
        lost = self._group.lost if self._group else ""
        if not lost or exit_.outcome is not None:
            return exit_
        return Exit(int(ExitCode.NODE_UNFIT), lost, None, exit_.out_by_s)

    async def _report_warm(self) -> None:
        await self._setup.spawner.warm.wait()
        self.post(Warm())

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, self._core.wake_s - time.monotonic())
        self._timer = loop.call_later(delay_s, self.post, Tick())

    def _perform(self, effect: AgentEffect) -> None:
        match effect:
            case Transmit(message=message):
                self._outlets.link.send(message)
            case StartGroup(assignment=assignment):
                self._group = LocalWorkerGroup(self._setup, assignment, self._port, self.post)
                self._bound_workers()
                self._group.begin()
            case WriteEvent(event=event):
                self._outlets.log_event(event)
            case Exit():
                raise AssertionError("run() returns on Exit")
            case Decline(fence=fence):
                self.post(GroupGone(fence, self._new_port()))
            case TryAddresses(probes=probes):
                self._trying = asyncio.ensure_future(self._try(probes))
            case _:
                self._perform_on_group(effect)

    async def _try(self, probes: tuple[Probe, ...]) -> None:
        found = await asyncio.gather(*(answers(each.address, each.port) for each in probes))
        self.post(AddressesTried(tuple(map(ProbeResult, probes, found))))

    def _perform_on_group(self, effect: GroupEffect) -> None:
        group = self._group
        of_world = isinstance(effect, WorldEffect)
        if group is None or effect.fence != (group.world if of_world else group.assignment).fence:
            _log.debug("no group of %s any more", effect.fence)
            return
        match effect:
            case StopGroup(grace_s=grace_s):
                group.stop(grace_s)
            case StartWorkers(local_ranks=local_ranks, assignment=assignment, delay_s=delay_s):
                group.start_more(local_ranks, assignment, delay_s)
            case InterruptGroup(reason=reason, asks_calls=asks_calls):
                group.interrupt(reason, asks_calls=asks_calls)
            case RegroupWorkers(assignment=assignment, able=able):
                group.regroup(assignment, able)
            case MarkGroup() | AimGroup() | ReleaseGroup() | EndGroupWorker() | ShowGroupStacks():
                _perform_in_world(group, effect)


def _perform_in_world(group: LocalWorkerGroup, effect: WorldEffect) -> None:
    """Perform an effect on workers in their current world."""
    match effect:
        case MarkGroup():
            group.drain.mark(effect)
        case AimGroup():
            group.drain.aim(effect)
        case ReleaseGroup():
            group.drain.release()
        case EndGroupWorker(rank=rank, reason=reason):
            group.end_worker(rank, reason)
        case ShowGroupStacks(ranks=ranks):
            group.show_stacks(ranks)
