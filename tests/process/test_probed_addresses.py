"""Probes of other hosts, where a refused connection counts as an answer, and --local-addr."""

import asyncio
import socket

from elastane.process import reach
from elastane.process.reach import answers, doubts_of


def probe(address, port, limit_s=60.0):
    return asyncio.run(answers(address, port, limit_s))


def test_a_host_answers_whether_or_not_something_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe("127.0.0.1", port)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b"", "nothing is sent, and the connection is closed"
    assert probe("127.0.0.1", port), "it is refused"


def test_a_host_that_sends_nothing_back_does_not_answer():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = []
        while True:  # The kernel drops what begins a connection once the queue is full.
            waiting.append(socket.socket())
            waiting[-1].settimeout(0.5)
            try:
                waiting[-1].connect(address)
            except TimeoutError:
                break
        assert not probe(*address, limit_s=0.5)
        for each in waiting:
            each.close()


def test_no_name_is_looked_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not probe("localhost", port)
        assert not probe("", port)


def test_an_address_of_another_host_and_a_name_without_one_are_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(reach, "_LOOKUP_PAUSES_S", (0.01,))
    said = asyncio.run(doubts_of("192.0.2.1"))
    assert "--local-addr 192.0.2.1 is 192.0.2.1, and no address of this host (" in said
    assert "leave the option out" in said
    said = asyncio.run(doubts_of("no-such-host.invalid"))
    assert "--local-addr no-such-host.invalid: no address is known for it here" in said
    assert "next: give an address of this host" in said
    assert not asyncio.run(doubts_of("localhost"))


def test_a_name_that_is_known_a_moment_later_is_no_doubt(monkeypatch):
    found = iter([((), "not yet"), (("127.0.0.1",), "")])

    async def lookup(_):
        return next(found)

    monkeypatch.setattr(reach, "_LOOKUP_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(reach, "_lookup", lookup)
    assert not asyncio.run(doubts_of("late"))
