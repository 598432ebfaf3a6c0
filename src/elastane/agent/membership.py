"""Membership of one node in a job, for a program that runs the workers itself.

    with Membership(config) as membership:
        while True:
            place = membership.join()            # blocks until this node is in a world
            if work(place, until=lambda: membership.has_changed):
                membership.finish()              # all succeeded here; waits for the others
                break

Call `join` again whenever `has_changed` is true (a node failed, left or arrived) and whenever the
caller's work failed. Each call gives back the previous place. All calls are synchronous and may
come from any thread. Heartbeats are sent by a thread, so a training caller need not call anything.

Owns the thread of a `MembershipAgent`. The first `join` starts it; it ends with the job, by
`leave`, by `close`, or with this process. It does not know the caller's use of a place. How it
fails: the call that needs the membership raises the agent's ElastaneError (refused, no coordinator,
too few nodes, closed). In a forked child every call is refused: a session belongs to one process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from elastane.agent.membership_agent import MemberConfig, MembershipAgent, SharedMembership
from elastane.errors import (
    ConfigurationError,
    ElastaneError,
    ExitCode,
    JobClosedError,
    JoinTimeoutError,
    MembershipError,
    RendezvousRefusedError,
)
from elastane.protocol.limits import CLOSE_S
from elastane.protocol.model import Assignment, Outcome
from elastane.stores import JobKeys, Store

__all__ = ["MemberConfig", "MemberPlace", "Membership"]

# The coordinator informs all other nodes, which have CLOSE_S to end. Then this side has closed.
_CLOSE_WAIT_S = 3 * CLOSE_S
# At the end of the process: time for the goodbye to be sent, and for the thread to end.
_GOODBYE_S = 0.2
_CUT_S = 2.0
_members: weakref.WeakSet[MembershipAgent] = weakref.WeakSet()


@dataclass(frozen=True)
class MemberPlace:
    """This node's place in one attempt of one world.

    `listener` exists on node rank 0: the socket on which the attempt's process-group store is to be
    served. It has listened since before its port was announced, and now belongs to the caller. All
    nodes reach it at `assignment.master_addr` and `master_port`.
    """

    assignment: Assignment
    listener: socket.socket | None

    @property
    def node_rank(self) -> int:
        """The rank of this node."""
        return self.assignment.node_rank

    @property
    def nodes(self) -> int:
        """How many nodes the world has."""
        return self.assignment.nodes

    def __str__(self) -> str:
        return f"{self.assignment.fence}: node rank {self.node_rank} of {self.nodes}"


class Membership:
    """See the module. `name` returns the node id for each joining; `join` starts a thread."""

    def __init__(self, config: MemberConfig, name: Callable[[], str]) -> None:
        self._config = config
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._member: MembershipAgent | None = None
        self._thread: threading.Thread | None = None
        self._place: MemberPlace | None = None
        self._outcome: Outcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self.leave("its program continues without the job" if error is None else str(error))

    @property
    def config(self) -> MemberConfig:
        """The configuration it was created with."""
        return self._config

    @property
    def place(self) -> MemberPlace | None:
        """The place that the last `join` returned, until it is given back."""
        return self._place

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while this node has not learned of an end."""
        return self._outcome or (self._member.shared.outcome if self._member else None)

    @property
    def change(self) -> str:
        """Why the caller must call `join` again, in words; empty: it need not."""
        self._check_process()
        member = self._member
        if member is None:
            return ""
        with member.shared.condition:
            return member.shared.change

    @property
    def has_changed(self) -> bool:
        """Whether the world of the last place has ended, or the job has."""
        return bool(self.change)

    def wait_change(self, timeout_s: float) -> bool:
        """Wait until the caller must call `join` again; return whether it must."""
        self._check_process()
        member = self._member
        if member is None:
            return False
        return _wait_until(member, lambda shared: bool(shared.change), timeout_s)

    def has_ended(self) -> bool:
        """Whether the job has ended; one that was never joined is looked up in its store."""
        self._check_process()
        if self.outcome is not None:
            return True
        if self._member is not None or self._config.open_store is None:
            return False
        try:
            asyncio.run(_check_open(self._config.open_store(), self._config.spec.job))
        except JobClosedError:
            return True
        return False

    def join(self, failure: str = "the workers of this node failed") -> MemberPlace:
        """Return this node's place in the next world, once there is one.

        Gives back the place held so far. If no change was announced, this ends the current world
        for the reason `failure`. An interrupted call leaves the job; the next call joins again.
        Raises RendezvousTimeoutError, RendezvousClosedError (also for a spare node, when the others
        have finished), RendezvousRefusedError, or the error of the store or the endpoint.
        """
        self._check_process()
        if self._outcome is not None:
            raise error_of(self._outcome)
        member = self._begin()
        try:
            self._give_back(member, failure)
            return self._await_place(member)
        except BaseException as error:
            self._abandon(str(error) or type(error).__name__)
            raise

    def finish(self) -> Outcome:
        """Report that all work here succeeded; return the outcome once the other nodes finished.

        Waits as long as they work. If their world ends otherwise, this node cannot start again: an
        elastic job continues without it, and any other job ends.
        """
        self._check_process()
        member, place = self._member, self._place
        if member is None or place is None:
            raise MembershipError("finish() without a place", slug="membership-idle")
        fence = place.assignment.fence
        member.call(lambda: member.succeed(fence))
        self._await_end(member, None)
        return self._outcome_of(member)

    def close(self, ok: bool, reason: str, *, stays: bool = False) -> bool:
        """End the job for all nodes; return whether the coordinator confirmed it in time.

        `ok`: the others may finish their work within their grace; otherwise they must stop now.
        `stays`: this node may finish too, and stays a member until then; otherwise its place is
        given back.
        """
        self._check_process()
        if self.outcome is None:
            member = self._begin()
            member.call(lambda: member.conclude(ok, reason, stays=stays))
            self._await_outcome(member, _CLOSE_WAIT_S)
        if stays:
            return self.outcome is not None
        self._finish_member()
        return self._outcome is not None

    def leave(self, reason: str = "it was asked to") -> None:
        """Leave the job, which continues without this node; does nothing if it is not in a job."""
        self._check_process()
        if self.outcome is not None:
            self._finish_member()
        elif self._member is not None:
            member, thread = self._member, self._thread
            self._abandon(reason)
            _wait_for_goodbye(member, thread)

    # Private.

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"a membership of process {self._pid} was used in process {os.getpid()},"
                " which was forked from it",
                slug="membership-forked",
                expected="one process for all calls",
                next_step="make another in the child, or start it by spawn in place of fork",
            )

    def _begin(self) -> MembershipAgent:
        with self._lock:
            if self._member is not None and not self._member.shared.ended:
                return self._member
            if self._member is not None:
                self._raise_end(self._member)
            config = replace(self._config, node_id=self._config.node_id or self._name())
            member = MembershipAgent(config, SharedMembership())
            self._thread = threading.Thread(
                target=member.run, name=f"elastane-member-{config.node_id}", daemon=True
            )
            self._member = member
            _members.add(member)
            weakref.finalize(self, _leave_unreferenced, member).atexit = False
            self._thread.start()
            return member

    def _give_back(self, member: MembershipAgent, failure: str) -> None:
        place = self._place
        self._place = None
        if place is None:
            return
        if place.listener is not None:
            place.listener.close()
        fence = place.assignment.fence
        member.call(lambda: member.give_back(fence, failure))

    def _await_place(self, member: MembershipAgent) -> MemberPlace:
        shared = member.shared
        with shared.condition:
            while True:
                if shared.outcome is not None or shared.ended:
                    break
                claimed = shared.claim()
                if claimed is not None:
                    self._place = MemberPlace(*claimed)
                    return self._place
                shared.condition.wait()
        self._raise_end(member)
        raise AssertionError("an end raises")

    def _raise_end(self, member: MembershipAgent) -> None:
        """Raise the reason why the membership of `member` ended."""
        shared = member.shared
        if shared.outcome is not None:
            self._outcome = shared.outcome
            raise error_of(shared.outcome)
        self._member = None
        if shared.error is not None:
            raise shared.error
        raise MembershipError(
            "the membership ended: this node left the job",
            slug="membership-idle",
            next_step="join() makes this node a member again",
        )

    def _await_outcome(self, member: MembershipAgent, timeout_s: float) -> None:
        _wait_until(member, lambda shared: shared.outcome is not None or shared.ended, timeout_s)

    def _await_end(self, member: MembershipAgent, timeout_s: float | None) -> bool:
        return _wait_until(member, lambda shared: shared.ended, timeout_s)

    def _finish_member(self) -> None:
        """Give the place back, and wait for the thread to end."""
        member, thread, place = self._member, self._thread, self._place
        if member is None:
            return
        self._place = None
        if place is not None:
            fence = place.assignment.fence
            member.call(lambda: member.give_back(fence, "the job is closed"))
        if not self._await_end(member, _CLOSE_WAIT_S):
            member.call(member.cut)
        self._outcome = self._outcome or member.shared.outcome
        self._member = None
        if thread is not None:
            thread.join(_CUT_S)

    def _outcome_of(self, member: MembershipAgent) -> Outcome:
        self._place = None
        if member.shared.outcome is None:
            self._raise_end(member)
        self._finish_member()
        assert self._outcome is not None, "the outcome is kept"
        return self._outcome

    def _abandon(self, reason: str) -> None:
        """Let the member leave on its own; the next `join` starts another one."""
        member = self._member
        self._member = None
        self._place = None
        if member is not None and not member.shared.ended:
            member.call(lambda: member.leave(reason))


def _wait_until(
    member: MembershipAgent, is_met: Callable[[SharedMembership], bool], timeout_s: float | None
) -> bool:
    """Wait until `is_met` holds for the shared state; return whether it does."""
    shared = member.shared
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    with shared.condition:
        while not is_met(shared):
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            shared.condition.wait(left_s)
    return True


async def _check_open(store: Store, job: str) -> None:
    try:
        await JobKeys(store, job).check_open()
    finally:
        await store.close()


def _leave_unreferenced(member: MembershipAgent) -> None:
    """Leave the job when the membership was garbage-collected."""
    if not member.shared.ended:
        member.call(lambda: member.leave("its program dropped the membership"))


def error_of(outcome: Outcome) -> ElastaneError:
    """Return the error to raise to a program that wants to join an ended job."""
    kind: type[ElastaneError] = JobClosedError
    if outcome.slug == "rdzv-timeout":
        kind = JoinTimeoutError
    elif outcome.slug == "no-coordinator":
        kind = MembershipError
    elif outcome.exit_code == ExitCode.CONFIGURATION and outcome.slug != "job-closed":
        kind = RendezvousRefusedError
    what = outcome.reason
    if kind is JobClosedError and outcome.slug != "job-closed":
        what = f"the job has ended: {outcome.reason}"
    return kind(what, slug=outcome.slug or "rdzv-closed", next_step=outcome.next_step)


def _wait_for_goodbye(member: MembershipAgent, thread: threading.Thread | None) -> None:
    """Wait until the goodbye was sent, then end the thread whether or not it was answered."""
    _wait_until(member, lambda shared: shared.ended, _GOODBYE_S)
    member.call(member.cut)
    if thread is not None:
        thread.join(_CUT_S)


def _at_exit() -> None:
    """Leave every job of this process as it ends."""
    for member in list(_members):
        if not member.shared.ended:
            with contextlib.suppress(RuntimeError):
                member.call(lambda m=member: m.leave("its process ends"))  # type: ignore[misc]
                _wait_for_goodbye(member, None)


def _after_fork() -> None:
    for member in list(_members):
        member.blank_after_fork()
    _members.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
