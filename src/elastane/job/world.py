"""The worlds of one worker, one after the other: its place, its line, its process group.

Owns the way from a world that broke into the next one, and the boundary at which a planned change
waits. What state the members bring along, and what a step is, is `job`'s. Without an agent there
is one world, of one. Fails with PeerLostError where a world cannot be entered, which its caller
answers by entering the next; JobError where there is none.
"""

from __future__ import annotations

import time

import torch

from elastane.comms.elastic import ElasticGroup
from elastane.comms.group import ALONE, Wiring, WorldGroup
from elastane.core.hangs import Activity
from elastane.core.model import Fence
from elastane.errors import JobError, PeerLostError
from elastane.job import drain
from elastane.job.agentline import AgentLine
from elastane.job.pulse import Pulse
from elastane.runtime.page import WorkerPage
from elastane.runtime.workerline import Place, Wait

# How long a gated worker pauses between two looks at its page.
_POLL_S = 0.0005


class Worlds:
    """One worker's; the thread of its line may end the world in hand at any instant."""

    def __init__(self, line: AgentLine | None) -> None:
        self.group = ElasticGroup()
        self.place: Place | Wait | None = None
        self._line = line
        self._page: WorkerPage | None = None
        self._building: WorldGroup | None = None
        self.pulse = Pulse()
        self.group.when_begun = self.pulse.beat

    def join(self) -> None:
        """Meet the others; a worker that has no place yet builds what it needs on its own."""
        if self._line is not None:
            self._page = drain.take_page()
            self.pulse.show_on(self._page)
            self.place = self._line.first()
            self._line.begin(self._end_world, self._waits)
        self._build(self.place if isinstance(self.place, Place) else None)
        self.group.register()

    @property
    def waits(self) -> bool:
        """Whether this worker has no place in a world yet."""
        return isinstance(self.place, Wait)

    @property
    def rank(self) -> int:
        """This worker's rank; a guess while it waits for a place."""
        return self.place.rank if self.place is not None and self.waits else self.group.rank()

    @property
    def size(self) -> int:
        """How many workers the world has; a guess while this one waits for a place."""
        return self.place.world_size if self.place is not None and self.waits else self.group.size()

    @property
    def local_rank(self) -> int:
        """The number of this worker on its node, the same in every world."""
        return self.place.local_rank if self.place is not None else 0

    @property
    def fence(self) -> Fence:
        """The round and attempt of the world; of none, where there is no agent."""
        return self.place.fence if isinstance(self.place, Place) else Fence(0, 0)

    @property
    def device(self) -> torch.device:
        """This worker's device: a GPU by its local rank, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def has_news(self) -> bool:
        """Whether the world in hand has ended, or there is a place in another."""
        return self._line is not None and self._line.has_news

    def able(self) -> None:
        """Say that this worker can enter another world as it is."""
        if self._line is not None:
            self._line.able()

    def finished(self) -> None:
        """Say that this worker enters no other world."""
        if self._line is not None:
            self._line.finished()

    def reach(self, number: int) -> None:
        """Come to the boundary before step `number`, counted from 1; wait where one is agreed on.

        The gate is no longer there a moment before the news is; a step in between would be begun
        in the old world.
        """
        page = self._page
        if page is None or not page.reach(number):
            return
        self.pulse.at(Activity.ENTERING)
        while not self.has_news:
            target = page.target  # once: it may be set at any moment
            if target > number:
                break
            page.park(target > 0)
            time.sleep(_POLL_S)
        page.park(False)
        self.pulse.at(Activity.BETWEEN)

    def reached(self, number: int) -> None:
        """Count steps that others have committed as if this worker had made them."""
        if self._page is not None:
            self._page.reach(number)

    def enter(self) -> None:
        """Wait for a place in another world, and meet its members; raises PeerLostError."""
        assert self._line is not None, "lose() has refused"
        self.pulse.at(Activity.ENTERING)
        self.place = self._line.next_place()
        self._build(self.place)

    def lose(self, error: Exception) -> None:
        """Take an error for that of a lost peer, if it is one; else it is raised again.

        Raises JobError where there is no other world to go on in.
        """
        if not (self.group.failed or self.has_news or isinstance(error, PeerLostError)):
            raise error
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
        self.group.close()

    def _build(self, place: Place | None) -> None:
        self._building = WorldGroup(self._wiring(place) if place is not None else ALONE)
        if self.has_news:
            self._building.abort()  # The thread may have looked a moment too early.
        self.group.replace(self._building.build())

    def _end_world(self) -> None:
        """In the line's thread: let the main thread come out of whatever it waits in."""
        if self.has_news and self._building is not None:
            self._building.abort()

    def _waits(self) -> bool:
        """In the line's thread: whether this worker waits for others in the world in hand."""
        return self.group.in_flight

    def _wiring(self, place: Place) -> Wiring:
        return Wiring(
            rank=place.rank,
            world_size=place.world_size,
            master_addr=place.master_addr,
            master_port=place.master_port,
            fence=f"{place.fence.round}.{place.fence.attempt}",
            device_type=self.device.type,
            serves=place.rank == 0 and not place.agent_store,
        )
