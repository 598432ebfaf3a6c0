"""Attacks through every other port and file of an agent do not affect its job."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time

import msgspec
import pytest
from attackers import connected, hear_end
from hostile_support import (
    CONTROL,
    Victim,
    descriptors,
    dice,
    links,
    listening,
    processes_of,
    storm,
)
from jobs import until
from ports import free_port
from supervise import agent, alive

from elastane.process import health
from elastane.process.timers import REQUEST_BYTES_MAX, WorkerTimer
from elastane.protocol.log_events import EventKind

# Beyond what a flood leaves open: the store's, a probe's, a log's.
_SPARE = 8


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    env = {
        "TORCHELASTIC_HEALTH_CHECK_PORT": str(free_port()),
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "TORCHELASTIC_TIMER_FILE": str(folder / "timers"),
    }
    with Victim(folder, **env) as one:
        yield one


class AtPort:
    """Attacks on a port of which only the number is known."""

    def __init__(self, port: int) -> None:
        self.port = port

    def attacks(self):
        return [self.garbage, self.http, self.slow, self.half_open, self.endless, self.probe]

    async def garbage(self, rng: random.Random) -> None:
        async with connected(self.port) as (reader, writer):
            writer.write(rng.randbytes(rng.choice([1, 40, 9000])))
            writer.write_eof()
            await hear_end(reader)

    async def http(self, rng: random.Random) -> None:
        lines = [b"GET / HTTP/1.1", b"POST / HTTP/9", b"\xff" * 50, b"Host: " + b"h" * 9000, b""]
        async with connected(self.port) as (reader, writer):
            writer.write(b"\r\n".join(rng.choices(lines, k=4)) + b"\r\n\r\n")
            writer.write_eof()
            await hear_end(reader)

    async def slow(self, rng: random.Random) -> None:
        async with connected(self.port) as (_, writer):
            for byte in b"GET / HT":
                writer.write(bytes([byte]))
                await writer.drain()

    async def half_open(self, rng: random.Random) -> None:
        async with connected(self.port) as (reader, writer):
            writer.write_eof()
            await hear_end(reader)

    async def endless(self, rng: random.Random) -> None:
        async with connected(self.port) as (_, writer):
            for _ in range(20):
                writer.write(b"x" * 10_000)
                await writer.drain()

    async def probe(self, rng: random.Random) -> None:
        async with connected(self.port):
            pass


def is_healthy(port):
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.settimeout(60)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return sock.recv(100).startswith(b"HTTP/1.1 200")


def test_the_health_port_answers_after_garbage_and_silent_peers(victim):
    port = int(victim.env["TORCHELASTIC_HEALTH_CHECK_PORT"])
    with victim.watch():
        storm(dice("health"), AtPort(port).attacks(), 400)
        assert is_healthy(port)


def test_held_connections_to_the_health_port_are_bounded_and_block_no_probe(victim):
    port = int(victim.env["TORCHELASTIC_HEALTH_CHECK_PORT"])
    pid = victim.a.process.pid
    before = descriptors(pid)
    with victim.watch(), contextlib.ExitStack() as stack:
        for number in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            with contextlib.suppress(OSError):
                sock.sendall(b"GET / HTTP"[: number % 9])
        assert is_healthy(port)
        assert descriptors(pid) <= before + health._CONNECTIONS_MAX + _SPARE


def test_garbage_and_timers_for_the_processes_of_others_end_no_process(victim):
    """A timer ends a worker of this agent only: not the agent, nor another agent's worker."""
    rng = dice("timers")
    workers = {step.node: step.pid for step in victim.job.seen()}
    bystander = subprocess.Popen(["sleep", "600"])
    others = [bystander.pid, victim.a.process.pid, victim.b.process.pid, workers["b"]]
    pieces = [
        b"[" * 4000,
        b"\xff" * 100,
        b'{"pid": -1}\n',
        b"{}\n" * 500,
        b'{"pid":' + b"9" * 300 + b"}\n",
    ]
    pieces += [_timer(pid, sig) for pid in others for sig in (9, 15, 19, -9, 64)]
    pieces += [_timer(pid, 9) for pid in (1 << 22, 1 << 31, 10**30)]
    pipe = os.open(victim.env["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY)
    try:
        with victim.watch():
            for _ in range(1000):
                data = rng.choice(pieces) + rng.choice([b"\n", b"", b"}"])
                os.write(pipe, data[:REQUEST_BYTES_MAX])
    finally:
        os.close(pipe)
        unharmed = [pid for pid in others if alive(pid)]
        bystander.kill()
        bystander.wait()
    assert unharmed == others


def _timer(pid, number):
    request = WorkerTimer(pid, "scope", time.time() - 5, number)
    return msgspec.json.encode(request) + b"\n"


def test_the_store_of_the_process_group_survives_foreign_bytes(victim):
    """Torch's store trusts every client; bytes of another protocol do not harm it."""
    workers = {step.pid for step in victim.job.seen()}
    own = [pid for pid in processes_of(victim.job) if pid not in workers]
    known = {victim.port, int(victim.env["TORCHELASTIC_HEALTH_CHECK_PORT"])}
    ports = listening(own) - known
    assert ports, "the store listens somewhere"
    with victim.watch():
        for port in sorted(ports):
            storm(dice(f"store {len(ports)}"), AtPort(port).attacks(), 60, within_s=2.0)


def test_a_worker_holds_no_descriptor_by_which_an_agent_is_steered(victim):
    """It has no zygote socket, no orphan reaper pipe, no session, and no other worker's output."""
    workers = {step.pid: step.node for step in victim.job.seen()}
    living = {pid for pid in workers if alive(pid)}
    control = victim.control()
    assert len(living) == 2 and len(control) == CONTROL
    for pid in living:
        streams = {
            (match[1], match[2])
            for fd in (0, 1, 2)
            if (match := re.fullmatch(r"(\w+):\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}")))
        }
        shared = links(pid) & set().union(*(links(other) for other in control))
        assert shared <= streams, f"worker {pid} of {workers[pid]}"


SCRIBBLE = """
import mmap
page = mmap.mmap(int(os.environ["ELASTANE_STATUS_PAGE_FD"]), 4096)
page[64:4096] = b"\\xff" * (4096 - 64)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
tell("scribbled")
hang()
"""


def test_a_worker_that_writes_garbage_to_its_page_does_not_end_its_agent(tmp_path):
    options = ("--nproc-per-node", "2", "--drain-timeout", "1", "--shutdown-timeout", "2")
    with agent(tmp_path, *options, body=SCRIBBLE) as one:
        one.told("scribbled.0.0")
        one.told("scribbled.1.0")
        until(lambda: len(one.events(EventKind.WORKERS_STARTED)) == 1, "they are told as started")
        one.send(signal.SIGTERM)
        assert one.wait() == 143, one.err
        assert "Traceback" not in one.err
        assert not one.events(EventKind.COORDINATOR_AWAY), "what it says crosses the wire"
        one.gone()
