"""The messages between agent and coordinator, each a small immutable value with a tag.

`ToCoordinator` and `ToAgent` are the two closed sets; `protocol.wire` encodes them. A message about
a worker group names its fence, so a late one is recognised.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from elastane.protocol.culprits import EVIDENCE_MAX, STACKS_MAX, StandstillEvidence
from elastane.protocol.limits import (
    COUNT_MAX,
    FAILURES_MAX,
    PROBES_MAX,
    UNANSWERED_MAX,
    WAITING_MAX,
)
from elastane.protocol.model import (
    Assignment,
    CheckpointUse,
    Count,
    Failure,
    Fence,
    JobSpec,
    Joining,
    LocalRank,
    NodeSpec,
    Outcome,
    Port,
    PortOffer,
    Seconds,
    Sharding,
    Text,
    WaitPoint,
)
from elastane.protocol.ring import CALLERS_MAX, Short, WorkerCalls
from elastane.protocol.stragglers import PACES_MAX, Pace

GroupState = Literal["running", "succeeded", "failed", "stopping"]
# A drain's target is one more than the furthest count, and has to fit the wire too.
Calls = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]
# The number of a drain in its world, from 1; the next one has to fit the wire too.
DrainNumber = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]


def _check_count(failures: tuple[Failure, ...]) -> None:
    if len(failures) > FAILURES_MAX:
        raise ValueError(f"{len(failures)} failures in a report of at most {FAILURES_MAX}")


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that an agent holds when it registers, or registers again."""

    assignment: Assignment
    state: GroupState
    failures: tuple[Failure, ...] = ()
    # The workers were asked to checkpoint and wait for the end of the drain.
    draining: bool = False
    last_drain: DrainNumber = 0  # the last drain of this world, also if it was called off
    able: tuple[LocalRank, ...] = ()
    in_place: bool = False  # the workers recover in place, also those that finished their steps
    joining: Joining = Joining.ANYTIME  # when new workers can join the world of these workers
    sharding: Sharding | None = None  # how the state of these workers is sharded
    # Why the workers make no step in their world and wait for another one.
    halted: Text = ""
    renewed: tuple[LocalRank, ...] = ()  # failed ones whose replacements were already charged

    def __post_init__(self) -> None:
        _check_count(self.failures)


class Join(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """An agent's first message in every session, with the workers that it still holds.

    `ready` is False while its workers cannot start quickly (the zygote still imports). `welcomed`:
    a coordinator of this job admitted it before. `seen` is the highest fence that it was ever
    assigned, with the restarts used by then. A coordinator without a record of the job continues
    from the highest fence that the agents report.
    """

    spec: JobSpec
    node: NodeSpec
    offer: PortOffer
    holding: Holding | None = None
    ready: bool = True
    welcomed: bool = False
    seen: Fence | None = None
    restarts_seen: Count = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Workers can now start quickly; sent once, by an agent that joined unready."""


class StateCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the training state of `step`, whose save began `age_s` ago.

    A copy in memory was complete `took_s` after that; a checkpoint took `took_s` to write.
    `every_s` is the usual time between two copies; None while there was only one.
    """

    step: Count
    age_s: Seconds
    took_s: Seconds
    every_s: Seconds | None = None


class NodeCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The newest copies of the state of a node's workers; None if no copy is known.

    `memory` is in the node's snapshot server, `replica` in that of another node, `storage` is
    durable. `replicated`: each is the whole state, not this node's part of it.
    """

    memory: StateCopy | None = None
    replica: StateCopy | None = None
    storage: StateCopy | None = None
    replicated: bool = True


class Probe(msgspec.Struct, frozen=True):
    """An address of another node to which an agent tries to connect, since its workers could not.

    `number` is that of the question, so that an answer to an older one is recognised.
    """

    address: Short
    port: Port
    number: Count


class ProbeResult(msgspec.Struct, frozen=True):
    """What an agent found: whether the host at that address answers, be it by a refusal."""

    probe: Probe
    answers: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", kw_only=True):
    """The agent lives. `progress` is the least step count of its workers that report one.

    `met`: the round of the last world in which all its workers met the others and had the state; 0:
    none. `waiting`: where the workers are, once all have waited for others without progress for a
    while. `all_wait`: they have waited for so long that the wait does not end by itself. `paces`:
    the times of the workers' last steps, where known. `unanswered`: addresses that do not answer
    the workers' connections. `copies`: the newest copies of their state. `probed`: what the last
    probes found that the coordinator has asked for.
    """

    fence: Fence | None = None
    progress: Count | None = None
    met: Count = 0
    waiting: tuple[WaitPoint, ...] = ()
    all_wait: bool = False
    paces: tuple[Pace, ...] = ()
    unanswered: Annotated[tuple[Short, ...], msgspec.Meta(max_length=UNANSWERED_MAX)] = ()
    copies: NodeCopies | None = None
    probed: Annotated[tuple[ProbeResult, ...], msgspec.Meta(max_length=PROBES_MAX)] = ()

    def __post_init__(self) -> None:
        if len(self.waiting) > WAITING_MAX:
            raise ValueError(f"{len(self.waiting)} waiting workers, of at most {WAITING_MAX}")
        if len(self.paces) > PACES_MAX:
            raise ValueError(f"{len(self.paces)} paces, of at most {PACES_MAX}")


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """Workers of `fence` failed. Sent at the first failure, and again after each further one."""

    fence: Fence
    failures: tuple[Failure, ...]

    def __post_init__(self) -> None:
        _check_count(self.failures)


class Returned(msgspec.Struct, frozen=True, tag="returned", kw_only=True):
    """The program of a worker with a place in `fence` has returned: its exit code is 0.

    It is the cause of later failures if others still trained with that worker.
    """

    fence: Fence
    end: Failure


class Succeeded(msgspec.Struct, frozen=True, tag="succeeded"):
    """All local workers of `fence` exited with 0, after that many steps if all have shown some."""

    fence: Fence
    steps: int | None = None


class Marked(msgspec.Struct, frozen=True, tag="marked", kw_only=True):
    """Answer to `Drain`: how often the furthest local worker has called should_checkpoint().

    None: no local worker calls it.
    """

    fence: Fence
    drain: DrainNumber
    calls: Calls | None


class Drained(msgspec.Struct, frozen=True, tag="drained", kw_only=True):
    """All local workers have checkpointed, or cannot be asked to checkpoint."""

    fence: Fence
    drain: DrainNumber


class Able(msgspec.Struct, frozen=True, tag="able", kw_only=True):
    """These local workers can enter another world as they are, also those of the current one.

    The list is complete each time. `fence` is that of the last world assigned to the agent, and
    `offer` is where the process-group store of the next one would be. `joining`: when new workers
    can join their world.
    """

    workers: tuple[LocalRank, ...]
    offer: PortOffer
    fence: Fence | None = None
    sharding: Sharding | None = None
    joining: Joining = Joining.ANYTIME


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    """A worker of `fence` reports that the script has just written a whole checkpoint.

    `where`: the last file or folder of the checkpoint, for people. `resumed`: the worker has itself
    read a checkpoint since it was started.
    """

    fence: Fence
    where: Text = ""
    resumed: bool = False


class Lost(msgspec.Struct, frozen=True, tag="lost", kw_only=True):
    """A worker of `fence` that recovers in place lost a peer in the middle of a step."""

    fence: Fence
    reason: Text


class AwaitedWorker(msgspec.Struct, frozen=True, tag="awaited", kw_only=True):
    """A worker of `fence` that the others wait for, as its own agent found; `sentence` says why."""

    fence: Fence
    sentence: Text


class StandstillReport(msgspec.Struct, frozen=True, tag="stands-still", kw_only=True):
    """The workers of `fence` have made no collective for `still_s`, longer than usual.

    `evidence`: one entry for each worker; empty once the workers make collectives again. `early`:
    only a mismatch of collectives is proved by it, since the wait may still end by itself.
    """

    fence: Fence
    still_s: Seconds = 0.0
    evidence: tuple[StandstillEvidence, ...] = ()
    early: bool = False

    def __post_init__(self) -> None:
        if len(self.evidence) > EVIDENCE_MAX:
            raise ValueError(f"{len(self.evidence)} evidence, of at most {EVIDENCE_MAX}")


class LastCalls(msgspec.Struct, frozen=True, tag="last-calls", kw_only=True):
    """The last collectives of the workers of `fence` on this node, read at their interruption."""

    fence: Fence
    calls: Annotated[tuple[WorkerCalls, ...], msgspec.Meta(max_length=CALLERS_MAX)] = ()


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """No process of `fence` is left on this node; `offer` is where the next store would be.

    `unasked`: the agent began to stop them before the coordinator asked it to. `use`: what its
    workers did with checkpoints. `calls`: their last collectives, if the coordinator asked for
    these.
    """

    fence: Fence
    offer: PortOffer
    unasked: bool = False
    use: CheckpointUse = CheckpointUse()
    calls: Annotated[tuple[WorkerCalls, ...], msgspec.Meta(max_length=CALLERS_MAX)] = ()


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """This agent was asked to leave (a signal, a preemption notice) and requests a drain.

    `within_s`: how long the node still runs; None: no deadline is known.
    """

    reason: str
    within_s: Seconds | None = None


class Conclude(msgspec.Struct, frozen=True, tag="conclude", kw_only=True):
    """The user of this agent ends the job for all nodes: no further world is formed."""

    ok: bool
    reason: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """`elastane status` requests a `Report`. The sender never becomes a node."""


ToCoordinator = (
    Join
    | Ready
    | Heartbeat
    | Failed
    | Returned
    | Succeeded
    | Marked
    | Drained
    | Able
    | Checkpointed
    | Lost
    | AwaitedWorker
    | LastCalls
    | StandstillReport
    | Stopped
    | Leave
    | Conclude
    | Query
)


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The agent is admitted; `phase` and `reason` say what the job waits for."""

    phase: str
    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The agent is refused for good."""

    what: str
    slug: str
    expected: str = ""
    next_step: str = ""


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    """A world is committed: start the workers of this assignment."""

    assignment: Assignment


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt", kw_only=True):
    """The world of `fence` has ended: its workers end their step, and wait for the next world.

    `asks_calls`: the agent answers with their last collectives (`LastCalls`).
    """

    fence: Fence
    reason: str
    asks_calls: bool = False


class Prepare(msgspec.Struct, frozen=True, tag="prepare", kw_only=True):
    """Start the missing local workers after `delay_s`, so that they are ready for a later world.

    `successors`: the new workers replace lost ones of a group. An agent without any worker starts
    none for that; it has reported that its workers were stopped.
    """

    assignment: Assignment
    delay_s: Seconds = 0.0
    successors: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain", kw_only=True):
    """A planned change comes: let the workers of `fence` checkpoint before it.

    `drain`: the number of this drain in the world of `fence`, from 1. A newer drain replaces an
    older one, which is called off.
    """

    fence: Fence
    drain: Count
    timeout_s: float
    reason: str


class DrainTarget(msgspec.Struct, frozen=True, tag="drain-target", kw_only=True):
    """should_checkpoint() is true at its call number `calls`, on every worker.

    `stops`: workers that recover in place checkpoint, too, since all workers will be stopped, or
    too few stay for a world. The coordinator repeats the message if `stops` becomes true later.
    """

    fence: Fence
    drain: Count
    calls: Count | None
    stops: bool = False


class CallOff(msgspec.Struct, frozen=True, tag="call-off", kw_only=True):
    """This drain of `fence` is called off: its workers continue from where they wait."""

    fence: Fence
    drain: Count


class EndWorker(msgspec.Struct, frozen=True, tag="end-worker", kw_only=True):
    """End the worker of this rank if it runs on this node: the others would wait for ever."""

    fence: Fence
    rank: Count
    reason: Text


class ShowStacks(msgspec.Struct, frozen=True, tag="show-stacks", kw_only=True):
    """Log the stacks of the workers of these ranks that run on this node: others wait for them."""

    fence: Fence
    ranks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=STACKS_MAX)]


class Stop(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """Stop the workers of `fence`: SIGTERM, then SIGKILL after `grace_s`.

    `asks_calls`: the answer carries the last collectives of the workers, since another one failed
    in a way that theirs may explain.
    """

    fence: Fence
    grace_s: float
    reason: str
    asks_calls: bool = False


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The agent that asked to leave may go: the job no longer needs it."""

    reason: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The job has ended."""

    outcome: Outcome


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Answer to a heartbeat. `authority` is False while the coordinator may not decide.

    `probes`: the agent tries these addresses, and reports which of them answer.
    """

    authority: bool
    probes: Annotated[tuple[Probe, ...], msgspec.Meta(max_length=PROBES_MAX)] = ()


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node in a `Report`."""

    node_id: str
    host: str
    state: str
    node_rank: int | None
    local_world_size: int
    heard_s: float  # seconds since its last message
    progress: int | None = None  # steps that its workers report; None: they report none
    steps_per_s: float | None = None  # the rate of reported steps, or else of measured ones


class SafeCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The newest copy of the state that survives the loss of any worker, of any node, of all nodes.

    None if no such copy is known.
    """

    worker: StateCopy | None = None
    node: StateCopy | None = None
    job: StateCopy | None = None


class Report(msgspec.Struct, frozen=True, tag="report", kw_only=True):
    """The coordinator's state of the job, for `elastane status`."""

    job: str
    phase: str
    reason: str
    fence: Fence | None
    min_nodes: int
    max_nodes: int
    world_size: int
    restarts_used: int
    max_restarts: int
    uptime_s: float
    nodes: tuple[NodeStatus, ...]
    last_incident: str = ""
    stalled: str = ""  # for whom, or where, the workers wait at a standstill; empty: they move
    safe: SafeCopies = SafeCopies()


ToAgent = (
    Welcome
    | Refused
    | Assign
    | Interrupt
    | Prepare
    | Drain
    | DrainTarget
    | CallOff
    | EndWorker
    | ShowStacks
    | Stop
    | Release
    | Close
    | Alive
    | Report
)


class AgentPresence(NamedTuple):
    """One agent as the coordinator sees it.

    `state`: "joined", "away" during the reconnect grace, or "departed" from the world.
    """

    incarnation: str
    state: str
    node_rank: int
