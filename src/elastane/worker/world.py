"""Moves one worker from world to world: its rank, its control socket, its process group.

Owns the move from a world that broke into the next one, and the boundary at which a planned change
waits. `job` owns steps, and the state that members bring along. Without an agent there is a single
world with one worker. Workers whose state peers cannot heal (`restarts`) also have a single world:
all of them are restarted. Fails with PeerLostError if a world cannot be entered; the caller then
enters the next one. Fails with JobError if there is no next one.
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
from elastane.comms.mesh import NO_COORDINATE, MeshGroups, assign_coordinates, is_whole
from elastane.errors import ConfigurationError, ElastaneError, JobError, PeerLostError
from elastane.process import collectives
from elastane.process.control_socket import AssignedPlace, Doing, Wait
from elastane.process.status_page import WorkerPage
from elastane.protocol.hangs import Activity
from elastane.protocol.model import NO_SLICE, Fence, Sharding
from elastane.worker import drain
from elastane.worker.control_socket import ControlSocket, doing
from elastane.worker.healing import gathered
from elastane.worker.progress_reporter import ProgressReporter

# How often a gated worker reads its status page.
_POLL_S = 0.0005


class Worlds:
    """The worlds of one worker; its control socket's thread may end the current one at any time."""

    def __init__(self, line: ControlSocket | None, backend: str = "") -> None:
        """`backend`: "nccl" or "gloo" for tensors on a GPU; "" is NCCL."""
        if backend not in ("", "nccl", "gloo"):
            raise _unknown_backend(backend)
        self._backend = backend or "nccl"
        self.progress = ProgressReporter()
        self.group = ElasticGroup(when_begun=self.progress.beat)
        # None: without an agent, or not in a world yet.
        self.place: AssignedPlace | None = None
        # Whether this worker is a standby: it has no place in a world yet.
        self.waits = False
        # The number of this worker on its node, the same in every world.
        self.local_rank = 0
        self._line = line
        self._page: WorkerPage | None = None
        self._building: tuple[WorldGroup, ...] = ()
        # The whole world, while some of its members continue in a group of their own.
        self._whole: WorldGroup | None = None
        self.mesh: MeshGroups | None = None
        # Whether this worker joined after the first step: peers give it their state.
        self.came_later = False
        # Why the loss of a worker restarts all workers; "" if they recover in place.
        self.restarts = ""
        self._sharding: Sharding | None = None  # as last reported to the agent
        # Whether this world has no whole replicas: its members only come to one step in it.
        self._is_uneven = False

    def join(self, *, wait_for_place: bool) -> None:
        """Meet the other workers.

        A joining worker waits for its place. Without `wait_for_place` it begins in a world of one,
        and enters that of the others by `enter`.
        """
        if self._line is not None:
            self._page = drain.take_page()
            self.progress.show_on(self._page)
            collectives.watch_groups(dict)
            word = self._line.first()
            self.local_rank = word.local_rank
            self.waits = self.came_later = isinstance(word, Wait)
            self._line.begin(self._end_world, self._doing)
            if isinstance(word, AssignedPlace):
                self._set_place(word)
        if self.waits and wait_for_place:
            self._wait_for_place()
        else:
            self._build(self.place)
        self.group.register()

    @property
    def rank(self) -> int:
        """This worker's rank."""
        self._check_place("rank")
        return self.group.rank()

    @property
    def size(self) -> int:
        """The world size."""
        self._check_place("world_size")
        return self.group.size()

    @property
    def fence(self) -> Fence:
        """The round and attempt of the world; zeros without an agent."""
        return self.place.fence if self.place is not None else Fence(0, 0)

    @property
    def device(self) -> torch.device:
        """This worker's device: a GPU by its local rank, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def has_agent(self) -> bool:
        """Whether an agent could start another worker."""
        return self._line is not None

    @property
    def world_has_ended(self) -> bool:
        """Whether the current world has ended, or this worker has a place in another."""
        return self._line is not None and self._line.world_has_ended

    def able(self) -> None:
        """Report that this worker can recover in place."""
        if self._line is not None and not self.restarts:
            self._sharding = self._sharded()
            self._line.able(self._sharding)

    def begin(self) -> None:
        """Continue with the members of the current world, if this worker has a place in it."""
        self._set_apart(False)
        self.able()

    def finished(self) -> None:
        """Report that this worker enters no other world."""
        if self._line is not None and not self.restarts:
            self._line.finished()

    def restart_because(self, why: str) -> None:
        """Set why the loss of a worker restarts all workers; "": they recover in place."""
        self.restarts = why

    def differed(self, steps: int, reason: str) -> None:
        """Report that this worker's replica differed from the majority after `steps` steps."""
        if self._line is not None:
            self._line.differed(self.rank, steps, reason)

    def reach(self, number: int, before_stop: Callable[[], None]) -> None:
        """Reach the boundary before step `number`, counted from 1; wait there if one is agreed on.

        `before_stop` is called on all workers at a boundary where they are going to be stopped.
        That may become known only while they wait. The gate disappears a moment before the message
        of the agent arrives. A step made in between would begin in the old world.
        """
        page = self._page
        if page is None or not page.reach(number):
            return
        self.progress.at(Activity.ENTERING)
        is_saved = False
        while not self.world_has_ended and (page.gated or not self.restarts):
            target = page.target  # read once: it may change at any time
            if target > number:
                break
            if target and page.stops and not is_saved:
                before_stop()
                is_saved = True
            page.park(target > 0, saved=is_saved)
            time.sleep(_POLL_S)
        page.park(False)
        self.progress.at(Activity.BETWEEN)

    def met(self, number: int) -> None:
        """Report that all members are in this world, and hold the state of `number` steps.

        Steps that others have committed count as if this worker had made them.
        """
        if self._sharded() != self._sharding:
            self.able()
        if self._page is not None:
            self._page.meet(number, self.fence.round)

    def is_over(self) -> bool:
        """Wait for the end of a world without whole replicas; return False for other worlds.

        The members are at one step by then, so the coordinator can choose which ones to displace.
        """
        if not self._is_uneven:
            return False
        while not self.world_has_ended:
            time.sleep(_POLL_S)
        return True

    def enter(self) -> None:
        """Wait for a place in another world, and meet its members; raises PeerLostError."""
        assert self._line is not None, "lose() has refused"
        self.progress.at(Activity.ENTERING)
        self._set_place(self._line.next_place())
        self._close_whole()
        self._build(self.place)
        if self.mesh is not None:
            self._take_coordinate(self.mesh)

    def open_mesh(self, mesh: MeshGroups) -> None:
        """Choose a mesh coordinate, for this world and the later ones.

        A worker's modules depend on its coordinate. A standby waits for a place in a world here.
        """
        self.mesh = mesh
        self._set_apart(False)
        if self.waits:
            self._wait_for_place()
            return
        try:
            self._take_coordinate(mesh)
            self._set_apart(self.came_later)
        except (ElastaneError, RuntimeError) as error:
            if not (self.came_later or isinstance(error, _UnevenError)):
                raise
            self.able()
            self.lose(error)
            self._wait_for_place()

    def narrow(self, ranks: Sequence[int]) -> None:
        """Continue among some members of the world, in a group of their own; `widen` ends it.

        Rank and world size are those of that group. Raises as the construction of a group does.
        """
        if self.mesh is not None:
            raise JobError(
                "a worker was lost in job.retry() after a step, and one that joined since holds"
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
        if self.world_has_ended:
            world.abort()
        world.build()
        self._whole = whole
        self.group.replace(world, keeps=True)
        os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))

    def widen(self) -> None:
        """Return to the group of the whole world."""
        if self._whole is not None and self.place is not None:
            self.group.replace(self._whole)
            self._whole = None
            os.environ.update(self.place.env)

    def lose(self, error: Exception) -> None:
        """Treat an error as that of a lost peer if it can be one; otherwise raise it again.

        Raises JobError if there is no other world to enter.
        """
        if not (self.group.failed or self.world_has_ended or isinstance(error, PeerLostError)):
            raise error
        if self.restarts:
            self._restart(error)
        if self._line is None:
            raise JobError(
                "a collective failed in a world of one worker",
                expected="collectives over job.process_group that succeed",
                next_step="read the error above this one",
                slug="job-alone",
            ) from error
        if not self.world_has_ended:
            self._line.lost(self.fence, error)

    def close(self) -> None:
        """Close the control socket and all groups. Idempotent."""
        if self._line is not None:
            self._line.close()
        self.progress.close()
        if self.mesh is not None:
            self.mesh.close()
        self.group.close()
        self._close_whole()

    def _close_whole(self) -> None:
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _set_place(self, place: AssignedPlace) -> None:
        """Set the place of this worker, and the environment variables that describe it."""
        self.place = place
        self.waits = False
        os.environ.update(place.env)

    def _wait_for_place(self) -> None:
        """Enter the first world with a place for this worker; then build the model alone."""
        warm_up()
        self.able()
        while True:
            try:
                self.enter()
                break
            except (ElastaneError, RuntimeError) as error:
                self.lose(error)
        self._set_apart(True)

    def _set_apart(self, apart: bool) -> None:
        """Set whether this worker builds alone while the others wait for its first step."""
        for group in (self.group, *(self.mesh.groups if self.mesh is not None else ())):
            group.build_apart(apart)
        if apart:
            self.progress.at(Activity.BUILDING)

    def _check_place(self, what: str) -> None:
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
        wiring = ALONE if place is None else wiring_of(place)
        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            wiring = dataclasses.replace(wiring, device_type="cuda", backend=self._backend)
        self._connect(self.group, wiring)
        if place is not None:
            collectives.begin_world(place.fence.round)

    def _take_coordinate(self, mesh: MeshGroups) -> None:
        """Agree on all mesh coordinates, and connect to the same row and column."""
        rank, size = self.group.rank(), self.group.size()
        received = gathered(
            self.group, [mesh.coordinate, _node_number(), mesh.shards, _node_size()]
        )
        claims, nodes, shards, sizes = ([each[part] for each in received] for part in range(4))
        if len(set(shards)) > 1:
            raise _not_alike(shards) if set(claims) == {NO_COORDINATE} else _other_size(shards)
        mesh.spread(_nodes_per_replica(mesh.shards, *set(sizes)))
        spans = mesh.span > 1 and self._line is not None  # without an agent there is no other world
        self._is_uneven = spans and not is_whole(claims, mesh.shards)
        self.group.consist_of(() if self._is_uneven else mesh.groups)
        if self._is_uneven:
            without = claims.count(NO_COORDINATE)
            # Members that hold shards may be at other steps until they have compared them.
            self._is_uneven = without in (0, size)
            if without:
                what = f"{size} workers make no whole replicas of {mesh.shards}"
                raise _UnevenError(what, slug="job-mesh")
            return  # They keep their shards, and come to one step in this world.
        if size % mesh.shards:
            raise _not_whole(size, mesh.shards)
        mesh.set_coordinates(assign_coordinates(claims, nodes, mesh.shards), rank)
        for group, wiring in zip(mesh.groups, mesh.wirings(self.group.world.wiring), strict=True):
            self._connect(group, wiring)

    def _sharded(self) -> Sharding | None:
        """Return how this worker's state is sharded, for the agent; None if it is not."""
        mesh = self.mesh
        if mesh is None or mesh.shards == 1:
            return None
        span = (
            mesh.span
            if mesh.coordinate != NO_COORDINATE
            else _nodes_per_replica(mesh.shards, _node_size())
        )
        part = NO_SLICE
        if span > 1 and mesh.coordinate != NO_COORDINATE:
            part = mesh.shard_of(mesh.coordinate) // _node_size()
        level = self.fence if self._is_uneven else None
        return Sharding(sole=mesh.is_sole, span=span, part=part, level=level)

    def _connect(self, group: ElasticGroup, wiring: Wiring) -> None:
        world = WorldGroup(wiring)
        self._building += (world,)
        if self.world_has_ended:
            world.abort()  # The thread may have checked before this world was listed.
        group.replace(world.build())

    def _end_world(self) -> None:
        """In the control socket's thread: abort the collectives that the main thread waits in.

        The groups are read first: once the main thread has taken its next place, no world has
        ended, and the groups of the next world may be there.
        """
        building = self._building
        if self.world_has_ended:
            with self.progress.aborting():
                for world in building:
                    world.abort()

    def _restart(self, error: Exception) -> NoReturn:
        raise PeerLostError(
            f"all workers start again: {self.restarts} ({error})",
            slug="job-restarts",
            where=f"rank {self.rank} of {self.size}",
            expected="a Checkpointer, from which they continue",
            next_step="job.device_mesh(shard=S) with two replicas or more recovers in place",
        ) from error

    def _doing(self) -> Doing:
        """In the control socket's thread: whether this worker waits, where, and its traffic."""
        return doing(self.group.rank(), self.group.in_flight, self.group.traffic)


def wiring_of(place: AssignedPlace) -> Wiring:
    """Return how the worker of `place` meets the other members of its world."""
    return Wiring(
        rank=place.rank,
        world_size=place.world_size,
        master_addr=place.master_addr,
        master_port=place.master_port,
        fence=f"{place.fence.round}.{place.fence.attempt}",
        serves=place.rank == 0 and not place.agent_store,
    )


def _unknown_backend(backend: str) -> ConfigurationError:
    return ConfigurationError(
        f"elastane.init(backend={backend!r})",
        slug="job-backend",
        expected='"nccl" or "gloo", for tensors on a GPU; those of the CPU always use gloo',
        next_step="leave it out, for NCCL where this worker has a GPU",
    )


def warm_up() -> None:
    """Import what the first backward pass and optimizer need, while no other member waits (1 s).

    The optimizer makes no step, for which hooks of the script would be called.
    """
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([parameter], lr=0.0)


def _node_number() -> int:
    """Return a hash of this node's name, which hardly any other node of the job has."""
    return zlib.crc32(os.environ.get("ELASTANE_NODE", "").encode())


def _node_size() -> int:
    """Return how many workers this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _nodes_per_replica(shards: int, size: int, *others: int) -> int:
    """Return how many nodes hold a replica; 1 if nodes differ in their number of workers."""
    return 1 if others or shards % size else shards // size


class _UnevenError(PeerLostError):
    """A world without whole replicas has members that hold no shard yet."""


def _not_whole(size: int, shards: int) -> JobError:
    return JobError(
        f"job.device_mesh(shard={shards}) in a world of {size} workers",
        expected=f"whole replicas, each of {shards} workers, in each world",
        next_step="an S of job.device_mesh(shard=S) that divides the workers of each node, or is a"
        " multiple of them, or a fixed size: --nnodes N, no --min-workers",
        slug="job-mesh",
    )


def _other_size(shards: Sequence[int]) -> JobError:
    return JobError(
        f"workers that join have a mesh of another size: job.device_mesh(shard=...) was called with"
        f" {', '.join(map(str, shards))}, by rank",
        expected="the number with which the job began",
        next_step="nothing: all workers start again with one mesh; with a number that is no"
        " function of job.world_size they join in place",
        slug="job-mesh-size",
    )


def _not_alike(shards: Sequence[int]) -> JobError:
    return JobError(
        f"job.device_mesh(shard=...) was called with {', '.join(map(str, shards))}, by rank",
        expected="the same number on all workers, in whatever world each was started",
        next_step="a number that is no function of job.world_size",
        slug="job-mesh",
    )
