"""Members compare their state as a world begins, and take over the one that is right.

Owns the exchange, and what this member holds; who is right is decided in core. Fails as a
collective fails, by a peer that is lost: who was receiving then holds nothing, and who was giving
holds what it held. JobError where no state is left that is whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastane.comms import transfer
from elastane.comms.elastic import ElasticGroup
from elastane.core.recovery import Healing, Standing, decide
from elastane.data.cursor import Cursor
from elastane.errors import JobError
from elastane.job.tracked import Tracked


class Health:
    """Whether this member holds the job's state, and the way to it."""

    def __init__(self, group: ElasticGroup, tracked: Tracked) -> None:
        self._group, self._tracked = group, tracked
        self.holds = False
        self._torn = False

    def compare(self, cursor: Cursor) -> None:
        """Bring all members of the world to one state: that of who is furthest."""
        said = torch.tensor([cursor.next_step, self.holds, self._torn], dtype=torch.int64)
        heard = [torch.zeros_like(said) for _ in range(self._group.size())]
        dist.all_gather(heard, said, group=self._group)
        healing = decide([Standing(int(n), bool(h), bool(t)) for n, h, t in heard])
        if healing is None:
            raise JobError(
                "no worker of this world holds the state of the job",
                expected="one that was not lost before it had given its state to others",
                next_step="let the script load its checkpoint when it starts",
                slug="job-state-lost",
            )
        if healing.receivers:
            self._hand_over(cursor, healing)
        self._group.check()
        self.holds = True

    def _hand_over(self, cursor: Cursor, healing: Healing) -> None:
        group, tracked = self._group, self._tracked
        if group.rank() == healing.donor:
            state = {"tracked": tracked.state(), "data": cursor.state_dict()}
            transfer.send(group, state, healing.receivers)
        elif group.rank() in healing.receivers:
            self.holds, self._torn = False, True
            found = transfer.receive(group, healing.donor, into={"tracked": tracked.state()})
            tracked.load(found["tracked"])
            cursor.load_state_dict(found["data"])
            self._torn = False
