"""What a worker says to its agent of a lost peer, which becomes the reason of an incident."""

import socket

from elastane.errors import PeerLostError
from elastane.process import control_socket
from elastane.process.control_socket import PeerLost
from elastane.protocol.model import Fence
from elastane.worker.control_socket import ControlSocket


def test_a_lost_peer_is_reported_in_one_line():
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    error = PeerLostError("no route to b", slug="group-not-built", where="rank 2", expected="all")
    with ours, its:
        ControlSocket(ours).lost(Fence(3, 1), error)
        word = control_socket.from_worker(its.recv(control_socket.PACKET_BYTES_MAX))
    assert word == PeerLost(Fence(3, 1), "lost a peer: no route to b [group-not-built]")
