"""What the shells tell core: the inputs of the rendezvous and of the agent."""

from __future__ import annotations

import msgspec

from elastane.protocol.messages import ToAgent, ToCoordinator
from elastane.protocol.model import Failure, Fence, PortOffer
from elastane.protocol.sharding import Sharding


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message from an authenticated session.

    `peer_host` is the address the peer has for the coordinator, `local_host` the one it
    reached the coordinator under.
    """

    session: int
    message: ToCoordinator
    peer_host: str = ""
    local_host: str = ""


class Broken(msgspec.Struct, frozen=True):
    """A session ended from the other side.

    `clean`: the peer's kernel closed it in order (end of file), as it does when a process dies.
    A reset, a timeout or an unreachable host is not clean: the agent may well live.
    """

    session: int
    reason: str
    clean: bool = True


class AuthorityChanged(msgspec.Struct, frozen=True):
    """The store backs this coordinator's decisions, or does so no longer."""

    held: bool
    reason: str


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """The job's owner says how many nodes it may have; to be said to each coordinator anew."""

    min_nodes: int
    max_nodes: int


class Fenced(msgspec.Struct, frozen=True):
    """The job's owner has given these agents up, and replaced them or will; all of them each time.

    Each is an incarnation, or what one begins with, up to a dot: a pod, of whichever agent in it.
    Of the `dead` the owner knows that all their processes have ended, workers too.
    """

    incarnations: tuple[str, ...]
    dead: tuple[str, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; comes at the latest at the machine's own `wake_s`."""


RendezvousEvent = Received | Broken | AuthorityChanged | Resized | Fenced | Tick


class Linked(msgspec.Struct, frozen=True):
    """The agent has a session with a coordinator, and may send.

    `offer` is a new one: a coordinator may have told the last to others in an assignment that was
    lost on its way here, and their workers may wait there.
    """

    offer: PortOffer | None = None


class Unlinked(msgspec.Struct, frozen=True):
    """The session ended, or none could be had."""

    reason: str


class MessageReceived(msgspec.Struct, frozen=True):
    """A message from the coordinator."""

    message: ToAgent


class Warm(msgspec.Struct, frozen=True):
    """Workers can now start quickly."""


class GroupStarted(msgspec.Struct, frozen=True):
    """All workers of the group have a process."""

    fence: Fence
    pids: tuple[int, ...]


class WorkerSucceeded(msgspec.Struct, frozen=True):
    """A worker exited with 0."""

    fence: Fence
    local_rank: int


class WorkerFailed(msgspec.Struct, frozen=True):
    """A worker ended otherwise, or could not be started; `ended_s` is on the clock of `handle`.

    It may wait until it is handled, each event for another time: ages would change their order.
    """

    fence: Fence
    failure: Failure
    ended_s: float


class GroupGone(msgspec.Struct, frozen=True):
    """No process of the group is left; and the offer for the next attempt."""

    fence: Fence
    offer: PortOffer


class GroupAble(msgspec.Struct, frozen=True):
    """These local workers can enter another world as they are; and the offer for it.

    `sharding`: of the state that they hold, where it is sharded.
    """

    fence: Fence
    workers: tuple[int, ...]
    offer: PortOffer
    sharding: Sharding | None = None


class WorkerLost(msgspec.Struct, frozen=True):
    """A worker that recovers in place has lost a peer in the world of `world`."""

    fence: Fence
    world: Fence
    reason: str


class ReplicaDiffered(msgspec.Struct, frozen=True):
    """A worker has found, after so many steps, that it held another state than most."""

    fence: Fence
    rank: int
    local_rank: int
    steps: int
    reason: str


class GroupMarked(msgspec.Struct, frozen=True):
    """Answer to MarkGroup."""

    fence: Fence
    calls: int | None


class GroupDrained(msgspec.Struct, frozen=True):
    """Answer to AimGroup, with its `stops`."""

    fence: Fence
    stops: bool = False


class Signalled(msgspec.Struct, frozen=True):
    """The agent itself got a signal that means: go."""

    name: str


AgentEvent = (
    Linked
    | Unlinked
    | MessageReceived
    | Warm
    | GroupStarted
    | WorkerSucceeded
    | WorkerFailed
    | GroupGone
    | GroupAble
    | WorkerLost
    | ReplicaDiffered
    | GroupMarked
    | GroupDrained
    | Signalled
    | Tick
)
