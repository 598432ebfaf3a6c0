"""A host that stood still gives its coordinator, which may have stood still too, time to answer."""

import asyncio

import pytest

from elastane.agent.link import CoordinatorLink
from elastane.protocol.events import MessageReceived, Unlinked
from elastane.protocol.messages import Alive
from elastane.protocol.model import JobSpec

SPEC = JobSpec(job="j", min_nodes=1, max_nodes=2, max_restarts=3)


class Coordinator:
    """A session whose time is virtual; each entry of `waits_s` is how long a look lasts, at most.

    The last look ends with an answer, if it is not over before.
    """

    reason = ""

    def __init__(self, *waits_s):
        self.now_s, self._waits_s, self.posted, self.done = 0.0, [*waits_s], [], asyncio.Event()

    async def locate(self, *, linked=False):
        return "127.0.0.1", 1

    def found(self):
        """Ignore the session."""

    async def dial(self, host, port):
        return self

    async def receive(self):
        if not self._waits_s:
            await asyncio.Event().wait()
        self.now_s += self._waits_s.pop(0)
        # The loop reads the time once more; a look that is over ends here.
        for _ in range(3):
            await asyncio.sleep(0)
        if self._waits_s:
            await asyncio.Event().wait()
        return Alive(authority=True)

    def post(self, event):
        if isinstance(event, MessageReceived | Unlinked):
            self.posted.append(type(event))
            self.done.set()

    def reset(self, reason):
        """Ignore the reason."""

    close = reset


def first_event(*waits_s):
    """Return what a link posts first after looks of such durations."""

    async def scenario():
        coordinator = Coordinator(*waits_s)
        asyncio.get_running_loop().time = lambda: coordinator.now_s
        link = CoordinatorLink(coordinator, coordinator.dial, coordinator.post, SPEC)
        running = asyncio.ensure_future(link.run())
        await coordinator.done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return coordinator.posted[0]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("noticed_s", "answered_s", "event"),
    [
        (SPEC.timing.silence_s + 1.0, 0.5, MessageReceived),
        (SPEC.timing.silence_s + 1.0, 1.5, Unlinked),
        (SPEC.timing.silence_s + 0.01, 0.05, MessageReceived),
        (SPEC.timing.silence_s + 0.01, 0.5, Unlinked),
    ],
    ids=["stood still", "stood still, and no answer", "answers at once", "silent"],
)
def test_a_late_look_gives_more_time_for_the_answer(noticed_s, answered_s, event):
    assert first_event(noticed_s, answered_s) is event
