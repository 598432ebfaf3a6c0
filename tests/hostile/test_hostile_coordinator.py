"""Attacks on a coordinator while its job trains do not affect the job."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest
from attackers import Insiders, Outsiders
from hostile_support import Victim, dice, storm

from elastane.coordinator.server import MESSAGES_BURST_MAX, MESSAGES_PER_S_MAX
from elastane.process.rpc.listener import UNPROVEN_MAX
from elastane.protocol.messages import Query, Report
from elastane.protocol.model import Fence


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    with Victim(tmp_path_factory.mktemp("victim")) as one:
        yield one


def outsiders(victim):
    return Outsiders(
        victim.port, victim.job.name, bytes(victim.tap.said["agent"]), list(victim.tap.pieces)
    )


def spec_of(victim):
    """Return the job's specification by hand, since the recorded Join of its agents is sealed."""
    from elastane.options.build import build
    from elastane.options.parser import parse

    words = victim.job.command("x", 1, ())
    return build(parse(words[words.index("run") + 1 :], {}), {}).spec


def insiders(victim):
    last = victim.job.seen()[-1]
    return Insiders(victim.port, spec_of(victim), ("a", "b"), Fence(last.round, last.attempt))


def test_foreign_peers_do_not_disturb_the_job(victim):
    rng = dice("strangers")
    with victim.watch():
        storm(rng, outsiders(victim).attacks(), 2500)


def test_insiders_that_break_the_protocol_or_lie_are_not_noticed(victim):
    rng = dice("insiders")
    with victim.watch():
        storm(rng, insiders(victim).attacks(), 2500)


def test_the_messages_of_one_session_are_handled_at_a_limited_rate(victim):
    """Send two bursts of queries at once: the second one waits, and no other session does."""
    count, within_s = 2 * MESSAGES_BURST_MAX, 1.0

    async def ask():
        heard = 0
        async with insiders(victim).session(dice("rate")) as one:
            await one.send(*[Query()] * count)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while heard < count:
                        assert isinstance(await one.answer(), Report)
                        heard += 1
        return heard

    with victim.watch():
        heard = asyncio.run(ask())
    assert MESSAGES_BURST_MAX / 2 < heard < MESSAGES_BURST_MAX + 2 * within_s * MESSAGES_PER_S_MAX


def test_a_crowd_beyond_the_bounds_does_not_block_agents(victim):
    """Open more connections than may be unproven at once; none sends a complete message."""
    with victim.watch(), contextlib.ExitStack() as stack:
        for number in range(UNPROVEN_MAX * 2):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", victim.port))
            with contextlib.suppress(OSError):
                sock.send(b"ELASTANE\r"[: number % 9])
        rng = dice("crowd")
        storm(rng, [insiders(victim).chatter, insiders(victim).impostor], 20, at_once=4)


def test_afterwards_an_honest_agent_joins_and_takes_a_place(victim):
    job = victim.job
    with victim.watch():
        storm(dice("before"), [*outsiders(victim).attacks(), *insiders(victim).attacks()], 300)
    agent = victim.take_in("c")
    before = job.seen()[-1]
    victim.b.send(signal.SIGTERM)
    job.wait_step(world=2, fence=(before.round, before.attempt))
    assert {s.node for s in job.seen() if s.round > before.round} == {"a", "c"}
    assert agent.is_alive
    assert victim.b.wait() == 143


@pytest.mark.soak
def test_a_long_storm_is_not_noticed(tmp_path):
    count = int(os.environ.get("HOSTILE_COUNT", "100000"))
    with Victim(tmp_path) as victim:
        rng = dice("soak", default=str(os.getpid()))
        with victim.watch():
            storm(rng, [*outsiders(victim).attacks(), *insiders(victim).attacks()], count)
