"""The process group of one world, which any thread may abort at any time.

`WorldGroup` owns the group's life: built once, used, aborted, closed. gloo on the CPU is released
from any wait by cutting its sockets (`sockets`), NCCL on cuda by aborting its communicators. It
does not know the reason of an abort, nor other worlds. It fails with `PeerLostError`. An operation
in progress fails with gloo's RuntimeError.

The construction runs in a thread of its own. So the caller is free as soon as the world is aborted,
even if torch still waits. That thread is then released and frees what it had made.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo

from elastane.comms import sockets
from elastane.comms.construction import Construction, Made, Wiring
from elastane.errors import ElastaneError, PeerLostError

__all__ = ["ALONE", "Wiring", "WorldGroup"]

ALONE = Wiring(rank=0, world_size=1, master_addr="", master_port=0, fence="alone")


# Part of gloo's errors about a connection, and of none about wrong arguments.
TRANSPORT = "/gloo/transport/"
# Threads that run the destructors of groups. An interpreter that exits meanwhile would kill them in
# the middle of C++, which aborts the process (seen in 2 of 25 ends of a job).
_closers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_CLOSE_S = 5.0
_CLOSER = "elastane-close"
_exits = threading.Event()
# The pause between two checks of a group that still has references.
_DROP_S = 0.02
_DROP_MAX_S = 1.0
# The references of an object in a list: from the list, and from the call that counts them.
_OWN_REFERENCES = 2


def _wait_closed() -> None:
    _exits.set()
    end_s = time.monotonic() + _CLOSE_S
    for closer in list(_closers):
        closer.join(max(0.0, end_s - time.monotonic()))


atexit.register(_wait_closed)


def _drop(last: list[ProcessGroup]) -> None:
    """Drop torch's groups, each once it has no other reference.

    The destructor of a group waits for the group's threads. A thread that gloo has forgotten (see
    `works.WorkLog.releaser`) would block the thread that drops the last reference. That reference
    may be in a frame of a handled exception: the delivery of collectives stopped for ever
    (2026-11-27).
    """
    pause_s = _DROP_S
    while last and not _exits.is_set():
        if sys.getrefcount(last[-1]) <= _OWN_REFERENCES:
            last.pop()
        else:
            _exits.wait(pause_s)
            pause_s = min(2 * pause_s, _DROP_MAX_S)
    last.clear()


class _Phase(Enum):
    NEW = "not begun"
    BUILDING = "being built"
    READY = "ready"
    FAILED = "failed"
    ABORTED = "ended"
    CLOSED = "closed"


class WorldGroup:
    """One world's process group: `build`, use `group`, `close`. Any thread may `abort`."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._changed = threading.Condition()
        self._phase = _Phase.NEW
        self._construction = Construction(wiring)
        self._made: Made | None = None
        self._failure: BaseException | None = None
        # Called once, by the thread that aborts a world that was ready.
        self.when_aborted: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self.wiring.rank

    @property
    def size(self) -> int:
        """The world size."""
        return self.wiring.world_size

    @property
    def group(self) -> ProcessGroup:
        """torch's group; after `build` and until `close`."""
        return self._result().group

    @property
    def store(self) -> Store:
        """The world's store, its keys under the fence; a private one in a world of one."""
        return self._result().store

    @property
    def aside(self) -> ProcessGroupGloo | None:
        """The second gloo context, if the world has several members: see `Made`."""
        return self._result().aside

    @property
    def aborted(self) -> bool:
        """Whether the world was aborted, or its construction failed."""
        return self._phase in (_Phase.ABORTED, _Phase.FAILED, _Phase.CLOSED)

    def refuses(self, error: Exception) -> bool:
        """Whether an error says that a call was wrong, such as a type that gloo cannot sum.

        Some come with the call, others with the wait for it. No member is lost. False with NCCL,
        whose errors do not tell.
        """
        is_lost = isinstance(error, PeerLostError) or TRANSPORT in str(error)
        return not (is_lost or self.aborted or self.wiring.uses_nccl)

    @property
    def traffic(self) -> int | None:
        """The bytes sent and received over gloo's connections so far; None with NCCL."""
        if self.wiring.uses_nccl:
            return None
        return sockets.traffic(self._construction.inodes)

    def build(self) -> WorldGroup:
        """Meet the other members and connect to each; returns itself.

        Raises PeerLostError if a member does not come within the timeout, or if the world is
        aborted meanwhile. Raises ConfigurationError if collectives of this torch could not be
        aborted.
        """
        with self._changed:
            if self._phase is not _Phase.NEW:
                raise self._not_built()
            self._phase = _Phase.BUILDING
        if self.size == 1:
            self._construct()
        else:
            threading.Thread(target=self._construct, name="elastane-group", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not _Phase.BUILDING)
            if self._phase is _Phase.READY:
                return self
            failure, self._failure = self._failure, None
        if isinstance(failure, ElastaneError):
            raise failure
        raise self._not_built(failure) from failure

    def abort(self) -> None:
        """Abort the world: threads that wait in its construction or in a collective return.

        From any thread, at any time, any number of times. The group is unusable afterwards.
        """
        with self._changed:
            before = self._phase
            if before in (_Phase.ABORTED, _Phase.CLOSED):
                return
            self._phase = _Phase.ABORTED
            made = self._made
            self._changed.notify_all()
        if before is _Phase.BUILDING:
            self._construction.end()
        elif made is not None:
            if self._construction.client is not None:
                self._construction.client.interrupt()
            sockets.cut(self._construction.inodes)
            if self.wiring.uses_nccl:
                made.group.abort()
            if self.when_aborted is not None:
                self.when_aborted()

    def close(self) -> None:
        """Free connections, threads and memory; abort what still runs. Idempotent."""
        self.abort()
        with self._changed:
            self._phase = _Phase.CLOSED
            made, self._made = self._made, None
        self._construction.server = None
        if made is not None and self._construction.client is not None:
            self._construction.client.close()
        if made is not None:
            last = [each for each in (made.group, made.aside) if each is not None]
            made = None
            closer = threading.Thread(target=_drop, args=(last,), name=_CLOSER, daemon=True)
            _closers.add(closer)
            closer.start()

    def _construct(self) -> None:
        made: Made | None = None
        failure: BaseException | None = None
        try:
            made = self._construction.run()
        except (RuntimeError, ValueError, OSError, ElastaneError) as error:
            # Its traceback would keep alive what the construction had made.
            failure = error.with_traceback(None)
        with self._changed:
            if self._phase is _Phase.BUILDING:
                self._made, self._failure = made, failure
                self._phase = _Phase.FAILED if made is None else _Phase.READY
                self._changed.notify_all()
                return
        # The world was aborted meanwhile, so nothing uses the result.
        if made is not None and self._construction.client is not None:
            self._construction.client.close()

    def _result(self) -> Made:
        made = self._made
        if made is None:
            raise self._not_built()
        return made

    def _not_built(self, failure: BaseException | None = None) -> PeerLostError:
        why = str(failure).partition("\n")[0] if failure else f"it is {self._phase.value}"
        return PeerLostError(
            f"world {self.wiring.fence} has no process group: {why}",
            slug="group-not-built",
            where=f"rank {self.rank} of {self.size}",
            expected=f"{self.size} connected members within {self.wiring.timeout_s:g} s",
            next_step="enter the next world",
        )
