"""Addresses that do not answer the connections of a process, by the kernel's tables."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from jobs import until

from elastane.process.unanswered import UnansweredWatch, own_addresses, unanswered


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_an_address_that_takes_no_connection_and_refuses_none_is_found(family, address):
    """A listener with a full queue drops what asks for a connection."""
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(0)
        asking = [socket.socket(family) for _ in range(4)]
        try:
            for each in asking:
                each.setblocking(False)
                each.connect_ex(listener.getsockname())
            until(lambda: unanswered([os.getpid()]) == {address}, "the address is found")
            with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1) as other:
                assert unanswered([other.pid]) == set(), "the connections are of this process"
                other.communicate(b"\n")
            watch = UnansweredWatch()
            watch.look([os.getpid()], 100.0)
            assert watch.addresses == (address,)
        finally:
            for each in asking:
                each.close()
        watch.look([os.getpid()], 104.0)
        assert watch.addresses == (address,), "the next attempt to connect may follow"
        watch.look([os.getpid()], 109.5)
        assert watch.addresses == ()


def test_connections_that_are_answered_are_not_found():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as two,
    ):
        one.sendall(b"x" * 1000)
        two.recv(1)
        assert unanswered([os.getpid()]) == set()


def test_a_process_that_has_ended_has_no_connection():
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(30)
    assert unanswered([ended.pid]) == set() == unanswered([])


def test_the_addresses_of_this_host_are_those_that_others_can_connect_to():
    found = own_addresses()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards,
        contextlib.suppress(OSError),  # there is no route: a host without a network
    ):
        towards.connect(("192.0.2.99", 9))  # sends nothing
        assert towards.getsockname()[0] in found
    assert not any(address.startswith(("127.", "fe80:")) or address == "::1" for address in found)
