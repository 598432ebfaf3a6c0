"""A local worker group around a process that a test controls."""

import asyncio
from types import SimpleNamespace

from elastane.agent import workers
from elastane.agent.process_group_store import OfferedPort
from elastane.agent.worker import GroupSetup
from elastane.process.streams.plan import LogPlan
from elastane.process.worker_environment import RunFacts
from elastane.protocol.events import GroupGone
from elastane.protocol.model import Assignment, Fence

ASSIGNMENT = Assignment(
    fence=Fence(1, 0),
    node_rank=0,
    nodes=1,
    rank_base=0,
    world_size=1,
    role_rank_base=0,
    role_world_size=1,
    master_addr="127.0.0.1",
    master_port=1,
    agent_store=False,
    restarts_used=0,
    max_restarts=0,
    reason="test",
)


class Unkillable:
    pid = 1 << 30
    exit_code = None

    def __init__(self):
        self.signals = []

    async def wait(self):
        await asyncio.Event().wait()

    def send_signal(self, signum):
        self.signals.append(signum)

    kill_group = send_signal


class Posted(list):
    """What a group posts, and the end of it."""

    def __init__(self):
        super().__init__()
        self.ended = asyncio.Event()

    def append(self, event):
        super().append(event)
        if isinstance(event, GroupGone):
            self.ended.set()


def group_of(process, posted, stuck_s):
    async def spawn(command):
        return process

    warm = asyncio.Event()
    warm.set()
    setup = GroupSetup(
        kind="script",
        target="x.py",
        args=(),
        cwd="/",
        environment={},
        process_mark="",
        run=RunFacts("job", "host-a", "default", 1),
        logs=LogPlan("/dev/null"),
        spawner=SimpleNamespace(warm=warm, spawn=spawn),
        stuck_s=stuck_s,
    )
    port = OfferedPort(listening=False)
    port.open()
    return workers.LocalWorkerGroup(setup, ASSIGNMENT, port, posted.append)
