"""The output streams of a worker group, one set for each start of its workers.

Owns the streams from the first start under a fence until no worker uses them. A LogsSpecs class
that decides where output goes receives the environments of the workers, as in torch. It is called
off the event loop and within a bound. If it fails, hangs or omits a worker, the plan of the options
is used and one warning says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from elastane.agent.worker import GroupSetup
from elastane.errors import ElastaneError
from elastane.process.streams import GroupStreams
from elastane.process.worker_environment import WorkerFacts, worker_environment
from elastane.protocol.model import Assignment, Fence

_log = logging.getLogger("elastane.streams")
# A class may create folders on a slow network file system, which takes longer than a local look-up.
_CHOOSE_S = 10.0


class Outputs:
    """The streams of one group; workers that start under one fence share them."""

    def __init__(self, setup: GroupSetup) -> None:
        self._setup = setup
        self._streams: dict[Fence, GroupStreams] = {}

    async def begin(self, place: Assignment) -> GroupStreams:
        """Return the streams for a start, created at its first call."""
        if place.fence not in self._streams:
            run, setup = self._setup.run, self._setup
            created = GroupStreams(setup.logs, run.job, run.node_id, place.fence, setup.offload)
            self._streams[place.fence] = created
            await choose_files(setup, place, created)
        return self._streams[place.fence]

    def remove_unused(self, used: Iterable[GroupStreams]) -> list[GroupStreams]:
        """Remove and return the streams that no worker uses; the caller finishes them."""
        in_use = {id(streams) for streams in used}
        ended = {f: streams for f, streams in self._streams.items() if id(streams) not in in_use}
        for fence in ended:
            del self._streams[fence]
        return [*ended.values()]

    async def finish(self) -> None:
        """Print what the workers wrote last, after they have ended."""
        await asyncio.gather(*(streams.finish() for streams in self._streams.values()))


async def choose_files(setup: GroupSetup, assignment: Assignment, streams: GroupStreams) -> None:
    """Ask the class that --logs-specs names, if any."""
    if setup.choose_files is None:
        return
    envs = {
        local_rank: worker_environment(
            setup.environment,
            assignment,
            setup.run,
            WorkerFacts(local_rank=local_rank, leash=setup.leash),
        )
        for local_rank in range(setup.run.local_world_size)
    }
    try:
        streams.choose(await setup.offload.run(partial(setup.choose_files, envs), _CHOOSE_S))
    except ElastaneError as error:
        _log.warning("%s; --log-dir and --redirects decide instead [%s]", error.what, error.slug)
    except TimeoutError:
        _log.warning(
            "--logs-specs: no answer within %g s; --log-dir and --redirects decide instead"
            " [logs-specs]",
            _CHOOSE_S,
        )
