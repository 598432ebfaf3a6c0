"""A coordinator whose host is no member: the leadership of an agent, without its workers.

Takes the options of `elastane run`. On SIGTERM it resigns the leadership, as an agent does.
"""

import asyncio
import contextlib
import signal
import sys

from elastane.coordinator.host import CoordinatorHost
from elastane.coordinator.leadership import EndpointLeadership, StoreLeadership
from elastane.errors import ElastaneError
from elastane.observe.events import EventLog
from elastane.options.build import build
from elastane.options.parser import parse
from elastane.process import environment
from elastane.process.endpoint import Endpoint
from elastane.process.rpc import Access
from elastane.protocol.log_events import LogEvent
from elastane.protocol.wire import derive_secret
from elastane.stores.jobs import JobKeys
from elastane.stores.registry import make_store


async def main() -> None:
    environ = environment.snapshot()
    config = build(parse(sys.argv[1:], environ), environ)
    spec, meeting = config.spec, config.rendezvous
    events = EventLog(config.logs.base_dir, spec.job, "lone", "lone")

    def tell(event: LogEvent) -> None:
        events.log(event, "coordinator")

    store = (
        make_store(meeting.backend, meeting.store, dict(meeting.store_conf))
        if meeting.store
        else None
    )
    keys = JobKeys(store, spec.job) if store is not None else None
    token = meeting.token or (await keys.token() if keys else "")
    secret = derive_secret(spec.job, token or None)
    hosting = CoordinatorHost(spec, Access(spec.job, secret, None), tell)
    leadership = (
        StoreLeadership(keys, "lone", config.node.local_addr or "127.0.0.1", hosting)
        if keys is not None
        else EndpointLeadership(Endpoint(meeting.host, meeting.port), True, hosting)
    )
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    with contextlib.suppress(ElastaneError):  # No coordinator is elected yet.
        await leadership.locate()
    running = asyncio.create_task(leadership.run())
    await asked.wait()
    await leadership.close(ended=False)
    running.cancel()
    events.close()


asyncio.run(main())
