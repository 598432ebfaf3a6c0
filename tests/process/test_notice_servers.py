"""Notices of clouds over real connections: servers as documented, and servers that misbehave."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from metadata_servers import FakeAws, FakeAzure, FakeGcp
from process_harness import eventually
from supervise import agent

from elastane.notices.aws import AwsMetadata
from elastane.notices.azure import AzureMetadata
from elastane.notices.dialogue import Ask, UnreadableAnswerError
from elastane.notices.gcp import maintenance, preemption
from elastane.notices.metadata import BODY_BYTES_MAX, MetadataReader, answer_of
from elastane.notices.rules import Address, read_sources

STEPS = """
    import elastane
    while not elastane.should_checkpoint():
        tell("up")
        time.sleep(0.01)
"""


def read(server, fake):
    """Hold one dialogue with a fake server."""
    (source,) = read_sources(f"aws:{fake.address}")
    return asyncio.run(MetadataReader(server, source.address).read())


def test_aws_with_expired_tokens_and_a_notice():
    with FakeAws() as fake:
        server = AwsMetadata()
        assert read(server, fake) == []
        fake.recommend()
        assert [notice.drains for notice in read(server, fake)] == [False]
        fake.tokens.clear()
        fake.put(120.0)
        (notice,) = read(server, fake)
        assert notice.drains and 110 < notice.within_s <= 120
        assert [method for method, _ in fake.asked].count("PUT") == 2


def test_gcp_answers_a_request_that_waits_as_soon_as_the_value_changes():
    async def waits(server, address, fake):
        reading = asyncio.create_task(MetadataReader(server, address).read())
        await eventually(lambda: len(fake.asked) == 2, "it waits for a change")
        fake.put()
        return await reading

    with FakeGcp() as fake:
        server = preemption()
        assert read(server, fake) == []
        (source,) = read_sources(f"gcp:{fake.address}")
        begun_s = time.monotonic()
        (notice,) = asyncio.run(waits(server, source.address, fake))
        assert notice.within_s == 30.0 and time.monotonic() - begun_s < 10
        assert read(maintenance(), fake) == []


def test_azure_returns_the_events_of_this_machine():
    with FakeAzure() as fake:
        server = AzureMetadata()
        assert read(server, fake) == []
        fake.put("Preempt", name="train_4")
        fake.put("Freeze")
        assert [notice.drains for notice in read(server, fake)] == [False]
        fake.put("Preempt", 30.0)
        notice = read(server, fake)[-1]
        assert notice.drains and 20 < notice.within_s <= 30
        assert {method for method, _ in fake.asked} == {"GET"}


def exchange(reply: bytes, *, ask: Ask | None = None, stays_open: bool = False):
    """Return the answer of a server that sends `reply` to any request, and the request."""
    heard = []

    async def serve(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        if not stays_open:
            writer.close()

    async def body():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await answer_of(Address("127.0.0.1", port), ask or Ask("/x"))
        finally:
            server.close()

    return asyncio.run(body()), heard[0].decode()


def test_a_request_carries_its_headers_and_nothing_of_the_environment(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answer, heard = exchange(
        b"HTTP/1.1 200 OK\r\nETag: A\r\nContent-Length: 2\r\n\r\nok and more",
        ask=Ask("/path?x=1", {"Metadata": "true"}),
    )
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, b"ok", "A")
    lines = heard.split("\r\n")
    assert lines[0] == "GET /path?x=1 HTTP/1.1" and lines[1].startswith("Host: 127.0.0.1:")
    assert lines[2:] == ["Metadata: true", "Accept: */*", "Connection: close", "", ""]


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nabc",
        b"HTTP/1.1 200\r\ncontent-LENGTH:3\r\n\r\nabc",
    ],
)
def test_a_body_is_read_by_its_length_its_chunks_or_to_the_end(reply):
    assert exchange(reply)[0].body == b"abc"


def test_a_redirect_is_not_followed():
    answer, _ = exchange(
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    )
    assert answer.status == 302


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_BYTES_MAX + 1),
    ],
    ids=range(11),
)
def test_a_malformed_http_answer_is_an_error_within_bounds(reply):
    with pytest.raises((UnreadableAnswerError, ConnectionError)):
        exchange(reply)


def test_a_server_that_hangs_is_an_error_after_the_limit():
    for reply in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"):
        with pytest.raises(TimeoutError, match="no answer from"):
            exchange(reply, ask=Ask("/x", limit_s=0.1), stays_open=True)


def test_a_machine_without_a_metadata_server_is_an_error():
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(answer_of(Address("127.0.0.1", 1), Ask("/x")))


def test_a_notice_of_a_cloud_drains_an_agent(tmp_path):
    with FakeGcp() as fake, FakeAws() as other:
        sources = f"gcp:{fake.address},aws:{other.address},azure:http://127.0.0.1:1"
        with agent(tmp_path, "--notices", sources, body=STEPS, http_proxy="http://[::1]:1") as one:
            one.told("up.0.0")
            fake.put()
            assert one.wait() == 143
            (notice,) = one.events("notice")
            assert notice["data"] == {"source": "gcp", "drains": True, "within_s": 30.0}
        assert os.fspath(other.asked[0][1]) == "/latest/api/token"
