"""Members compare their state as a world begins, and take over the one that is right.

Owns the exchange; who is right is decided in core. Fails as a collective fails, by a peer that is
lost; then nobody who was to receive holds a state.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastane.comms import transfer
from elastane.comms.elastic import ElasticGroup
from elastane.core.recovery import Healing, Standing, decide
from elastane.data.cursor import Cursor
from elastane.job.tracked import Tracked


def heal(group: ElasticGroup, tracked: Tracked, cursor: Cursor, *, holds: bool) -> Healing:
    """Bring all members to one state; returns who gave it to whom."""
    mine = Standing(cursor.next_step, holds)
    healing = decide(_standings(group, mine))
    if healing.receivers:
        _hand_over(group, tracked, cursor, healing)
    group.check()
    return healing


def _standings(group: ElasticGroup, mine: Standing) -> list[Standing]:
    said = torch.tensor([mine.committed, int(mine.holds)], dtype=torch.int64)
    heard = [torch.zeros_like(said) for _ in range(group.size())]
    dist.all_gather(heard, said, group=group)
    return [Standing(int(found[0]), bool(found[1])) for found in heard]


def _hand_over(group: ElasticGroup, tracked: Tracked, cursor: Cursor, healing: Healing) -> None:
    if group.rank() == healing.donor:
        state = {"tracked": tracked.state(), "data": cursor.state_dict()}
        transfer.send(group, state, healing.receivers)
    elif group.rank() in healing.receivers:
        found = transfer.receive(group, healing.donor, into={"tracked": tracked.state()})
        tracked.load(found["tracked"])
        cursor.load_state_dict(found["data"])
