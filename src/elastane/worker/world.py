"""The worlds of one worker, one after the other: its place, its line, its process group.

Owns the way from a world that broke into the next one, and the boundary at which a planned change
waits. What state the members bring along, and what a step is, is `job`'s. Without an agent there
is one world, of one; so there is for workers of which others could not recover (`restarts`): they
are started anew, all of them. Fails with PeerLostError where a world cannot be entered, which its
caller answers by entering the next; JobError where there is none.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import ALONE, Wiring, WorldGroup
from elastane.comms.mesh import NO_SEAT, MeshGroups, is_whole, seated
from elastane.errors import ElastaneError, JobError, PeerLostError
from elastane.process.control_socket import AssignedPlace, Doing, Wait
from elastane.process.status_page import WorkerPage
from elastane.protocol.hangs import Activity
from elastane.protocol.model import Fence
from elastane.protocol.sharding import NO_PART, Sharding
from elastane.worker import drain, whereabouts
from elastane.worker.control_socket import AgentLine
from elastane.worker.healing import gathered
from elastane.worker.progress_reporter import Pulse

# How long a gated worker pauses between two looks at its page.
_POLL_S = 0.0005


class Worlds:
    """One worker's; the thread of its line may end the world in hand at any instant."""

    def __init__(self, line: AgentLine | None) -> None:
        self.group = ElasticGroup()
        # None: a world of one without an agent, or no place yet.
        self.place: AssignedPlace | None = None
        # Whether this worker has no place in a world yet.
        self.waits = False
        # The number of this worker on its node, the same in every world.
        self.local_rank = 0
        self._line = line
        self._page: WorkerPage | None = None
        self._building: tuple[WorldGroup, ...] = ()
        # The whole world, while some of its members go on in a group of their own.
        self._whole: WorldGroup | None = None
        self.mesh: MeshGroups | None = None
        # Whether this worker came after the first step: others give it their state.
        self.came_later = False
        # Why no other world follows one that lost a worker; "" where one does.
        self.restarts = ""
        self._sharding: Sharding | None = None  # as the agent knows it
        # Whether this world is of no whole replicas: its members come to one step there, no more.
        self._is_uneven = False
        self.pulse = Pulse()
        self.group.when_begun = self.pulse.beat

    def join(self, *, wait_for_place: bool) -> None:
        """Meet the other workers.

        A worker that came later waits for its place; without `wait_for_place` it begins in a world
        of one and enters that of the others by `enter`.
        """
        if self._line is not None:
            self._page = drain.take_page()
            self.pulse.show_on(self._page)
            word = self._line.first()
            self.local_rank = word.local_rank
            self.waits = self.came_later = isinstance(word, Wait)
            self._line.begin(self._end_world, self._doing)
            if isinstance(word, AssignedPlace):
                self._take(word)
        if self.waits and wait_for_place:
            self._wait_for_place()
        else:
            self._build(self.place)
        self.group.register()

    @property
    def rank(self) -> int:
        """This worker's rank."""
        self._insist_on_place("rank")
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many workers the world has."""
        self._insist_on_place("world_size")
        return self.group.size()

    @property
    def fence(self) -> Fence:
        """The round and attempt of the world; of none, where there is no agent."""
        return self.place.fence if self.place is not None else Fence(0, 0)

    @property
    def device(self) -> torch.device:
        """This worker's device: a GPU by its local rank, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def has_agent(self) -> bool:
        """Whether anybody could start another worker."""
        return self._line is not None

    @property
    def has_news(self) -> bool:
        """Whether the world in hand has ended, or there is a place in another."""
        return self._line is not None and self._line.has_news

    def able(self) -> None:
        """Say that this worker can enter another world as it is."""
        if self._line is not None and not self.restarts:
            self._sharding = self._sharded()
            self._line.able(self._sharding)

    def begin(self) -> None:
        """Go on with the members of the world in hand, where there is a place in it."""
        self._be_apart(False)
        self.able()

    def finished(self) -> None:
        """Say that this worker enters no other world."""
        if self._line is not None and not self.restarts:
            self._line.finished()

    def differed(self, steps: int, reason: str) -> None:
        """Say that this worker's replica was another one than most hold, after so many steps."""
        if self._line is not None:
            self._line.differed(self.rank, steps, reason)

    def reach(self, number: int, before_stop: Callable[[], None]) -> None:
        """Come to the boundary before step `number`, counted from 1; wait where one is agreed on.

        `before_stop` is called, on all workers, at a boundary where they are all going to be
        stopped, which may turn out as they wait there. The gate is no longer there a moment before
        the news is; a step in between would be begun in the old world.
        """
        page = self._page
        if page is None or not page.reach(number):
            return
        self.pulse.at(Activity.ENTERING)
        is_saved = False
        while not self.has_news and (page.gated or not self.restarts):
            target = page.target  # once: it may be set at any moment
            if target > number:
                break
            if target and page.stops and not is_saved:
                before_stop()
                is_saved = True
            page.park(target > 0, saved=is_saved)
            time.sleep(_POLL_S)
        page.park(False)
        self.pulse.at(Activity.BETWEEN)

    def met(self, number: int) -> None:
        """Show that all members are in this world, and hold the state of `number` steps.

        Steps that others have committed count as if this worker had made them.
        """
        if self._sharded() != self._sharding:
            self.able()
        if self._page is not None:
            self._page.meet(number, self.fence.round)

    def is_over(self) -> bool:
        """Wait for the end of a world that is of no whole replicas; False where it is of such.

        Its members are at one step: then the coordinator can say who is to give way.
        """
        if not self._is_uneven:
            return False
        while not self.has_news:
            time.sleep(_POLL_S)
        return True

    def enter(self) -> None:
        """Wait for a place in another world, and meet its members; raises PeerLostError."""
        assert self._line is not None, "lose() has refused"
        self.pulse.at(Activity.ENTERING)
        self._take(self._line.next_place())
        self._close_whole()
        self._build(self.place)
        if self.mesh is not None:
            self._take_seat(self.mesh)

    def open_mesh(self, mesh: MeshGroups) -> None:
        """Take a seat in a mesh, in this world and in those that follow.

        What a worker builds depends on its seat. A worker without a place waits for one here.
        """
        self.mesh = mesh
        for group in mesh.groups:
            group.when_begun = self.pulse.beat
        self._be_apart(False)
        if self.waits:
            self._wait_for_place()
            return
        try:
            self._take_seat(mesh)
            self._be_apart(self.came_later)
        except (ElastaneError, RuntimeError) as error:
            if not (self.came_later or isinstance(error, _UnevenError)):
                raise
            self.able()
            self.lose(error)
            self._wait_for_place()

    def narrow(self, ranks: Sequence[int]) -> None:
        """Go on among these members of the world alone, in a group of their own; see `widen`.

        Rank and world size are those of that group. Raises as the construction of a group does.
        """
        if self.mesh is not None:
            raise JobError(
                "a worker was lost in job.retry() behind a step, and one that joined since holds"
                " shards that the function needs",
                expected="job.retry() between two loops of job.steps(), where a mesh is used: there"
                " a worker that joins takes part",
                next_step="for epoch in range(n):  for step, batch in job.steps(loader,"
                " until_epoch=epoch + 1): ...;  job.retry(validate, model)",
                slug="job-retry",
            )
        whole = self.group.world
        wiring = dataclasses.replace(
            whole.wiring,
            rank=ranks.index(whole.rank),
            world_size=len(ranks),
            fence=f"{whole.wiring.fence}/some",
            serves=False,
        )
        world = WorldGroup(wiring)
        self._building += (world,)
        if self.has_news:
            world.abort()
        world.build()
        self._whole = whole
        self.group.replace(world, keeps=True)
        os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))

    def widen(self) -> None:
        """Be in the whole world again."""
        if self._whole is not None and self.place is not None:
            self.group.replace(self._whole)
            self._whole = None
            os.environ.update(self.place.env)

    def lose(self, error: Exception) -> None:
        """Take an error for that of a lost peer, if it is one; else it is raised again.

        Raises JobError where there is no other world to go on in.
        """
        if not (self.group.failed or self.has_news or isinstance(error, PeerLostError)):
            raise error
        if self.restarts:
            self._restart(error)
        if self._line is None:
            raise JobError(
                "the world of one came apart",
                expected="collectives over job.process_group that succeed",
                next_step="read the error above this one",
                slug="job-alone",
            ) from error
        if not self.has_news:
            self._line.lost(self.fence, f"lost a peer: {error}")

    def close(self) -> None:
        """Leave for good: line and group are closed. Idempotent."""
        if self._line is not None:
            self._line.close()
        self.pulse.close()
        if self.mesh is not None:
            self.mesh.close()
        self.group.close()
        self._close_whole()

    def _close_whole(self) -> None:
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _take(self, place: AssignedPlace) -> None:
        """Hold this place, and have the environment say so."""
        self.place, self.waits = place, False
        os.environ.update(place.env)

    def _wait_for_place(self) -> None:
        """Enter a world as soon as its members take this worker in; then build apart from them."""
        _warm_up()
        self.able()
        while True:
            try:
                self.enter()
                break
            except (ElastaneError, RuntimeError) as error:
                self.lose(error)
        self._be_apart(True)

    def _be_apart(self, apart: bool) -> None:
        """Build without the others, which wait for this worker's first step; or meet them."""
        for group in (self.group, *(self.mesh.groups if self.mesh is not None else ())):
            group.apart = apart
        if apart:
            self.pulse.at(Activity.BUILDING)

    def _insist_on_place(self, what: str) -> None:
        if self.waits:
            raise JobError(
                f"job.{what} of a worker that has no place in a world yet",
                expected="a worker with a place: from elastane.init() on, or from its first step"
                " on with wait_for_place=False",
                next_step=f"read job.{what} in the loop of job.steps(), or leave out"
                " wait_for_place=False",
                slug="job-place",
            )

    def _build(self, place: AssignedPlace | None) -> None:
        self._building = ()
        self._meet(self.group, self._wiring(place) if place is not None else ALONE)

    def _take_seat(self, mesh: MeshGroups) -> None:
        """Agree on who sits where, and meet those of the same row and of the same column."""
        rank, size = self.group.rank(), self.group.size()
        said = gathered(self.group, [mesh.seat, _node(), mesh.shards, _node_size()])
        claims, nodes, shards, sizes = ([each[part] for each in said] for part in range(4))
        if len(set(shards)) > 1:
            raise _not_alike(shards)
        mesh.span = _span(mesh.shards, *set(sizes))
        spans = mesh.span > 1 and self._line is not None  # else there is no other world
        self._is_uneven = spans and not is_whole(claims, mesh.shards)
        self.group.parts = () if self._is_uneven else mesh.groups
        if self._is_uneven:
            if NO_SEAT in claims:
                what = f"{size} workers make no whole replicas of {mesh.shards}"
                raise _UnevenError(what, slug="job-mesh")
            return  # They hold what they held, and come to one step in this world.
        if size % mesh.shards:
            raise _not_whole(size, mesh.shards)
        mesh.settle(seated(claims, nodes, mesh.shards), rank)
        for group, wiring in zip(mesh.groups, mesh.wirings(self.group.world.wiring), strict=True):
            self._meet(group, wiring)

    def _sharded(self) -> Sharding | None:
        """Return what to say of the state that this worker holds; None: it is not sharded."""
        mesh = self.mesh
        if mesh is None or mesh.shards == 1:
            return None
        span = mesh.span if mesh.seat != NO_SEAT else _span(mesh.shards, _node_size())
        part = NO_PART
        if span > 1 and mesh.seat != NO_SEAT:
            part = mesh.shard_of(mesh.seat) // _node_size()
        level = self.fence if self._is_uneven else None
        return Sharding(sole=mesh.is_sole, span=span, part=part, level=level)

    def _meet(self, group: ElasticGroup, wiring: Wiring) -> None:
        world = WorldGroup(wiring)
        self._building += (world,)
        if self.has_news:
            world.abort()  # The thread may have looked a moment too early.
        group.replace(world.build())

    def _end_world(self) -> None:
        """In the line's thread: let the main thread come out of whatever it waits in."""
        if self.has_news:
            for world in self._building:
                world.abort()

    def _restart(self, error: Exception) -> NoReturn:
        raise PeerLostError(
            f"all workers start again: {self.restarts} ({error})",
            slug="job-restarts",
            where=f"rank {self.rank} of {self.size}",
            expected="a Checkpointer, from which they go on",
            next_step="job.device_mesh(shard=S) with two replicas or more recovers in place",
        ) from error

    def _doing(self) -> Doing:
        """In the line's thread: whether this worker waits for others, where, and if bytes move."""
        frames = whereabouts.main_frames()
        return Doing(
            waits=self.group.in_flight,
            held=whereabouts.is_debugged(frames),
            rank=self.group.rank(),
            where=whereabouts.described(frames),
            traffic=self.group.traffic,
        )

    def _wiring(self, place: AssignedPlace) -> Wiring:
        return Wiring(
            rank=place.rank,
            world_size=place.world_size,
            master_addr=place.master_addr,
            master_port=place.master_port,
            fence=f"{place.fence.round}.{place.fence.attempt}",
            device_type=self.device.type,
            serves=place.rank == 0 and not place.agent_store,
        )


def _warm_up() -> None:
    """Import what the first optimizer needs, 1 to 2 s of it, while nobody waits for this worker."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _node() -> int:
    """Return a number that the workers of this node have alike, and hardly others."""
    return zlib.crc32(os.environ.get("ELASTANE_NODE", "").encode())


def _node_size() -> int:
    """Return how many workers this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _span(shards: int, size: int, *others: int) -> int:
    """Return of how many nodes a replica is: of several, where all have so many workers."""
    return 1 if others or shards % size else shards // size


class _UnevenError(PeerLostError):
    """A world of no whole replicas has members that hold nothing yet."""


def _not_whole(size: int, shards: int) -> JobError:
    return JobError(
        f"job.device_mesh(shard={shards}) in a world of {size} workers",
        expected=f"whole replicas, each of {shards} workers, in each world",
        next_step="an S of job.device_mesh(shard=S) that divides the workers of each node, or is a"
        " multiple of them, or a fixed size: --nnodes N, no --min-workers",
        slug="job-mesh",
    )


def _not_alike(shards: Sequence[int]) -> JobError:
    return JobError(
        f"job.device_mesh(shard=...) was called with {', '.join(map(str, shards))}, by rank",
        expected="the same number on all workers, in whatever world each was started",
        next_step="a number that is no function of job.world_size",
        slug="job-mesh",
    )
