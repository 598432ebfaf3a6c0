"""Support for hostile tests: a job that trains, checks of its health, and seeded randomness.

HOSTILE_SEED replays a run; HOSTILE_COUNT says how many connections the soak makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from jobs import Agent, Job, until
from supervise import children

from elastane.protocol.log_events import EventKind

TOKEN = "correct horse battery staple"
# Two agents, four processes with torch, and the attackers share two cores here.
BREAK_MAX_S = 15.0
RSS_GROWTH_BYTES_MAX = 12 << 20
# Two agents, two orphan reapers, two zygotes, a store's process, and one for the next store.
CONTROL = 8
_AT_ONCE = 48
# What a change of membership, or a loss of anything, would be told as.
_CHANGES = (
    EventKind.ROUND_SETTLED,
    EventKind.ROUND_RESUMED,
    EventKind.INCIDENT,
    EventKind.DRAIN_STARTED,
    EventKind.RESTART,
    EventKind.COORDINATOR_STARTED,
    EventKind.COORDINATOR_STOPPED,
    EventKind.COORDINATOR_AWAY,
    EventKind.JOB_ENDED,
    EventKind.WORKER_EXITED,
)


def dice(name: str, default: str = "4") -> random.Random:
    """Return the random generator of one test; its seed is printed, and shown after a failure."""
    seed = os.environ.get("HOSTILE_SEED", default)
    print(f"replay with HOSTILE_SEED={seed}")
    return random.Random(f"{seed} {name}")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def processes_of(job: Job) -> list[int]:
    """Return all processes of the job by its process mark."""
    from jobs import left_over

    return [pid for pid, _ in left_over(job.mark)]


def listening(pids: Iterable[int]) -> set[int]:
    """Return the TCP ports on which these processes listen."""
    inodes = {inode for pid in pids for kind, inode in links(pid) if kind == "socket"}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def links(pid: int) -> set[tuple[str, str]]:
    """Return kind and inode of a process's sockets and pipes."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"(\w+):\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                if match:
                    found.add((match[1], match[2]))
    return found


class Tap:
    """A proxy that records the traffic of one agent and its coordinator, and changes nothing."""

    def __init__(self, port: int) -> None:
        self.to_port = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.said: dict[str, bytearray] = {"agent": bytearray(), "coordinator": bytearray()}
        self.pieces: list[bytes] = []
        self.live: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.to_port))
            except OSError:
                return
            pair = (near, far)
            self.live.append(pair)
            for source, sink, name in ((near, far, "agent"), (far, near, "coordinator")):
                words = (pair, source, sink, name)
                threading.Thread(target=self._copy, args=words, daemon=True).start()

    def _copy(self, pair: object, source: socket.socket, sink: socket.socket, name: str) -> None:
        try:
            while data := source.recv(1 << 16):
                if len(self.said[name]) < 1 << 16:
                    self.said[name] += data
                    if name == "agent":
                        self.pieces.append(data)
                sink.sendall(data)
        except OSError:
            pass
        if pair not in self.live and name == "agent":
            return  # cut() keeps the coordinator's end
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # close() alone would wait for the other thread

    def cut(self) -> None:
        """Break the agent's current connections; new connections are carried as before.

        The coordinator sees a newer connection of the same agent, not a broken one. A broken one is
        a departure after REJOIN_GRACE_S, in which an agent on a busy host may not be back.
        """
        cut, self.live = self.live, []
        for near, _ in cut:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()


class Victim:
    """A job of two agents whose workers make steps, and its observed state."""

    def __init__(self, folder: Path, *, own_token_of_b: bool = False, **env: str) -> None:
        self.token = folder / "token"
        self.token_of_b = folder / "token.b" if own_token_of_b else self.token
        for path in (self.token, self.token_of_b):
            path.write_text(f"{TOKEN}\n")
            path.chmod(0o600)
        self.job = Job(folder / "job", options=("--token-file", str(self.token)))
        self.env = env
        self.tap: Tap | None = None

    def __enter__(self) -> Victim:
        self.job.__enter__()
        self.a = self.job.start("a", env=self.env)
        until(lambda: listens(self.job.port), "the coordinator listens")
        self.tap = Tap(self.job.port)
        endpoint = f"127.0.0.1:{self.tap.port}"
        own = ("--rdzv-conf", "is_host=false", "--token-file", str(self.token_of_b))
        self.b = self.job.start("b", "--rdzv-endpoint", endpoint, *own)
        self.job.wait_step(world=2, count=20)
        # The process for the next store comes last, and its descriptor is one of the agent's.
        until(lambda: len(self.control()) == CONTROL, "all processes of both agents run")
        return self

    def __exit__(self, *how) -> None:
        if self.tap is not None:
            self.tap.close()
        self.job.__exit__(*how)

    @property
    def port(self) -> int:
        return self.job.port

    def control(self) -> set[int]:
        """Return the agents and their children that are no workers."""
        agents = {one.process.pid for one in (self.a, self.b)}
        workers = {step.pid for step in self.job.seen()}
        return agents.union(*(children(pid) for pid in agents)) - workers

    def watch(self) -> Watch:
        return Watch(self)

    def changes(self) -> list[str]:
        return [f"{e.kind}: {e.reason}" for e in self.job.events(*_CHANGES)]

    def take_in(self, node: str) -> Agent:
        """Let an honest agent join, and replace another one."""
        agent = self.job.start(node)
        self.job.wait_event(EventKind.NODE_JOINED, node)
        return agent


class Watch:
    """A context around an attack; it checks that the job keeps training and leaks nothing."""

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        self.pid = victim.a.process.pid

    def __enter__(self) -> Watch:
        self.changes = self.victim.changes()
        self.descriptors = descriptors(self.pid)
        self.rss_bytes = resident_bytes(self.pid)
        self.began_s = time.time()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        now_s = time.time()
        job = self.victim.job
        job.wait("steps go on", lambda seen: seen[-1].time_s > now_s)
        assert self.victim.changes() == self.changes, "the job noticed"
        gap_s = longest_break_s(s.time_s for s in job.seen() if s.time_s >= self.began_s)
        grown_bytes = resident_bytes(self.pid) - self.rss_bytes
        print(f"longest break {gap_s:.2f} s, memory {grown_bytes >> 10:+} KiB")
        assert gap_s < BREAK_MAX_S
        assert grown_bytes < RSS_GROWTH_BYTES_MAX
        assert "Traceback" not in self.victim.a.words + self.victim.b.words
        until(lambda: descriptors(self.pid) <= self.descriptors, "descriptors return")


def longest_break_s(times: Iterable[float]) -> float:
    ordered = sorted(times)
    return max((b - a for a, b in itertools.pairwise(ordered)), default=float("inf"))


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


Attack = Callable[[random.Random], Awaitable[None]]


def storm(
    rng: random.Random,
    attacks: list[Attack],
    count: int,
    at_once: int = _AT_ONCE,
    within_s: float = 12.0,
) -> dict[str, Counter[str]]:
    """Run `count` attacks, some at a time, in the order of the seed.

    An attack may end by any answer or by a closed connection. Return how each ended.
    """
    base = rng.random()
    ends: dict[str, Counter[str]] = {attack.__name__: Counter() for attack in attacks}

    async def play() -> None:
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for number in left:
                own = random.Random(f"{base} {number}")
                attack = own.choice(attacks)
                end = "done"
                try:
                    async with asyncio.timeout(within_s):
                        await attack(own)
                except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError too
                    end = type(error).__name__
                ends[attack.__name__][end] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))

    asyncio.run(play())
    print(*(f"{name} {dict(found)}" for name, found in ends.items()), sep="\n")
    refused = sum(found["ConnectionRefusedError"] for found in ends.values())
    assert not refused, f"{refused} attacks found nobody there"
    return ends
