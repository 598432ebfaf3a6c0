"""The coordinator's server: unproven, slow and silent peers, crowds, and its own faults."""

import asyncio
import socket
import time

import pytest
from rpc_support import JOB, SECRET, Desk, ask, descriptors, play, until

from elastane.coordinator import query
from elastane.process.rpc import link as link_module
from elastane.process.rpc import listener as listener_module
from elastane.process.rpc.link import INBOX_BYTES_MAX
from elastane.protocol.events import Received, Tick
from elastane.protocol.messages import Heartbeat, Leave, Ready
from elastane.protocol.wire import ClientHandshake


def raw(port):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


def test_sessions_are_numbered_once_and_say_when_they_end():
    async def scenario():
        async with Desk() as desk:
            for number in (1, 2):
                session = await desk.join()
                assert await ask(session, f"echo {number}") == str(number)
                session.close("done")
                await until(lambda n=number: len(desk.machine.broken()) == n, "the end was told")
            assert [b.session for b in desk.machine.broken()] == [1, 2]
            received = desk.machine.seen(Received)[0]
            assert received.peer_host == received.local_host == "127.0.0.1"

    play(scenario)


def test_the_last_message_of_a_session_is_handled_before_its_end():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            for number in range(50):
                session.send(Leave(f"tell {number}"))
            session.close("done")
            await until(desk.machine.broken, "the end was told")
            assert desk.machine.words() == [f"tell {n}" for n in range(50)]
            assert desk.machine.events[-1] == desk.machine.broken()[0]

    play(scenario)


def test_three_hundred_at_once_are_served_and_leave_nothing_behind():
    before = descriptors()

    async def scenario():
        async with Desk() as desk:
            sessions = await asyncio.gather(*(desk.join() for _ in range(300)))
            answers = await asyncio.gather(
                *(ask(session, f"echo {i}") for i, session in enumerate(sessions))
            )
            assert answers == [str(i) for i in range(300)]
            assert desk.coordinator.statistics()["sessions"] == 300
            for session in sessions:
                session.close("done")
            await until(lambda: len(desk.machine.broken()) == 300, "all ends were told")
            assert desk.coordinator.statistics()["sessions"] == 0

    play(scenario)
    assert descriptors() <= before  # what an earlier test left may have gone


def test_slow_unproven_connections_are_bounded_and_agents_pass(monkeypatch):
    monkeypatch.setattr(listener_module, "UNPROVEN_MAX", 16)
    monkeypatch.setattr(listener_module, "UNPROVEN_TIMEOUT_S", 0.1)
    before = descriptors()

    async def scenario():
        async with Desk() as desk:
            unproven = [raw(desk.port) for _ in range(60)]
            hello = ClientHandshake(JOB, SECRET, b"n" * 32).start()
            for sock in unproven:
                sock.send(hello[:5])
            await until(lambda: desk.coordinator.statistics()["unproven"] == 16, "the bound")
            session = await desk.join()
            assert await ask(session, "echo past them") == "past them"
            assert desk.coordinator.statistics()["unproven"] <= 16
            for sock in unproven:
                sock.close()
            await until(lambda: desk.coordinator.statistics()["unproven"] == 0, "all gone")
            assert len(desk.refusals()) <= 10

    play(scenario)
    assert descriptors() <= before  # what an earlier test left may have gone


def test_an_unproven_connection_that_trickles_bytes_is_cut_in_time(monkeypatch):
    monkeypatch.setattr(link_module, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def scenario():
        async with Desk() as desk:
            sock = raw(desk.port)
            hello = ClientHandshake(JOB, SECRET, b"n" * 32).start()
            for byte in hello:
                try:
                    sock.send(bytes([byte]))
                except (BrokenPipeError, ConnectionResetError):
                    break
                await asyncio.sleep(0.02)
            else:
                pytest.fail(f"{len(hello)} bytes were taken one after the other")
            await until(lambda: len(desk.refusals()) == 1, "told")
            assert "no handshake within" in desk.refusals()[0]
            sock.close()

    play(scenario)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 40, b"\0" * 9000])
def test_garbage_closes_the_socket_and_logs_one_line(garbage):
    async def scenario():
        async with Desk() as desk:
            sock = raw(desk.port)
            sock.send(garbage)
            await until(lambda: len(desk.refusals()) == 1, "told")
            assert "127.0.0.1" in desk.refusals()[0]
            await until(lambda: hung_up(sock), "closed")
            assert desk.machine.events == []
            sock.close()

    play(scenario)


def hung_up(sock):
    try:
        return sock.recv(1000) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_port_probe_is_not_logged():
    async def scenario():
        async with Desk() as desk:
            raw(desk.port).close()
            session = await desk.join()
            assert await ask(session, "echo x") == "x"
            assert desk.refusals() == []

    play(scenario)


def test_refusals_are_logged_ten_times_and_then_counted():
    async def scenario():
        async with Desk() as desk:
            for _ in range(40):
                sock = raw(desk.port)
                sock.send(b"nonsense")
                await until(lambda s=sock: hung_up(s), "closed")
                sock.close()
            assert len(desk.refusals()) == 10

    play(scenario)


def test_garbage_on_a_proven_session_only_ends_that_session():
    async def scenario():
        async with Desk() as desk:
            good, bad = await desk.join(), await desk.join()
            assert await ask(good, "echo 1") == "1"
            bad.link._transport.write(b"\xff" * 100)
            await until(desk.machine.broken, "the end was told")
            assert desk.machine.broken()[0].session == 2
            assert "larger than any" in desk.machine.broken()[0].reason
            assert await ask(good, "echo 2") == "2"

    play(scenario)


def test_a_session_that_never_reads_is_cut_and_others_continue():
    async def scenario():
        async with Desk() as desk:
            deaf, good = await desk.join(), await desk.join()
            deaf.link._transport.pause_reading()
            deaf.send(Leave("flood 400"))
            assert await ask(good, "echo still here") == "still here"
            await until(desk.machine.broken, "the end was told")
            assert "does not read" in desk.machine.broken()[0].reason
            deaf.link.abort("over")

    play(scenario)


def test_a_message_too_large_for_the_wire_breaks_that_session_only():
    async def scenario():
        async with Desk() as desk:
            one, other = await desk.join(), await desk.join()
            assert await ask(one, "huge") is None
            assert await ask(other, "echo fine") == "fine"
            assert "of 5242" in desk.machine.broken()[0].reason

    play(scenario)


def test_a_chatty_session_delays_others_by_a_message_and_is_slowed_to_its_rate():
    async def scenario():
        async with Desk() as desk:
            chatty, quiet = await desk.join(), await desk.join()
            for _ in range(20_000):
                chatty.send(Ready())
            await until(lambda: len(desk.machine.events) > 100, "the flood is on")
            assert await ask(quiet, "echo quick") == "quick"
            assert len(desk.machine.events) < 1000  # a burst, and what a moment allows
            chatty.link.abort("enough")

    play(scenario)


def test_queued_messages_are_bounded_and_none_is_lost():
    async def scenario():
        durable = asyncio.Event()

        async def save(_):
            await durable.wait()

        async with Desk(save=save) as desk:
            session = await desk.join()
            assert await ask(session, "save") == "before"
            link = next(iter(desk.coordinator._numbers))
            words = "tell " + "x" * 20_000
            for _ in range(300):
                session.send(Leave(words))
            await until(lambda: link._paused, "the coordinator reads no further")
            for _ in range(50):
                await asyncio.sleep(0)
            assert link._codec.waiting_bytes < INBOX_BYTES_MAX + 2 * link_module.READ_BYTES
            durable.set()
            await until(lambda: desk.machine.words().count(words) == 300, "all of it came")

    play(scenario)


def test_many_messages_do_not_block_the_event_loop():
    async def scenario():
        async with Desk() as desk:
            sessions = await asyncio.gather(*(desk.join() for _ in range(20)))
            for session in sessions:
                for _ in range(300):
                    session.send(Ready())
            seen, most = 0, 0
            while seen < 6000:
                await asyncio.sleep(0)
                most = max(most, len(desk.machine.events) - seen)
                seen = len(desk.machine.events)
            assert most <= 100, f"{most} events in one turn of the loop"

    play(scenario)


def test_a_tick_comes_when_the_machine_requested_it():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            wake_s = time.monotonic() + 0.05
            desk.machine.wake_s = wake_s
            assert await ask(session, "echo x") == "x"
            await until(lambda: desk.machine.seen(Tick), "a tick")
            assert wake_s <= time.monotonic()

    play(scenario)


def test_constant_ticks_do_not_starve_sessions():
    async def scenario():
        async with Desk() as desk:
            type_of = type(desk.machine)

            class Restless(type_of):
                wake_s = 0.0

                def __init__(self):
                    self.events = []
                    self.effects_of_tick = []

                def handle(self, event, now_s):
                    return [] if isinstance(event, Tick) else super().handle(event, now_s)

            desk.coordinator._machine = Restless()
            session = await desk.join()
            assert await ask(session, "echo awake") == "awake"

    play(scenario)


def test_a_status_query_gets_one_answer():
    async def scenario():
        async with Desk() as desk:
            report = await query("127.0.0.1", desk.port, JOB, SECRET)
            assert report.reason == "all is well"
            await until(desk.machine.broken, "the end was told")

    play(scenario)


def test_a_half_open_session_ends():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            session.send(Heartbeat())
            await until(lambda: desk.machine.events, "heard")
            session.link._transport.write_eof()
            await until(desk.machine.broken, "the end was told")
            assert await session.receive() is None

    play(scenario)


def test_memory_returns_after_crowds_and_garbage():
    async def scenario():
        async with Desk() as desk:

            async def crowd():
                ends = len(desk.machine.broken())
                sessions = await asyncio.gather(*(desk.join() for _ in range(100)))
                for session in sessions:
                    session.send(Leave("tell " + "x" * 30_000))
                    session.close("done")
                await until(lambda: len(desk.machine.broken()) == ends + 100, "ends")
                desk.machine.events.clear()
                desk.events.clear()

            await crowd()
            before_bytes = resident_bytes()
            for _ in range(5):
                await crowd()
            assert resident_bytes() - before_bytes < 8 << 20
            coordinator = desk.coordinator
            assert not coordinator._numbers and not coordinator._turns._waiting

    play(scenario)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
