"""The events that shells deliver to the rules of the coordinator and of the agent."""

from __future__ import annotations

import msgspec

from elastane.protocol.culprits import StandstillEvidence
from elastane.protocol.messages import ProbeResult, ToAgent, ToCoordinator
from elastane.protocol.model import (
    CheckpointUse,
    Failure,
    Fence,
    Joining,
    PortOffer,
    Sharding,
)
from elastane.protocol.pauses import Pause
from elastane.protocol.ring import WorkerCalls
from elastane.protocol.verdicts import Verdict


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message from an authenticated session.

    `peer_host` is the peer's address as the coordinator sees it; `local_host` is the address under
    which the peer reached the coordinator.
    """

    session: int
    message: ToCoordinator
    peer_host: str = ""
    local_host: str = ""


class Broken(msgspec.Struct, frozen=True):
    """The peer ended a session.

    `clean`: the peer's kernel closed the connection in order (end of file), as it does when a
    process dies. After a reset, a timeout or an unreachable host the agent may still be alive.
    """

    session: int
    reason: str
    clean: bool = True


class AuthorityChanged(msgspec.Struct, frozen=True):
    """This coordinator has the authority to decide, by its lease on the store, or has lost it."""

    held: bool
    reason: str


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """The job's owner has set the range of nodes. Each new coordinator gets this event again."""

    min_nodes: int
    max_nodes: int


class Fenced(msgspec.Struct, frozen=True):
    """The agents that the job's owner has given up; the whole list each time.

    An entry is the incarnation of one agent, or its part before the dot, which names a pod and
    covers every agent in it. All processes of `dead` agents have ended, workers included.
    """

    incarnations: tuple[str, ...]
    dead: tuple[str, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. The shell delivers this event at the machine's `wake_s` at the latest."""


RendezvousEvent = Received | Broken | AuthorityChanged | Resized | Fenced | Tick


class Linked(msgspec.Struct, frozen=True):
    """The agent has a session with a coordinator, and may send.

    `offer` is a new port. A coordinator may have assigned the last one to other nodes while this
    node's assignment was lost on its way, and their workers may wait at that port.
    """

    offer: PortOffer | None = None


class Unlinked(msgspec.Struct, frozen=True):
    """The session ended, or none could be opened."""

    reason: str


class MessageReceived(msgspec.Struct, frozen=True):
    """A message from the coordinator."""

    message: ToAgent


class AddressesTried(msgspec.Struct, frozen=True):
    """What the connections of one `TryAddresses` found."""

    results: tuple[ProbeResult, ...]


class Warm(msgspec.Struct, frozen=True):
    """Workers can now start quickly."""


class GroupStarted(msgspec.Struct, frozen=True):
    """All workers of the group have a process."""

    fence: Fence
    pids: tuple[int, ...]


class GroupTraining(msgspec.Struct, frozen=True):
    """All members of the group have made their first step in `world`.

    `built_s`: when all of them had built the process group. `healed_s`: when all held the state.
    Both are on the clock of `handle`, and None for a script that does not use the job's steps.
    """

    fence: Fence
    world: Fence
    trained_s: float
    built_s: float | None = None
    healed_s: float | None = None


class WorkerSucceeded(msgspec.Struct, frozen=True):
    """A worker exited with 0, or by a signal after the script had succeeded on all workers.

    `steps` that it had shown by then; `ended_s` is on the clock of `handle`, None: just now.
    """

    fence: Fence
    local_rank: int
    exit_code: int = 0
    steps: int = 0
    pid: int = 0
    log_file: str = ""
    ended_s: float | None = None


class WorkerFailed(msgspec.Struct, frozen=True):
    """A worker failed, or could not be started; `ended_s` is on the clock of `handle`.

    It is a time and no age: events are handled at different delays, which would change their order.
    """

    fence: Fence
    failure: Failure
    ended_s: float


class GroupGone(msgspec.Struct, frozen=True):
    """No process of the group is left; `offer` is for the next attempt.

    `calls`: the last collectives of the workers that had a place in the world.
    """

    fence: Fence
    offer: PortOffer
    use: CheckpointUse = CheckpointUse()
    calls: tuple[WorkerCalls, ...] = ()


class GroupAble(msgspec.Struct, frozen=True):
    """These local workers can enter another world as they are; `offer` is for that world.

    `sharding` describes the state that they hold, if it is sharded. `joining`: when new workers can
    join their world.
    """

    fence: Fence
    workers: tuple[int, ...]
    offer: PortOffer
    sharding: Sharding | None = None
    joining: Joining = Joining.ANYTIME


class GroupWroteCheckpoint(msgspec.Struct, frozen=True):
    """A worker has reported that the script wrote a whole checkpoint, and where.

    `resumed`: the worker has itself read a checkpoint since it was started.
    """

    fence: Fence
    where: str = ""
    resumed: bool = False


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker that recovers in place has lost a peer in the world of `world`."""

    fence: Fence
    world: Fence
    reason: str


class ReplicaDiffered(msgspec.Struct, frozen=True):
    """A worker found, after `steps` steps, that its state differs from that of the majority."""

    fence: Fence
    rank: int
    local_rank: int
    steps: int
    reason: str


class CulpritFound(msgspec.Struct, frozen=True):
    """The local workers wait for one of them, and have made no collective for `still_s`."""

    fence: Fence
    verdict: Verdict
    still_s: float


class WorkerStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a worker for which others wait, from outside, as `source` printed them."""

    fence: Fence
    rank: int
    local_rank: int
    pid: int
    source: str
    text: str


class GroupPaused(msgspec.Struct, frozen=True):
    """Rank 0, which is here, has saved, evaluated or restored for `seconds`, until `ended_s`.

    `ended_s` is on the clock of `handle`.
    """

    fence: Fence
    pause: Pause
    seconds: float
    ended_s: float


class GroupStandstill(msgspec.Struct, frozen=True):
    """The local workers have made no collective in `world` for `still_s`.

    Empty `evidence`: they make collectives again. `early`: it serves to find a mismatch alone.
    """

    fence: Fence
    world: Fence
    evidence: tuple[StandstillEvidence, ...]
    still_s: float
    early: bool = False


class GroupCalls(msgspec.Struct, frozen=True):
    """Answer to InterruptGroup: the last collectives of the local workers in `world`."""

    fence: Fence
    world: Fence
    calls: tuple[WorkerCalls, ...]


class GroupMarked(msgspec.Struct, frozen=True):
    """Answer to MarkGroup, with its `drain`."""

    fence: Fence
    drain: int
    calls: int | None


class GroupDrained(msgspec.Struct, frozen=True):
    """Answer to AimGroup, with its `drain` and `stops`."""

    fence: Fence
    drain: int
    stops: bool = False


class Signalled(msgspec.Struct, frozen=True):
    """The agent received a signal that asks it to leave.

    `may_repeat`: a scheduler may send the signal twice, so a second one does not mean to hurry.
    """

    name: str
    may_repeat: bool = False


class Notice(msgspec.Struct, frozen=True):
    """A cloud, a scheduler or a health check said what is about to happen to this node.

    `drains`: the node is about to stop, so its agent leaves; otherwise the notice is only logged.
    `within_s`: how long the node has, from the time when the notice was read; None: unknown.
    `unfit`: the node leaves because it cannot do its work, so it should not come back.
    """

    source: str
    reason: str
    drains: bool = True
    within_s: float | None = None
    unfit: bool = False


AgentEvent = (
    Linked
    | Unlinked
    | MessageReceived
    | AddressesTried
    | Warm
    | GroupStarted
    | GroupTraining
    | WorkerSucceeded
    | WorkerFailed
    | GroupGone
    | GroupAble
    | GroupWroteCheckpoint
    | WorkerLost
    | ReplicaDiffered
    | CulpritFound
    | WorkerStacks
    | GroupPaused
    | GroupStandstill
    | GroupCalls
    | GroupMarked
    | GroupDrained
    | Signalled
    | Notice
    | Tick
)
