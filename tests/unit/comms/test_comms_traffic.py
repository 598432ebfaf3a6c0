"""The bytes that go over the connections of one group are counted, and no others."""

import os
import socket

from elastane.comms import sockets


def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_only_chosen_sockets_count_and_in_both_directions():
    (a, b), (c, d) = pair(), pair()
    with a, b, c, d:
        chosen = {os.fstat(a.fileno()).st_ino}
        before = sockets.traffic(chosen)
        c.sendall(b"x" * 1000)
        d.recv(1000, socket.MSG_WAITALL)
        assert sockets.traffic(chosen) == before
        b.sendall(b"x" * 300)
        a.recv(300, socket.MSG_WAITALL)
        assert sockets.traffic(chosen) == before + 300
        a.sendall(b"x" * 500)
        b.recv(500, socket.MSG_WAITALL)
        assert sockets.traffic(chosen) == before + 800
    assert sockets.traffic(chosen) == 0
