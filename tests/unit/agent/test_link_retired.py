"""An agent that knows its job's outcome neither looks for a coordinator nor starts one."""

import asyncio

import pytest

from elastane.agent.link import CoordinatorLink
from elastane.protocol.events import Linked, MessageReceived, Unlinked
from elastane.protocol.messages import Alive
from elastane.protocol.model import JobSpec

SPEC = JobSpec(job="j", min_nodes=1, max_nodes=2, max_restarts=3)


class Session:
    reason = "the coordinator has ended"

    def __init__(self, *messages):
        self._messages = [*messages, None]

    async def receive(self):
        return self._messages.pop(0)

    def close(self, reason):
        """Do nothing."""


class Locator:
    def __init__(self):
        self.asked = 0

    async def locate(self, *, linked=False):
        self.asked += 1
        return "127.0.0.1", 1

    def found(self):
        """Ignore the address."""


@pytest.mark.parametrize("authority", [True, False])
def test_a_retired_link_does_not_seek_the_coordinator_of_a_job_that_has_ended(authority):
    locator, posted = Locator(), []

    async def dial(host, port):
        return Session(Alive(authority=authority))

    def post(event):
        posted.append(event)
        if isinstance(event, MessageReceived):
            link.retire()
        if isinstance(event, Unlinked):
            ended.set()

    async def scenario():
        link_task = asyncio.ensure_future(link.run())
        await ended.wait()
        for _ in range(5):
            await asyncio.sleep(0)  # It would ask for the next coordinator by now.
        link_task.cancel()
        await asyncio.gather(link_task, return_exceptions=True)

    ended = asyncio.Event()
    link = CoordinatorLink(locator, dial, post, SPEC)
    asyncio.run(scenario())
    assert locator.asked == 1
    assert [type(event) for event in posted] == [Linked, MessageReceived, Unlinked]
