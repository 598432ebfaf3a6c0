"""The types of a job: nodes, worlds, assignments, failures, the durable record.

All are immutable values that travel over the wire or into a store, without clocks or connections.
Everything that outlives a process carries a `Fence`, so that an older one is recognised.

`Sharding` says which part of a sharded state a node holds. A replica consists of the workers of one
node, or of several. With several, each node holds one slice of it for as long as its workers live.
A world consists of whole replicas, except right after a loss. Then all survivors first form a world
that brings them to the same step, since some may be a step ahead. Surplus nodes leave afterwards
(`coordinator.rules.sizing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated

import msgspec

from elastane.protocol.limits import (
    ADDRESSES_MAX,
    COUNT_MAX,
    FAILURE_TEXT_CHARS_MAX,
    LOCAL_WORLD_SIZE_MAX,
    NAME_CHARS_MAX,
    WHERE_CHARS_MAX,
    Timing,
)
from elastane.protocol.ring import CALLERS_MAX, WorkerCalls

# Bounds that the wire checks while decoding; a NaN is in no range. Names may be somewhat too long
# here, so that admission can refuse them in words.
Name = Annotated[str, msgspec.Meta(max_length=4 * NAME_CHARS_MAX)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
LocalSize = Annotated[int, msgspec.Meta(ge=1, le=LOCAL_WORLD_SIZE_MAX)]
LocalRank = Annotated[int, msgspec.Meta(ge=0, le=LOCAL_WORLD_SIZE_MAX - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
# Twice as long as the text that an agent sends. An outcome repeats some texts and still fits into a
# frame.
Text = Annotated[str, msgspec.Meta(max_length=2 * FAILURE_TEXT_CHARS_MAX)]
# The rank of a worker that has no place in a world yet.
NO_RANK = -1
NO_SLICE = -1


class Fence(msgspec.Struct, frozen=True, order=True):
    """The fencing token: the number of a membership, and of the start of workers in it."""

    round: Count
    attempt: Count

    def __str__(self) -> str:
        return f"round {self.round} attempt {self.attempt}"


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that must be equal on all nodes of a job; an empty string means not installed."""

    elastane: str
    python: str
    torch: str = ""
    accelerator: str = ""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification that must be equal for all agents of a job."""

    job: Name
    min_nodes: int
    max_nodes: int
    max_restarts: int
    # All workers of all nodes are alike (TORCH_ELASTIC_WORKER_IDENTICAL=1 in torchrun).
    identical_workers: bool = False
    # Each node has the rank of its flags, 0 by default, and no other (the static backend).
    static: bool = False
    # The least number of workers that continues after a fault, if they recover in place; 0: the
    # number that `min_nodes` whole nodes have.
    min_workers: Count = 0
    # Workers of an unmodified script keep running when others are lost (--in-place).
    in_place: bool = False
    timing: Timing = Timing()

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes

    def sized_as(self, other: JobSpec) -> JobSpec:
        """Return this job with the range of nodes that `other` has."""
        return msgspec.structs.replace(self, min_nodes=other.min_nodes, max_nodes=other.max_nodes)


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One agent, as it presents itself.

    `node_id` is stable over restarts of the agent; `incarnation` is new with each process.
    `node_rank` is a request (an order, for the static backend). `local_addr` is the user's
    --local-addr; if empty, the address is taken from the connection. `topology` is the node's place
    in the network, from the largest part to the smallest, such as zone/rack/host; it may be empty.
    `addresses` are those of its network cards.
    """

    node_id: Name
    incarnation: Name
    local_world_size: LocalSize
    role: Name = "default"
    node_rank: int | None = None
    local_addr: Name = ""
    topology: Name = ""
    addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    versions: Versions


class PortOffer(msgspec.Struct, frozen=True):
    """A node's address for the process-group store of the next attempt, as node rank 0.

    The agent holds the port from before it is offered, and each attempt gets a new one.
    `agent_store`: the agent's side serves the store and all workers are clients (the meaning of
    TORCHELASTIC_USE_AGENT_STORE); otherwise the worker of rank 0 binds it.
    """

    port: Port
    agent_store: bool


class WorldMember(msgspec.Struct, frozen=True, kw_only=True):
    """One node's place in a world.

    `workers` are the local ranks that take part, in the order of their ranks; empty means all of
    `local_world_size`. Only worlds of workers that recover in place leave some out.
    """

    node_id: str
    incarnation: str
    local_world_size: int
    role: str
    workers: tuple[LocalRank, ...] = ()
    topology: Name = ""

    @property
    def size(self) -> int:
        """Number of its workers in the world."""
        return len(self.workers) or self.local_world_size

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The local ranks of its workers in the world, in the order of their ranks."""
        return self.workers or tuple(range(self.local_world_size))


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable record of one round and attempt: its members in the order of node rank."""

    fence: Fence
    members: tuple[WorldMember, ...]

    @property
    def world_size(self) -> int:
        """Number of workers of all nodes."""
        return sum(member.size for member in self.members)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a world that one agent runs: its place, and totals, never all members.

    So the bytes per node of a membership change do not grow with the job. `workers` are the local
    ranks that take part, as in WorldMember. `in_place`: for workers that keep their processes.
    `waiting`: the workers start without a place, so that they are ready for a later world; the
    ranks are placeholders.
    """

    fence: Fence
    node_rank: Count
    nodes: Count
    rank_base: Count
    world_size: Count
    role_rank_base: Count
    role_world_size: Count
    master_addr: str
    master_port: int
    agent_store: bool
    restarts_used: int
    max_restarts: int
    reason: str
    workers: tuple[LocalRank, ...] = ()
    in_place: bool = False
    waiting: bool = False

    def index_of(self, local_rank: int) -> int:
        """Return the position of a worker of this node among those that take part."""
        return self.workers.index(local_rank) if self.workers else local_rank


class WaitPoint(msgspec.Struct, frozen=True):
    """The place at which a worker waits for others: a collective or a call, and the user's line."""

    rank: Count
    where: Annotated[str, msgspec.Meta(max_length=WHERE_CHARS_MAX)]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one worker that failed.

    `age_s` is how long ago the worker ended when the report was sent, by the sender's monotonic
    clock: clocks of two hosts are never compared. `exit_code` is negative for a signal, as in
    subprocess. `message` is the content of the worker's error file. Without one it is the last
    output of the worker, which need not explain its end, and `output` is true. `evidence` has
    further facts of the agent, such as the sender of a SIGKILL.

    `rank` is NO_RANK for a worker without a place in a world. `stopped`: the worker failed by an
    error of its own and was stopped while it was ending; `exit_code` is that of the stop. `steps`
    counts the steps that the worker had reported; a script that reports none has 0. `measured`
    counts those that were measured in it. `met`: the round of the last world in which it met the
    others; 0 if that does not show. `calls`: its last collectives if it lost a peer; those of
    all workers of the node if it received too much.

    An end with `exit_code` 0 is a failure too, if a program returned on one rank while the others
    still trained: the other failures follow from it. `lives`: the worker had not failed; the others
    did because they waited for it, or because it called another collective than they.
    """

    local_rank: int
    rank: int
    pid: int
    exit_code: int
    age_s: Seconds = 0.0
    message: Text = ""
    error_file: Text = ""
    log_file: Text = ""
    evidence: Text = ""
    output: bool = False
    stopped: bool = False
    lives: bool = False
    steps: Count = 0
    measured: Count = 0
    met: Count = 0
    calls: Annotated[tuple[WorkerCalls, ...], msgspec.Meta(max_length=CALLERS_MAX)] = ()


class NamedWorker(msgspec.Struct, frozen=True):
    """A worker's process, by its node, its rank, its rank on the node, and its pid there."""

    node_id: str
    rank: int
    local_rank: int
    pid: int


class FailedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A failure with its node, in an outcome; its age is counted at the job's end."""

    node_id: str
    failure: Failure


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The root cause of an incident, found over all nodes.

    `failure` is the worker that is the cause, on the node `node_id`. `alike` counts the other
    failures by the same error, `consequences` the failures that followed. `is_mismatch`: ranks
    called different collectives; the worker is then the first that differs from most.
    """

    kind: str  # "worker" | "timeout" | "request" | "configuration"
    what: str
    node_id: str = ""
    fence: Fence | None = None
    failure: Failure | None = None
    consequences: int = 0
    alike: int = 0
    is_mismatch: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, as every agent receives it. `failures` are in the order of time, bounded.

    `before`: the incident before the last one, if the last world had begun right before its end.
    """

    ok: bool
    reason: str
    slug: str = ""
    exit_code: int = 0
    cause: Cause | None = None
    next_step: str = ""
    failures: tuple[FailedWorker, ...] = ()
    fence: Fence | None = None  # of the last world, if one ended with the job
    before: Text = ""
    restarts_used: int = 0  # of the job's budget


class CheckpointUse(msgspec.Struct, frozen=True):
    """Whether workers read a checkpoint before their first step, and whether they wrote one.

    Unless it is known, both may be so.
    """

    read: bool = True
    written: bool = True

    def merge(self, other: CheckpointUse) -> CheckpointUse:
        """Return the use by the workers of both."""
        return CheckpointUse(self.read or other.read, self.written or other.written)


UNUSED = CheckpointUse(read=False, written=False)


class Crash(msgspec.Struct, frozen=True):
    """An error of the script itself, and the nodes on which it ended an attempt; empty: on any.

    `sites`: the error and its place, as each worker told them. An error's text may name the rank.
    `steps`: how many steps the attempt had made, as far as they show. `met`: the round of the last
    world in which the worker met the others; 0: in none since all workers started.
    """

    sites: tuple[str, ...]
    nodes: tuple[str, ...]
    steps: Count = 0
    use: CheckpointUse = UNUSED
    met: Count = 0

    def repeats(self, last: Crash | None) -> Crash | None:
        """Return this crash, with the sites of both, if it is the same as the last one.

        It is another one if its attempt may have continued from a checkpoint of the last attempt.
        """
        if last is None or (last.use.written and self.use.read):
            return None
        sites = tuple(site for site in self.sites if site in last.sites)
        is_there = self.nodes == last.nodes or not (self.nodes and last.nodes)
        is_same = sites and is_there and self.steps == last.steps
        return msgspec.structs.replace(self, sites=sites) if is_same else None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The durable state of a job; written before anything that depends on it is sent.

    `world` is the last world committed, whether or not it still runs. `outcome` is set once, at the
    end.
    """

    spec: JobSpec
    versions: Versions | None = None
    world: World | None = None
    restarts_used: int = 0
    outcome: Outcome | None = None
    # The range of nodes was changed and is no longer that of the command line.
    resized: bool = False
    # Displaced nodes, in the order of their ranks: they hold the state that `world` begins with.
    # They are named until `world` is known to make steps.
    kept: tuple[str, ...] = ()
    # All nodes were released and no worker of `world` is left: a new coordinator waits for none.
    over: bool = False
    # The world of the last incident that was charged: a new coordinator charges it no second time.
    charged: Fence | None = None
    # The current run of quick failures, and of attempts that ended with the same crash.
    quick_failures: int = 0
    crash: Crash | None = None
    crashes: int = 0
    # Since all workers of `world` started, a worker or a node was lost; and the last change of the
    # world was charged, or cost nothing.
    lost: bool = False
    settled: bool = False


class Joining(IntEnum):
    """When new workers can join a world in place; a world has the least of its workers' values."""

    NEVER = 0  # no worker can join: the script is unmodified
    PLANNED = 1  # by a planned change, at a boundary of the script that all members reach
    ANYTIME = 2  # also in the middle of a recovery: the workers use `elastane.init`


class Sharding(msgspec.Struct, frozen=True):
    """The sharded state that one node's workers hold; they enter a world together or not at all.

    `sole`: some hold a part that no other worker of their world holds. `span`: nodes per replica.
    `part`: which slice of it they hold, from 0. `level`: a world with a partial replica that makes
    no steps and whose members are all at the same step.
    """

    sole: bool = False
    span: Annotated[int, msgspec.Meta(ge=1, lt=COUNT_MAX)] = 1
    part: Annotated[int, msgspec.Meta(ge=NO_SLICE, lt=COUNT_MAX)] = NO_SLICE
    level: Fence | None = None


def merge_shardings(said: Iterable[Sharding]) -> Sharding | None:
    """Return the sharding of a node from that of its workers; None if their state is not sharded.

    Workers that joined have no slice yet, and take that of the others.
    """
    each = [*said]
    if not each:
        return None
    parts = {one.part for one in each} - {NO_SLICE}
    levels = {one.level for one in each}
    return Sharding(
        sole=any(one.sole for one in each),
        span=max(one.span for one in each),
        part=parts.pop() if len(parts) == 1 else NO_SLICE,
        level=levels.pop() if len(levels) == 1 else None,
    )


def whole_replicas(parts: Sequence[int], span: int, most: int) -> list[int]:
    """Return the nodes that make as many whole replicas as possible, at most `most` nodes.

    `parts` has the slice of each node. Earlier nodes are preferred; a node without a slice takes
    any.
    """
    if span > len(parts):
        return []
    held: dict[int, list[int]] = {part: [] for part in range(span)}
    free: list[int] = []
    for number, part in enumerate(parts):
        held.get(part, free).append(number)
    count = min(most, len(parts)) // span
    while sum(max(0, count - len(each)) for each in held.values()) > len(free):
        count -= 1
    chosen = [number for each in held.values() for number in each[:count]]
    return sorted(chosen + free[: count * span - len(chosen)])


def world_bounds(min_nodes: int, max_nodes: int, span: int) -> tuple[int, int]:
    """Return the least and the greatest number of nodes of a world, in whole replicas.

    It is at least one replica. The maximum prevails if no such number is within the range.
    """
    most = max(1, max_nodes // span) * span
    return min(-(-min_nodes // span) * span, most), most
