"""Where each worker's output goes: the streams of a group's starts.

Owns them from the first start under a fence until no worker uses them. Where a LogsSpecs class is
to say where output goes, it gives the class the environments that the workers will have, as torch
does, off the event loop and within a bound. A class that fails, hangs or leaves a worker out costs
nobody his job: the plan of the options is used, and one warning says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from elastane.agent.group_setup import GroupSetup
from elastane.errors import ElastaneError
from elastane.process.streams import GroupStreams
from elastane.process.worker_environment import WorkerFacts, worker_environment
from elastane.protocol.model import Assignment, Fence

_log = logging.getLogger("elastane.streams")
# A class may make folders on a slow network; longer than one look at a folder of our own.
_CHOOSE_S = 10.0


class Outputs:
    """The streams of one group; those of workers that start under one fence are the same."""

    def __init__(self, setup: GroupSetup) -> None:
        self._setup = setup
        self._streams: dict[Fence, GroupStreams] = {}

    async def begin(self, place: Assignment) -> GroupStreams:
        """Return the streams of a start."""
        if place.fence not in self._streams:
            run, setup = self._setup.run, self._setup
            made = GroupStreams(setup.logs, run.job, run.node_id, place.fence, setup.offload)
            self._streams[place.fence] = made
            await choose_files(setup, place, made)
        return self._streams[place.fence]

    def let_go(self, used: Iterable[GroupStreams]) -> list[GroupStreams]:
        """Return those that are not used any more, for the last time; they are to be finished."""
        kept = {id(streams) for streams in used}
        ended = {f: streams for f, streams in self._streams.items() if id(streams) not in kept}
        for fence in ended:
            del self._streams[fence]
        return [*ended.values()]

    async def finish(self) -> None:
        """Show what the workers wrote last, once they are gone."""
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
