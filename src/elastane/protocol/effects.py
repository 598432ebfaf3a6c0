"""What core asks the world to do; the shells carry it out, in the order of the list.

The rendezvous yields `Persist`, `Send`, `Hangup`, `Tell` and `Finished`; the agent yields
`Transmit`, `StartGroup`, `Decline`, `Tell`, `Exit`, and what is done to a group that runs:
`StopGroup`, `MarkGroup`, `AimGroup`, `StartWorkers`, `InterruptGroup`, `RegroupWorkers`. A group is
named by the fence that it was started with, whatever world its workers are in later; a drain, by
that of the world that it is for.
"""

from __future__ import annotations

import msgspec

from elastane.protocol.log_events import Note
from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.model import Assignment, Fence, JobRecord, Outcome


class Tell(msgspec.Struct, frozen=True):
    """Write this event to the log. Obligation: none; losing it harms nobody."""

    note: Note


class Persist(msgspec.Struct, frozen=True):
    """Make this record durable.

    Obligation: it is durable before any later effect of the same list is carried out. Where
    that fails for want of authority, none of the later ones may be, and the coordinator ends.
    """

    record: JobRecord


class Send(msgspec.Struct, frozen=True):
    """Send a message to one session, in order; to one that is gone it is dropped."""

    session: int
    message: ToAgent


class Hangup(msgspec.Struct, frozen=True):
    """Close a session after what was sent to it; core expects no `Broken` for it."""

    session: int
    reason: str


class Finished(msgspec.Struct, frozen=True):
    """The job has ended and all agents know, or had their time to."""

    outcome: Outcome


class Transmit(msgspec.Struct, frozen=True):
    """Send to the coordinator; dropped where there is no session, for core tells it anew."""

    message: ToCoordinator


class StartGroup(msgspec.Struct, frozen=True):
    """Start the local worker group of this assignment."""

    assignment: Assignment


class StartWorkers(msgspec.Struct, frozen=True):
    """Start these local workers of a group anew, in `delay_s`; they have no place yet."""

    fence: Fence
    local_ranks: tuple[int, ...]
    assignment: Assignment
    delay_s: float


class InterruptGroup(msgspec.Struct, frozen=True):
    """Have the workers that recover in place end their step, and wait for a world."""

    fence: Fence
    reason: str


class RegroupWorkers(msgspec.Struct, frozen=True):
    """Give workers of the group that began with `fence` their place in another world.

    `able` are those of its local ranks that get theirs: of the others it is told that they failed,
    though a successor may be able by now. Obligation: `GroupAble` follows, with another port; this
    one's is known to others now.
    """

    fence: Fence
    assignment: Assignment
    able: tuple[int, ...]


class StopGroup(msgspec.Struct, frozen=True):
    """SIGTERM to each worker still alive, SIGKILL to all that is left after `grace_s`.

    Obligation: `GroupGone` follows once no process of the group is left. May come again with
    a shorter grace, which then holds.
    """

    fence: Fence
    grace_s: float
    reason: str


class Decline(msgspec.Struct, frozen=True):
    """Do not start the workers of this fence; others may wait for them at the port on offer.

    Obligation: another port is held, and `GroupGone` follows with it.
    """

    fence: Fence


class MarkGroup(msgspec.Struct, frozen=True):
    """Begin a drain: gate the workers that ask should_checkpoint(), and count their calls.

    Obligation: `GroupMarked` follows. May come again for gated workers (a new coordinator goes on
    with the drain), and is answered each time.
    """

    fence: Fence


class AimGroup(msgspec.Struct, frozen=True):
    """Set the call at which should_checkpoint() is true; SIGTERM to others that catch it.

    Obligation: `GroupDrained` follows, once every worker has checkpointed, exited, or is one
    that cannot be asked. Workers that recover in place checkpoint where it `stops` them all, and
    wait there where it does not; it may come again for those, with `stops`.
    """

    fence: Fence
    calls: int | None
    stops: bool = False


class Exit(msgspec.Struct, frozen=True):
    """End the agent with this exit code; `outcome` is there where the job has ended."""

    code: int
    reason: str
    outcome: Outcome | None = None


RendezvousEffect = Persist | Send | Hangup | Tell | Finished
GroupEffect = StopGroup | MarkGroup | AimGroup | StartWorkers | InterruptGroup | RegroupWorkers
AgentEffect = Transmit | StartGroup | Decline | GroupEffect | Tell | Exit
