"""The effects that rules request of their shells, to be performed in the order of the list.

The rules of the coordinator return `Persist`, `Send`, `Hangup`, `WriteEvent` and `Finished`. The
rules of an agent return `Transmit`, `StartGroup`, `Decline`, `TryAddresses`, `WriteEvent`, `Exit`,
and the effects on a running group. A group is named by the fence that it was started with, whatever
world its workers enter later; a drain is named by the fence of its world.
"""

from __future__ import annotations

import msgspec

from elastane.protocol.log_events import LogEvent
from elastane.protocol.messages import Probe, ToAgent, ToCoordinator
from elastane.protocol.model import Assignment, Fence, JobRecord, Outcome


class WriteEvent(msgspec.Struct, frozen=True):
    """Write this event to the log. Obligation: none; its loss does no harm."""

    event: LogEvent


class Persist(msgspec.Struct, frozen=True):
    """Make this record durable.

    Obligation: it is durable before any later effect of the same list is performed. If authority is
    lost, none of the later effects may be performed, and the coordinator ends.
    """

    record: JobRecord


class Send(msgspec.Struct, frozen=True):
    """Send a message to one session, in order; it is dropped if the session has ended."""

    session: int
    message: ToAgent


class Hangup(msgspec.Struct, frozen=True):
    """Close a session after the messages sent to it; no `Broken` follows."""

    session: int
    reason: str


class Finished(msgspec.Struct, frozen=True):
    """The job has ended, and every agent has left or had CLOSE_S to learn of the end."""

    outcome: Outcome


class Transmit(msgspec.Struct, frozen=True):
    """Send to the coordinator. Without a session it is dropped, since the rules send it again."""

    message: ToCoordinator


class StartGroup(msgspec.Struct, frozen=True):
    """Start the local worker group of this assignment."""

    assignment: Assignment


class StartWorkers(msgspec.Struct, frozen=True):
    """Start these workers of a group again after `delay_s`; they wait for a place in a world."""

    fence: Fence
    local_ranks: tuple[int, ...]
    assignment: Assignment
    delay_s: float


class InterruptGroup(msgspec.Struct, frozen=True):
    """Interrupt the current step of workers that recover in place; they wait for a world.

    `asks_calls`: feed `GroupCalls` back, read before the workers hear of it.
    """

    fence: Fence
    reason: str
    asks_calls: bool = False


class RegroupWorkers(msgspec.Struct, frozen=True):
    """Give workers of the group that began with `fence` their place in another world.

    Only the local ranks in `able` get a place. The others are reported as failed, even if a
    replacement is ready by now. Obligation: `GroupAble` follows with another port, since other
    nodes know the present one.
    """

    fence: Fence
    assignment: Assignment
    able: tuple[int, ...]


class StopGroup(msgspec.Struct, frozen=True):
    """Send SIGTERM to each live worker, and SIGKILL to all that are left after `grace_s`.

    Obligation: `GroupGone` follows once no process of the group is left. A repeated effect with a
    shorter grace replaces the grace.
    """

    fence: Fence
    grace_s: float
    reason: str


class Decline(msgspec.Struct, frozen=True):
    """Do not start the workers of this fence; other workers may wait for them at the offered port.

    Obligation: the shell opens another port, and `GroupGone` follows with it.
    """

    fence: Fence


class TryAddresses(msgspec.Struct, frozen=True):
    """Connect to each of these addresses, beside all other work.

    Obligation: `AddressesTried` follows within PROBE_TIMEOUT_S, and nothing is sent to the peer.
    """

    probes: tuple[Probe, ...]


class MarkGroup(msgspec.Struct, frozen=True):
    """Begin a drain: gate the workers that call should_checkpoint(), and count their calls.

    Obligation: `GroupMarked` follows. A new coordinator may repeat it for gated workers, and gets
    an answer each time.
    """

    fence: Fence
    drain: int


class AimGroup(msgspec.Struct, frozen=True):
    """Set the call at which should_checkpoint() is true; SIGTERM to other workers that catch it.

    Obligation: `GroupDrained` follows once every worker has checkpointed, exited, or cannot be
    asked. With `stops`, workers that recover in place checkpoint at that call; otherwise they wait
    there. The effect may be repeated with `stops` for workers that wait.
    """

    fence: Fence
    drain: int
    calls: int | None
    stops: bool = False


class ReleaseGroup(msgspec.Struct, frozen=True):
    """Open the gates of a drain that was called off; its workers continue. No answer follows."""

    fence: Fence


class EndGroupWorker(msgspec.Struct, frozen=True):
    """End the worker of this rank, which hangs. If it runs on this node, its failure follows."""

    fence: Fence
    rank: int
    reason: str


class ShowGroupStacks(msgspec.Struct, frozen=True):
    """Read the stacks of the workers of these ranks that run on this node."""

    fence: Fence
    ranks: tuple[int, ...]


class Exit(msgspec.Struct, frozen=True):
    """End the agent with this exit code; `outcome` is set if the job has ended.

    `out_by_s`: by when the agent has to have ended, on its monotonic clock; None: no deadline.
    """

    code: int
    reason: str
    outcome: Outcome | None = None
    out_by_s: float | None = None


RendezvousEffect = Persist | Send | Hangup | WriteEvent | Finished
# Effects on workers in their current world; the others are on the group since its start.
WorldEffect = MarkGroup | AimGroup | ReleaseGroup | EndGroupWorker | ShowGroupStacks
GroupEffect = StopGroup | StartWorkers | InterruptGroup | RegroupWorkers | WorldEffect
AgentEffect = Transmit | StartGroup | Decline | TryAddresses | GroupEffect | WriteEvent | Exit
