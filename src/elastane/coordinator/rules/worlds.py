"""The current world and what is known of it: whether it is intact, recorded, and recoverable.

`WorldHistory` is changed where a world is loaded, reported, resumed or committed (`machine`,
`admission`, `next_world`), and where workers of it are known to have ended.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastane.protocol.model import Assignment, Fence, World


@dataclass(slots=True, kw_only=True)
class UnrecordedWorld:
    """A world that agents report and of which this coordinator has no record."""

    fence: Fence
    size: int
    identity: tuple[int, str, int]  # nodes, and address and port of the process-group store
    node_ids: dict[int, str] = field(default_factory=dict)  # by node rank

    def has(self, node_id: str, assignment: Assignment) -> bool:
        """Whether this node reported that place in this world."""
        same = self.identity == identity_of(assignment)
        return same and self.node_ids.get(assignment.node_rank) == node_id

    def add(self, node_id: str, assignment: Assignment) -> None:
        """Record the place that a node reports, if it is one of this world."""
        if (assignment.fence, identity_of(assignment)) == (self.fence, self.identity):
            self.node_ids[assignment.node_rank] = node_id

    @property
    def all_node_ids(self) -> list[str]:
        """The node ids in order of rank; those that did not report are made up."""
        ranks = range(self.size)
        return [self.node_ids.get(rank, f"the node of rank {rank}") for rank in ranks]


def identity_of(assignment: Assignment) -> tuple[int, str, int]:
    """Return what distinguishes two worlds of one fence, if a coordinator had forgotten the first.

    These are the number of nodes, and the address and port of the process-group store.
    """
    return (assignment.nodes, assignment.master_addr, assignment.master_port)


@dataclass(slots=True)
class WorldHistory:
    """The current world, or the last one, and which fences are used up."""

    current: World | None = None
    began_s: float = 0.0
    # Whether it may still train somewhere: no member is known to be without its workers.
    intact: bool = False
    all_released: bool = False  # the last node was released, and no worker of it is left
    # The size of the world that the current one has replaced with fewer workers, until these have
    # agreed to continue; 0 otherwise. They may all restart instead.
    shrunk_from: int = 0
    highest_fence: Fence | None = None  # the highest that any agent ever reported
    unrecorded: UnrecordedWorld | None = None
    # The node ids of one world, kept by `has_place`.
    _ids: Collection[str] = ()
    _ids_of: World | None = None

    @property
    def fence(self) -> Fence | None:
        """The fence of the current world, or of the one that agents report."""
        if self.current is not None:
            return self.current.fence
        return self.unrecorded.fence if self.unrecorded is not None else None

    @property
    def size(self) -> int:
        """How many nodes the current world has, or the one that agents report."""
        if self.current is not None:
            return len(self.current.members)
        return self.unrecorded.size if self.unrecorded is not None else 0

    @property
    def node_ids(self) -> list[str]:
        """The node ids of the current world, or of the one that agents report, by rank."""
        if self.current is not None:
            return [member.node_id for member in self.current.members]
        assert self.unrecorded is not None, "recovering needs a recorded or a reported world"
        return self.unrecorded.all_node_ids

    @property
    def next_round(self) -> Fence:
        """The fence of a new round, after all that were used."""
        fences = [fence for fence in (self.highest_fence, self.fence) if fence is not None]
        return Fence(max((fence.round for fence in fences), default=0) + 1, 0)

    def has_place(self, node_id: str) -> bool:
        """Whether the current world has a place for this node, whatever the node holds."""
        if self.current is not self._ids_of:
            self._ids_of = self.current
            members = self.current.members if self.current else ()
            self._ids = frozenset(member.node_id for member in members)
        return node_id in self._ids

    def load(self, world: World | None, *, may_train: bool) -> None:
        """Take the world of the job's record; `may_train`: its workers may be alive."""
        self.current, self.intact = world, world is not None and may_train

    def commit(self, world: World, now_s: float) -> None:
        """Make `world` the current one."""
        self.current, self.began_s, self.highest_fence = world, now_s, world.fence
        self.intact, self.all_released = True, False
        self.shrunk_from = 0

    def note_shrunk(self, before: World) -> None:
        """Record that the current world has fewer workers than the one before."""
        self.shrunk_from = before.world_size

    def note_continued(self) -> None:
        """Record that the workers of the current world have agreed to continue."""
        self.shrunk_from = 0

    def resume(self, now_s: float) -> None:
        """Record that all members of the current world are back."""
        self.began_s = now_s

    def adopt(self, world: World, holders: int) -> None:
        """Take the unrecorded world as the current one; `holders` nodes still have its workers."""
        assert self.unrecorded is not None, "only a reported world is adopted"
        self.current, self.intact = world, holders == self.unrecorded.size
        self.unrecorded = None
        if not self.intact:
            # This is not the membership of that round, so the next world gets another round.
            self.note_fence(Fence(world.fence.round, world.fence.attempt + 1))

    def note_fence(self, fence: Fence | None) -> None:
        """Allow no further world at or below `fence`, which some agent held."""
        if fence is not None and (self.highest_fence is None or fence > self.highest_fence):
            self.highest_fence = fence

    def note_reported(self, assignment: Assignment) -> None:
        """Record the latest of the worlds that agents have reported."""
        self.unrecorded = UnrecordedWorld(
            fence=assignment.fence, size=assignment.nodes, identity=identity_of(assignment)
        )

    def record_loss(self) -> None:
        """Record that a member is without its workers."""
        self.intact = False

    def release_all(self) -> None:
        """Record that no worker of the current world is left."""
        self.all_released = True


@dataclass(slots=True)
class InPlaceRecovery:
    """How the current world recovers: whether in place, and how many nodes one replica spans.

    `sizing` has the rules of replicas.
    """

    active: bool = False
    was_active: bool = False  # in place, until the workers were asked to stop
    partial_replicas: bool = False  # the current world has a partial replica: it makes no steps
    nodes_per_replica: int = 1

    @property
    def ever(self) -> bool:
        """Whether workers of the current world may hold state that no checkpoint has."""
        return self.active or self.was_active

    def begin(self, *, active: bool) -> None:
        """Record whether the workers of a world that is resumed recover in place."""
        self.active = active

    def stop_world(self) -> None:
        """Record that the workers are asked to stop."""
        self.active, self.was_active = False, self.ever

    def commit_world(self) -> None:
        """Record that another world begins."""
        self.was_active = False

    def note_partial(self, *, partial: bool) -> None:
        """Record whether the current world has a partial replica."""
        self.partial_replicas = partial

    def note_span(self, nodes: int) -> None:
        """Record the least number of nodes that one replica spans."""
        self.nodes_per_replica = max(self.nodes_per_replica, nodes)

    def reset_span(self) -> None:
        """Forget how many nodes one replica spans."""
        self.nodes_per_replica = 1
