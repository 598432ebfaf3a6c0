"""How the coordinator performs effects, and the ways in which it ends."""

import asyncio
import logging
import socket

import pytest
from rpc_support import DONE, Desk, ask, play, until

from elastane.errors import LeaseLostError, StoreError
from elastane.protocol.events import AuthorityChanged
from elastane.protocol.messages import Leave


def raw(port):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


def test_effects_and_events_wait_until_the_record_is_durable():
    async def scenario():
        durable = asyncio.Event()

        async def save(_):
            await durable.wait()

        async with Desk(save=save) as desk:
            session, other = await desk.join(), await desk.join()
            assert await ask(session, "save") == "before"
            other.send(Leave("echo later"))
            desk.coordinator.authority(False, "later too")
            await until(lambda: other.link._transport.get_write_buffer_size() == 0, "sent")
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(desk.machine.events) == 1
            durable.set()
            assert (await session.receive()).reason == "after"
            assert (await other.receive()).reason == "later"
            assert isinstance(desk.machine.events[1], AuthorityChanged)

    play(scenario)


def test_a_lost_lease_ends_the_coordinator_before_later_effects():
    async def scenario():
        async def save(_):
            raise LeaseLostError("another holds the lease", slug="lease-lost")

        async with Desk(save=save) as desk:
            session = await desk.join()
            session.send(Leave("save"))
            answers = [await session.receive()]
            while answers[-1] is not None:
                answers.append(await session.receive())
            assert [a.reason for a in answers if a] in ([], ["before"])
            assert await desk.task is None
            with pytest.raises(OSError):
                raw(desk.port).close()

    play(scenario)


def test_a_bug_in_the_rules_is_logged_and_ends_the_coordinator(caplog):
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            assert await ask(session, "no such verb") is None
            with pytest.raises(RuntimeError):
                await desk.task
            with pytest.raises(OSError):
                raw(desk.port).close()

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert "a bug: no such verb" in caplog.text and "Traceback" in caplog.text


def test_a_store_that_fails_ends_service_too():
    async def scenario():
        async def save(_):
            raise StoreError("no answer", slug="store-away")

        async with Desk(save=save) as desk:
            session = await desk.join()
            await ask(session, "save")
            assert await session.receive() is None
            with pytest.raises(StoreError):
                await desk.task

    play(scenario)


def test_the_jobs_end_reaches_every_agent_before_the_coordinator_ends():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            session.send(Leave("flood 30"))
            assert await ask(session, "finish")
            last = ""
            while (message := await session.receive()) is not None:
                last = message.reason
            assert last == "the end"
            assert await desk.task == DONE
            assert desk.coordinator.statistics()["closing"] == 0

    play(scenario)
