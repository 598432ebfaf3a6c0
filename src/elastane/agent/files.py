"""Where each worker's output goes, where a LogsSpecs class is to say it.

It gives the class the environments that the workers will have, as torch does, off the event loop
and within a bound. A class that fails, hangs or leaves a worker out costs nobody his job: the plan
of the options is used, and one warning says why.
"""

from __future__ import annotations

import logging
from functools import partial

from elastane.agent.environment import WorkerFacts, worker_environment
from elastane.agent.groupsetup import GroupSetup
from elastane.core.model import Assignment
from elastane.errors import ElastaneError
from elastane.runtime.streams import GroupStreams

_log = logging.getLogger("elastane.streams")
# A class may make folders on a slow network; longer than one look at a folder of our own.
_CHOOSE_S = 10.0


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
