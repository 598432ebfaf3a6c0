"""An agent whose workers belong to the calling program: the side that runs in a thread.

Owns an event loop with the agent's rules, its connection and its leadership. Heartbeats and a local
coordinator therefore keep running whatever the rest of the process does. To the rules, the caller
of `agent.membership` is the worker group: StartGroup becomes an assignment in the shared state,
StopGroup a change. This module must not know the caller's use of a place.

How it fails: every error, our own bugs included, is stored in the shared state; nothing is raised
in the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastane.agent.link import CoordinatorLink, Dialer, first_to_end, registry_here
from elastane.agent.process_group_store import OfferedPort
from elastane.agent.rules import AgentCore, Readings
from elastane.coordinator.host import CoordinatorHost, operator_bridge_of
from elastane.coordinator.leadership import (
    EndpointLeadership,
    Leadership,
    StoreLeadership,
    token_of,
)
from elastane.observe import logging as console
from elastane.options.facts import versions
from elastane.options.rendezvous import new_incarnation
from elastane.process import rpc
from elastane.process.endpoint import STANDALONE, Endpoint, meets_here, reach
from elastane.process.environment import snapshot
from elastane.process.kernel import suspended_s
from elastane.process.tls import TlsConfig
from elastane.process.unanswered import own_addresses
from elastane.protocol.effects import (
    AgentEffect,
    AimGroup,
    Decline,
    Exit,
    MarkGroup,
    StartGroup,
    StopGroup,
    Transmit,
    WriteEvent,
)
from elastane.protocol.events import (
    AgentEvent,
    GroupDrained,
    GroupGone,
    GroupMarked,
    Linked,
    Signalled,
    Tick,
    WorkerFailed,
    WorkerSucceeded,
)
from elastane.protocol.messages import Conclude
from elastane.protocol.model import (
    Assignment,
    Failure,
    Fence,
    JobSpec,
    NodeSpec,
    Outcome,
    PortOffer,
)
from elastane.protocol.wire import derive_secret
from elastane.stores import JobKeys, Store

_log = logging.getLogger("elastane.member")
_REASON_CHARS_MAX = 1000
_FINISHED = "finished"


@dataclass(frozen=True)
class MemberConfig:
    """The job, where it meets, and how this node presents itself.

    `open_store` opens the store in which the coordinator is elected. Without it, the owner of the
    address `endpoint` runs the coordinator (`hosts`: by order). `close_grace_s` is how long the
    caller may continue after another node closed the job without an error.
    """

    spec: JobSpec
    endpoint: Endpoint = STANDALONE
    hosts: bool | None = None
    open_store: Callable[[], Store] | None = None
    node_id: str = ""
    node_rank: int | None = None
    local_world_size: int = 1
    local_addr: str = ""
    token: str = field(default="", repr=False)
    tls: TlsConfig | None = None
    close_grace_s: float = 30.0

    @property
    def reach(self) -> str:
        """Where others reach this node's listeners; "" while that is not known."""
        endpoint = self.endpoint.host if self.open_store is None else ""
        return reach(self.local_addr, alone=meets_here(endpoint, self.local_addr))


@dataclass
class SharedMembership:
    """What the two threads share, guarded by `condition`; the member writes and notifies.

    `assignment` is the current one, with the `listener` of its store on node rank 0. The caller
    sets `claimed` when it has received the assignment. `change` says why the caller must call
    `join` again.
    """

    condition: threading.Condition = field(default_factory=threading.Condition)
    assignment: Assignment | None = None
    listener: socket.socket | None = None
    claimed: bool = False
    change: str = ""
    outcome: Outcome | None = None
    ended: bool = False
    error: BaseException | None = None

    def announce(self, assignment: Assignment, listener: socket.socket | None) -> None:
        """Hold a new assignment for the caller."""
        with self.condition:
            self.assignment = assignment
            self.claimed = False
            self.change = ""
            if listener is not None:
                self.listener = listener
            self.condition.notify_all()

    def claim(self) -> tuple[Assignment, socket.socket | None] | None:
        """Return an assignment that the caller does not have yet; call it under the lock."""
        if self.assignment is None or self.claimed:
            return None
        self.claimed = True
        return self.assignment, self.listener

    def withdraw(self) -> None:
        """Hold no assignment: nothing runs in it any more."""
        with self.condition:
            self.assignment = None
            self.change = ""
            if self.listener is not None and not self.claimed:
                self.listener.close()
            self.listener = None
            self.claimed = False

    def announce_change(self, fence: Fence, reason: str) -> None:
        """Say why the caller must call `join` again, unless its assignment is another by now."""
        with self.condition:
            if self.assignment is not None and self.assignment.fence == fence:
                self.change = reason or "the job has another membership"
                self.condition.notify_all()

    def announce_outcome(self, outcome: Outcome) -> None:
        """Say how the job ended; the first outcome counts."""
        with self.condition:
            if self.outcome is None:
                self.outcome = outcome
                self.condition.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Say that the thread has ended, and with which error."""
        with self.condition:
            self.ended = True
            self.error = error
            self.change = self.change or "the membership has ended"
            self.condition.notify_all()


class MembershipAgent:
    """The thread's side; all methods but `run` and `call` belong to its own loop."""

    def __init__(self, config: MemberConfig, shared: SharedMembership) -> None:
        self.config = config
        self.shared = shared
        self._selector: selectors.BaseSelector | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._queue: asyncio.Queue[AgentEvent] = asyncio.Queue()
        self._port = OfferedPort(listening=True, host=config.reach)
        self._core: AgentCore | None = None
        self._link: CoordinatorLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False  # the rules have asked the group to stop
        self._given_back = False  # the caller has stopped its work in this group
        self._left = ""  # why the caller will not return; empty while it may
        self._conclusion: Conclude | None = None

    def run(self) -> None:
        """Take part until the job has ended or this node has left; the thread's target."""
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=self._new_loop) as runner:
                runner.run(self._participate())
        except asyncio.CancelledError:
            _log.debug("the membership was cut")
        except BaseException as caught:
            error = caught
        finally:
            self._port.close()
            self._ready.set()
            self.shared.end(error)

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the member's loop soon, from any thread; dropped after its end."""
        self._ready.wait()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(action)

    def cut(self) -> None:
        """End without waiting for other nodes, which see the connection break."""
        if self._main is not None:
            self._main.cancel()

    def blank_after_fork(self) -> None:
        """Release every connection in a forked child, so that others see them end."""
        if self._selector is None or self._selector.get_map() is None:
            return
        numbers = [key.fd for key in self._selector.get_map().values()]
        if self._port.is_open:
            numbers.append(self._port.socket.fileno())
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            # Not closed: a socket object would later close the number again, which another file may
            # own by then.
            os.dup2(null, number, inheritable=False)
        os.close(null)

    # Called in the loop for the caller's actions.

    def give_back(self, fence: Fence, failure: str) -> None:
        """Record that the caller stopped its work in `fence`; `failure`: why, if unasked."""
        group = self._core.group if self._core is not None else None
        if group is None or group.fence != fence:
            return
        self._given_back = True
        if self._stopping:
            self._gone(fence)
            return
        rank = group.assignment.rank_base
        failed = Failure(local_rank=0, rank=rank, pid=os.getpid(), exit_code=1, message=failure)
        self.post(WorkerFailed(fence, failed, time.monotonic()))

    def succeed(self, fence: Fence) -> None:
        """Record that the caller's work in `fence` succeeded and it will run nothing more."""
        self._left = _FINISHED
        for local_rank in range(self.config.local_world_size):
            self.post(WorkerSucceeded(fence, local_rank))
        if self._stopping:
            self._stop(fence, "")

    def conclude(self, ok: bool, reason: str, *, stays: bool) -> None:
        """End the job for all; repeated to each new coordinator until the job has ended.

        `stays`: the caller still runs its work, and stops it when asked.
        """
        self._conclusion = Conclude(ok=ok, reason=reason[:_REASON_CHARS_MAX])
        self._send_conclusion()
        if not stays:
            self._left = reason
            self._give_up_if_stopping()

    def leave(self, reason: str) -> None:
        """Leave the job, which continues; the caller's work has ended, or ends with it."""
        self._left = reason
        self.post(Signalled(reason))
        group = self._core.group if self._core is not None else None
        if group is not None:
            self._gone(group.fence)

    def _give_up_if_stopping(self) -> None:
        if self._stopping and self._core is not None and self._core.group is not None:
            self._gone(self._core.group.fence)

    # The loop.

    def post(self, event: AgentEvent) -> None:
        """Queue an event."""
        self._queue.put_nowait(event)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self._selector = selectors.DefaultSelector()
        return asyncio.SelectorEventLoop(self._selector)

    async def _participate(self) -> None:
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        config = self.config
        keys = JobKeys(config.open_store(), config.spec.job) if config.open_store else None
        token = config.token or (await token_of(keys) if keys else "")
        secret = derive_secret(config.spec.job, token or None)
        access = rpc.Access(config.spec.job, secret, config.tls)
        bridge = operator_bridge_of(keys, snapshot())
        leadership = self._leadership(
            keys, CoordinatorHost(config.spec, access, console.log_event, bridge)
        )

        self._core = AgentCore(
            config.spec,
            self._node_spec(),
            self._port.open(),
            time.monotonic(),
            self_fencing=keys is not None,
            ready=True,  # It has no zygote that must warm up.
        )
        dialer = Dialer(access, lambda: token, config.node_id, registry_here())
        self._link = CoordinatorLink(leadership, dialer, self.post, config.spec)
        try:
            await self._run_tasks(self._core, self._link, leadership)
        finally:
            dialer.close()

    def _leadership(self, keys: JobKeys | None, hosting: CoordinatorHost) -> Leadership:
        config = self.config
        if keys is None:
            return EndpointLeadership(config.endpoint, config.hosts, hosting)
        return StoreLeadership(keys, config.node_id, config.reach, hosting)

    def _node_spec(self) -> NodeSpec:
        config = self.config
        return NodeSpec(
            node_id=config.node_id,
            incarnation=new_incarnation(snapshot()),
            local_world_size=config.local_world_size,
            node_rank=config.node_rank,
            local_addr=config.local_addr,
            addresses=own_addresses(),
            versions=versions(),
        )

    async def _run_tasks(
        self, core: AgentCore, link: CoordinatorLink, leadership: Leadership
    ) -> None:
        work = asyncio.create_task(self._run_rules(core, link))
        linking, leading = asyncio.create_task(link.run()), asyncio.create_task(leadership.run())
        tasks = [work, linking, leading]
        try:
            await first_to_end(work, linking, leading)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await link.flush()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await leadership.close(ended=core.outcome is not None)

    async def _run_rules(self, core: AgentCore, link: CoordinatorLink) -> None:
        self.post(Tick())
        while True:
            event = await self._queue.get()
            if isinstance(event, Linked) and core.group is None:
                event = Linked(self._new_port())
            readings = Readings(slept_s=suspended_s())
            for effect in core.handle(event, time.monotonic(), readings):
                if core.outcome is not None:
                    self.shared.announce_outcome(core.outcome)
                    link.retire()
                if isinstance(effect, Exit):
                    return
                self._perform(effect, link)
            if isinstance(event, Linked):
                self._send_conclusion()
            if self._timer is not None:
                self._timer.cancel()
            delay_s = max(0.0, core.wake_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.post, Tick())

    def _perform(self, effect: AgentEffect, link: CoordinatorLink) -> None:
        match effect:
            case Transmit(message=message):
                link.send(message)
            case StartGroup(assignment=assignment):
                self._announce(assignment)
            case StopGroup(fence=fence, reason=reason):
                self._stop(fence, reason)
            case Decline(fence=fence):
                self._gone(fence)
            case MarkGroup(fence=fence, drain=drain):
                self.post(GroupMarked(fence, drain, None))  # The caller cannot be asked to save.
            case AimGroup(fence=fence, drain=drain, stops=stops):
                self.post(GroupDrained(fence, drain, stops))
            case WriteEvent(event=event):
                console.log_event(event)
            case Exit():
                raise AssertionError("_run_rules returns on Exit")

    def _announce(self, assignment: Assignment) -> None:
        self._stopping = self._given_back = False
        if self._left:
            self._gone(assignment.fence)  # The caller left while the assignment was on its way.
            return
        listener = self._port.socket.dup() if assignment.node_rank == 0 else None
        self.shared.announce(assignment, listener)

    def _stop(self, fence: Fence, reason: str) -> None:
        """End the group of `fence`: ask the caller, if it has work to stop."""
        self._stopping = True
        with self.shared.condition:
            if self.shared.claimed and not self._given_back and not self._left:
                outcome = self._core.outcome if self._core is not None else None
                # A node that closes a job without an error lets the others finish.
                grace_s = self.config.close_grace_s if outcome is not None and outcome.ok else 0.0
                asyncio.get_running_loop().call_later(
                    grace_s, self.shared.announce_change, fence, reason
                )
                return
        if self._left is _FINISHED and self._core is not None and self._core.outcome is None:
            self._cannot_start_again(reason)
        self._gone(fence)

    def _cannot_start_again(self, reason: str) -> None:
        """Leave or end the job: the caller has finished, and its world is to restart."""
        what = f"it finished its part and cannot start again: {reason}"
        if self.config.spec.is_elastic:
            self.post(Signalled(what))
        else:
            self.conclude(False, what, stays=True)

    def _gone(self, fence: Fence) -> None:
        """Report that nothing runs in `fence` any more, and offer a new port."""
        self.shared.withdraw()
        self._given_back = self._stopping = False
        self.post(GroupGone(fence, self._new_port()))

    def _new_port(self) -> PortOffer:
        """Hold a new port; others may know the previous one."""
        before, self._port = self._port, OfferedPort(listening=True, host=self.config.reach)
        offer = self._port.open()
        before.close()
        return offer

    def _send_conclusion(self) -> None:
        if self._conclusion is not None and self._link is not None:
            self._link.send(self._conclusion)
