"""A link reports if the last coordinator's address refuses connections, since it has ended then."""

import asyncio

import pytest

from elastane.agent.link import CoordinatorLink
from elastane.errors import MembershipError
from elastane.process import rpc
from elastane.protocol.events import Unlinked
from elastane.protocol.model import JobSpec

SPEC = JobSpec(job="j", min_nodes=1, max_nodes=2, max_restarts=3)
HERE, ELSEWHERE = ("127.0.0.1", 1), ("127.0.0.1", 2)


class EndedSession:
    reason = "the connection was closed"

    async def receive(self):
        return None

    def close(self, reason):
        """Do nothing."""


class Places:
    """Locates the coordinator at one address after another, and records reports."""

    def __init__(self, *places):
        self._places, self.told = [*places], []

    async def locate(self, *, linked=False):
        return self._places.pop(0) if len(self._places) > 1 else self._places[0]

    def found(self):
        """Ignore the address."""

    def refused(self, host, port):
        self.told.append((host, port))


async def refuses(host, port):
    """Dial a closed port, which the kernel refuses."""
    return await rpc.connect(host, 1, job="j", secret=b"s", tls=None, timeout_s=5.0)


async def silent(host, port):
    error = MembershipError("no answer", slug="endpoint-timeout", expected="", next_step="")
    raise error from TimeoutError()


def told_after(places, dials):
    """Return the refusals that a link reports; a dial of None is a session that ends at once."""
    locator, left, done = Places(*places), [*dials], asyncio.Event()

    async def dial(host, port):
        how = left.pop(0) if left else silent
        return EndedSession() if how is None else await how(host, port)

    def post(event):
        if isinstance(event, Unlinked) and not left:
            done.set()

    async def scenario():
        task = asyncio.ensure_future(CoordinatorLink(locator, dial, post, SPEC).run())
        await asyncio.wait_for(done.wait(), 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    return locator.told


def test_the_address_of_the_last_session_refuses_a_connection():
    assert told_after([HERE], [None, refuses]) == [HERE]


@pytest.mark.parametrize(
    ("places", "dials"),
    [
        ([HERE], [refuses]),  # there was no session: that coordinator may never have lived here
        ([HERE], [None, silent]),  # a host that is away, or a process that is stopped
        ([HERE, ELSEWHERE], [None, refuses]),  # another coordinator's address
    ],
)
def test_silence_or_another_address_does_not_prove_an_end(places, dials):
    assert told_after(places, dials) == []
