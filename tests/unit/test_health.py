"""Health checks by HTTP: the answer depends on recent progress."""

import asyncio
import time

import pytest

from elastane.process import health
from elastane.process.health import HealthServer


def ask(words, silent_s):
    async def scenario():
        server = HealthServer(lambda: time.time() - silent_s, 0, timeout_s=60.0)
        await server.start()
        try:
            async with asyncio.timeout(90):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(words)
                answer = await reader.read()
                writer.close()
                return answer
        finally:
            server.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(("silent_s", "status"), [(0, b"200 OK"), (61, b"503 Service Unavailable")])
def test_the_answer_depends_on_the_age_of_the_last_sign_of_life(silent_s, status):
    answer = ask(b"GET /any HTTP/1.1\r\nHost: x\r\n\r\n", silent_s)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert f"Content-Length: {len(body)}".encode() in head


def test_a_request_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr(health, "_REQUEST_S", 0.05)
    assert ask(b"GET /", 0) == b""
    assert ask(b"x" * (20 << 10), 0) == b""
