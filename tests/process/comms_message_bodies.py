"""Bodies of comms_crew's workers that send messages."""

import time

import comms_bodies
import torch
import torch.distributed as dist

from elastane.comms.elastic import ElasticGroup
from elastane.comms.works import WorkLog
from elastane.errors import PeerLostError


def begins_with_the_dead(worker, operation):
    """Begin messages to a dead member until one fails to begin; report the error."""
    elastic = ElasticGroup()
    elastic.replace(comms_bodies.build(worker, "only", worker.number, 2))
    elastic.register()
    assert comms_bodies.summed(elastic, worker.number) == 3.0
    worker.say("in")
    worker.hear()
    begins = {
        "exchange": lambda: elastic.exchange([(torch.ones(8), 1, 7)], []),
        "irecv": lambda: dist.irecv(torch.ones(8), 1, group=elastic),
    }
    error, end = None, time.monotonic() + 10.0
    while error is None and time.monotonic() < end:
        elastic._works = WorkLog(
            elastic.world.refuses
        )  # as if nothing was under way when the peer died
        try:
            begins[operation]()
        except (RuntimeError, PeerLostError) as raised:
            error = raised
    worker.say((type(error).__name__, elastic.failed))
