"""A probe finds whether a host answers: a refusal is an answer, silence is none."""

import asyncio
import socket

from elastane.process.reach import answers


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
