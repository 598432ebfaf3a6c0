"""Sessions over real sockets: every failure to open one, and every fault of a peer."""

import asyncio
import socket

import pytest
from rpc_support import JOB, SECRET, Desk, ask, listener, make_papers, play, until

from elastane.errors import (
    ConfigurationError,
    ElastaneError,
    MembershipError,
    RendezvousRefusedError,
    WireError,
)
from elastane.process import rpc
from elastane.process.rpc import link as link_module
from elastane.process.tls import TlsConfig
from elastane.protocol.messages import Leave
from elastane.protocol.wire import MAGIC, ServerHandshake, derive_secret


async def failure(host, port, **changes):
    options = {"job": JOB, "secret": SECRET, "tls": None, "timeout_s": 3.0} | changes
    with pytest.raises(ElastaneError) as caught:
        await rpc.connect(host, port, **options)
    assert caught.value.next_step
    return caught.value


class Impostor:
    """A server that treats each connection as the test requires."""

    def __init__(self, reply):
        self.reply = reply

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def serve(self, reader, writer):
        try:
            await self.reply(reader, writer)
        except asyncio.CancelledError:
            return  # else the streams of Python 3.11 complain to the loop
        finally:
            writer.close()

    async def __aexit__(self, *_):
        self.server.close()


def test_an_unserved_endpoint_is_named():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        error = await failure("127.0.0.1", port)
        assert error.slug == "endpoint-unserved" and f"127.0.0.1:{port}" in error.what
        assert isinstance(error, MembershipError)
        error = await failure("localhost", port)  # two addresses where there is IPv6
        assert error.slug == "endpoint-unserved"

    play(scenario)


def test_a_name_that_does_not_resolve_is_named():
    async def scenario():
        error = await failure("no-such-host.invalid", 29400)
        assert error.slug in ("endpoint-unresolvable", "endpoint-timeout")
        assert "no-such-host.invalid" in error.what

    play(scenario)


def test_an_endpoint_that_takes_connections_and_stays_silent_is_given_up_in_time():
    async def scenario():
        sock = listener()
        error = await failure("127.0.0.1", sock.getsockname()[1], timeout_s=0.2)
        sock.close()
        assert error.slug == "endpoint-timeout" and "0.2 s" in error.what

    play(scenario)


@pytest.mark.parametrize(
    ("bytes_sent", "slug"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not-a-coordinator"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "not-a-coordinator"),
        (b"", "endpoint-closed"),
        (MAGIC + b"\x07\x00\x01", "protocol-version"),
        (MAGIC + b"\x01\x00\x77", "bad-handshake"),
    ],
)
def test_another_protocol_at_the_endpoint_is_recognised(bytes_sent, slug):
    async def reply(reader, writer):
        await reader.read(10)
        writer.write(bytes_sent)

    async def scenario():
        async with Impostor(reply) as impostor:
            error = await failure("127.0.0.1", impostor.port)
        assert error.slug == slug
        final = slug == "protocol-version"
        assert isinstance(error, RendezvousRefusedError) == final

    play(scenario)


def test_another_job_or_token_is_refused_and_both_sides_say_why():
    async def scenario():
        async with Desk() as desk:
            error = await failure("127.0.0.1", desk.port, job="letters")
            assert error.slug == "wrong-job" and isinstance(error, RendezvousRefusedError)
            error = await failure("127.0.0.1", desk.port, secret=derive_secret(JOB, "guess"))
            assert error.slug == "wrong-token" and isinstance(error, RendezvousRefusedError)
            await until(lambda: len(desk.refusals()) == 2, "two refusals told")
            assert "'letters'" in desk.refusals()[0] and "127.0.0.1" in desk.refusals()[0]
            assert "another token" in desk.refusals()[1]
            assert desk.machine.events == []

    play(scenario)


def test_an_ended_session_yields_earlier_messages_and_then_none():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            assert await ask(session, "hangup") == "bye"
            assert await session.receive() is None
            assert session.closed and session.reason
            session.send(Leave("dropped"))  # harmless

    play(scenario)


def test_a_coordinator_that_breaks_the_protocol_is_an_error_of_the_wire():
    async def reply(reader, writer):
        shake = ServerHandshake(JOB, SECRET, b"s" * 32)
        while not shake.done:
            writer.write(shake.feed(await reader.read(1000)))
        writer.write(b"\x05\x00\x00\x00" + b"m" * 16 + b"hello")
        await reader.read(1000)

    async def scenario():
        async with Impostor(reply) as impostor:
            session = await rpc.connect("127.0.0.1", impostor.port, JOB, SECRET, None, 3.0)
            with pytest.raises(WireError):
                await session.receive()
            assert session.closed

    play(scenario)


def test_a_peer_that_does_not_read_is_cut_at_the_bound_of_bytes():
    async def reply(reader, writer):
        shake = ServerHandshake(JOB, SECRET, b"s" * 32)
        while not shake.done:
            writer.write(shake.feed(await reader.read(1000)))
        writer.transport.pause_reading()
        await asyncio.sleep(30)

    async def scenario():
        async with Impostor(reply) as impostor:
            session = await rpc.connect("127.0.0.1", impostor.port, JOB, SECRET, None, 3.0)
            for _ in range(200):
                session.send(Leave("x" * (1 << 20)))
                if session.closed:
                    break
            assert session.closed and "does not read" in session.reason
            assert await session.receive() is None

    play(scenario)


def test_a_peer_that_does_not_read_is_cut_at_the_bound_of_time(monkeypatch):
    monkeypatch.setattr(link_module, "SEND_STALL_S", 0.2)

    async def reply(reader, writer):
        shake = ServerHandshake(JOB, SECRET, b"s" * 32)
        while not shake.done:
            writer.write(shake.feed(await reader.read(1000)))
        writer.transport.pause_reading()
        await asyncio.sleep(30)

    async def scenario():
        async with Impostor(reply) as impostor:
            session = await rpc.connect("127.0.0.1", impostor.port, JOB, SECRET, None, 3.0)
            for _ in range(7):
                session.send(Leave("x" * (1 << 20)))
            await session.drain()
            assert session.closed and "waited" in session.reason

    play(scenario)


def test_drain_returns_once_the_kernel_has_everything():
    async def scenario():
        async with Desk() as desk:
            session = await desk.join()
            for _ in range(6):
                session.send(Leave("echo " + "x" * (1 << 20)))
            await session.drain()
            answers = [await session.receive() for _ in range(6)]
            assert [len(answer.reason) for answer in answers] == [1 << 20] * 6

    play(scenario)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return make_papers(tmp_path_factory.mktemp("tls"))


def test_with_tls_both_sides_verify_each_other(papers):
    good = TlsConfig(
        cert=str(papers / "node.pem"), key=str(papers / "node.key"), ca=str(papers / "ca.pem")
    )
    foreign = TlsConfig(
        cert=str(papers / "other.pem"), key=str(papers / "other.key"), ca=str(papers / "ca.pem")
    )
    doubter = TlsConfig(
        cert=str(papers / "node.pem"), key=str(papers / "node.key"), ca=str(papers / "other.pem")
    )

    async def scenario():
        async with Desk(tls=good) as desk:
            session = await desk.join(tls=good)
            assert await ask(session, "echo hello") == "hello"
            session.close("done")
            error = await failure("127.0.0.1", desk.port, tls=doubter)
            assert error.slug == "tls" and "certificate" in error.what
            error = await failure("127.0.0.1", desk.port, tls=foreign)
            assert isinstance(error, MembershipError)
            error = await failure("127.0.0.1", desk.port)  # plain to TLS
            assert error.slug in ("not-a-coordinator", "endpoint-closed")
            await until(lambda: len(desk.refusals()) >= 3, "refusals told")
            assert desk.coordinator.statistics()["unproven"] == 0
        async with Desk() as desk:
            error = await failure("127.0.0.1", desk.port, tls=good)  # TLS to plain
            assert error.slug in ("tls", "endpoint-closed")
            await until(lambda: len(desk.refusals()) == 1, "a refusal told")
            assert "TLS" in desk.refusals()[0]

    play(scenario)


def test_tls_files_that_cannot_be_used_are_named_at_the_start(tmp_path):
    async def scenario():
        error = await failure("127.0.0.1", 1, tls=TlsConfig(ca=str(tmp_path / "none.pem")))
        assert isinstance(error, ConfigurationError) and "none.pem" in error.what

    play(scenario)
