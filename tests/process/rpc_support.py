"""Support for tests of sessions: a listener, scripted rules, a bounded event loop."""

import asyncio
import gc
import os
import socket
import subprocess
import warnings

from reports import report_of

from elastane.coordinator import Coordinator
from elastane.process import rpc
from elastane.process.rpc import Access
from elastane.protocol.effects import Finished, Hangup, Persist, Send, WriteEvent
from elastane.protocol.events import Broken, Received, Tick
from elastane.protocol.log_events import EventKind, LogEvent
from elastane.protocol.messages import Leave, Query, Release
from elastane.protocol.model import JobRecord, JobSpec, Outcome
from elastane.protocol.wire import derive_secret

JOB = "digits"
SECRET = derive_secret(JOB, "open sesame")
RECORD = JobRecord(spec=JobSpec(job=JOB, min_nodes=1, max_nodes=1, max_restarts=0))
DONE = Outcome(ok=True, reason="as told")


def listener():
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setblocking(False)
    return sock


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def make_papers(folder):
    """Make a CA, a certificate of it, and a certificate of another CA."""
    for name in ("ca", "other"):
        openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")  # fmt: skip
    openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node",
            "-keyout", "node.key", "-out", "node.csr")  # fmt: skip
    openssl(folder, "x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "node.pem", "-days", "2")  # fmt: skip
    return folder


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


async def until(condition, what, within_s=60.0):
    """Wait for `condition`, which is tested every few turns of the loop."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"never came: {what}"
        await asyncio.sleep(0.005)


def play(scenario, within_s=90.0):
    """Run a scenario in its own loop; an error that only the loop gets fails the test."""
    unseen = []

    async def bounded():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        async with asyncio.timeout(within_s):
            await scenario()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        asyncio.run(bounded())
    assert not unseen, unseen


REPORT = report_of(JOB)


class Script:
    """Rules that do what a message says, and record all events."""

    def __init__(self):
        self.events = []
        self.wake_s = None
        self.effects_of_tick = []

    def handle(self, event, now_s):
        self.events.append(event)
        match event:
            case Received(session=session, message=Leave(reason=reason)):
                return self.obey(session, reason)
            case Received(session=session, message=Query()):
                return [Send(session, REPORT)]
            case Tick():
                self.wake_s = None
                return self.effects_of_tick
        return []

    def obey(self, session, order):
        verb, _, rest = order.partition(" ")
        match verb:
            case "echo":
                return [Send(session, Release(rest))]
            case "flood":
                return [Send(session, Release("x" * 100_000)) for _ in range(int(rest))]
            case "save":
                return [
                    Send(session, Release("before")),
                    Persist(RECORD),
                    Send(session, Release("after")),
                ]
            case "hangup":
                return [Send(session, Release("bye")), Hangup(session, "asked to")]
            case "finish":
                return [Send(session, Release("the end")), Finished(DONE)]
            case "tell":
                return [WriteEvent(LogEvent(kind=EventKind.WAITING, reason=rest))]
            case "huge":
                return [Send(session, Release("x" * (5 << 20)))]
        raise RuntimeError(f"a bug: {order}")

    def seen(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def broken(self):
        return self.seen(Broken)

    def words(self):
        return [e.message.reason for e in self.seen(Received) if isinstance(e.message, Leave)]


class Desk:
    """A coordinator at work, for `async with`."""

    def __init__(self, save=None, tls=None):
        self.machine = Script()
        self.events = []
        self.saved = []
        self.listener = listener()
        self.port = self.listener.getsockname()[1]
        self.coordinator = Coordinator(
            self.machine,
            self.listener,
            access=Access(JOB, SECRET, tls),
            save=save or self.remember,
            tell=self.events.append,
        )

    async def remember(self, record):
        self.saved.append(record)

    async def __aenter__(self):
        self.task = asyncio.ensure_future(self.coordinator.run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()

    async def join(self, **changes):
        options = {"job": JOB, "secret": SECRET, "tls": None, "timeout_s": 5.0} | changes
        return await rpc.connect("127.0.0.1", self.port, **options)

    def refusals(self):
        return [event.reason for event in self.events if event.kind == EventKind.NODE_REFUSED]


async def ask(session, order):
    """Send an order and return the words of the answer."""
    session.send(Leave(order))
    answer = await session.receive()
    return answer.reason if answer is not None else None
