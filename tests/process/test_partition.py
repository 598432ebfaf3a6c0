"""A partition loses the packets between two sides; no connection ends, and all is sent again."""

import contextlib
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from elastane.errors import UsageError
from elastane.testing import FaultPlan, partition
from elastane.testing.partition import Partition
from elastane.testing.plans import Fault

ECHO = """
import selectors, socket
with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as ready:
    print(server.getsockname()[1], flush=True)
    ready.register(server, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is server:
                ready.register(server.accept()[0], selectors.EVENT_READ)
            elif data := key.fileobj.recv(100):
                key.fileobj.sendall(data)
            else:
                ready.unregister(key.fileobj)
"""
DEADLINE_S = 60.0


@pytest.fixture
def echo():
    """A process that sends back what it receives, and its port."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as other:
        try:
            yield SimpleNamespace(pid=other.pid, port=int(other.stdout.readline()))
        finally:
            other.kill()


def answers(end, wait_s=DEADLINE_S):
    end.settimeout(wait_s)
    end.sendall(b"x")
    with contextlib.suppress(TimeoutError):
        return end.recv(100)
    return b""


def test_during_a_partition_nothing_arrives_and_afterwards_everything(echo):
    with socket.create_connection(("127.0.0.1", echo.port)) as end:
        assert answers(end) == b"x"
        cut = Partition(os.getpid(), [echo.pid]).begin()
        assert cut.is_cut
        assert answers(end, 0.3) == b""
        cut.end()
        end.settimeout(DEADLINE_S)
        assert end.recv(100) == b"x", "it was sent again"


def test_during_a_partition_no_connection_begins(echo):
    with socket.create_connection(("127.0.0.1", echo.port)) as end:
        assert answers(end) == b"x"
        cut = Partition(os.getpid(), [echo.pid]).begin()
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", echo.port), 0.3)
        cut.end()
        socket.create_connection(("127.0.0.1", echo.port), DEADLINE_S).close()


def test_a_connection_that_begins_in_a_partition_is_cut_too(echo):
    """Nodes without a connection to each other have no port to cut either, so it begins."""
    cut = Partition(os.getpid(), [echo.pid]).begin()
    assert not cut.is_cut
    with socket.create_connection(("127.0.0.1", echo.port)) as end:
        assert answers(end) == b"x"
        cut.over_after(DEADLINE_S)
        while answers(end, 0.3):
            pass  # It is cut a moment after it began.
        assert cut.is_cut
        cut.end()
        end.settimeout(DEADLINE_S)
        assert end.recv(100) == b"x"


def test_a_plan_cuts_a_node_off_the_others_for_a_time(echo, monkeypatch):
    monkeypatch.setattr("elastane.testing.plans._PARTITION_S", 0.5)
    nodes = [
        SimpleNamespace(name=name, is_alive=True, agent_pid=pid)
        for name, pid in (("a", os.getpid()), ("b", echo.pid))
    ]
    faults = []
    job = SimpleNamespace(
        nodes=nodes, events=lambda kind: [], record_fault=lambda *fault: faults.append(fault)
    )
    plan = FaultPlan((Fault(0.0, "partition", 0.9),))
    assert plan.run(job) == [], "they have no connection"
    with socket.create_connection(("127.0.0.1", echo.port)) as end:
        assert answers(end) == b"x"
        plan.run(job)
        assert faults == [("partition", "b", "partition of b for 0.5 s")]
        assert answers(end) == b"x", "it is over"


def test_without_the_right_to_trace_processes_an_error_says_so(echo, monkeypatch):
    def forbidden(*_):
        partition.ctypes.set_errno(1)
        return -1

    library = SimpleNamespace(syscall=forbidden)
    monkeypatch.setattr(partition.ctypes, "CDLL", lambda *_, **__: library)
    with socket.create_connection(("127.0.0.1", echo.port)) as end:
        assert answers(end) == b"x"
        with pytest.raises(UsageError, match="Operation not permitted"):
            Partition(os.getpid(), [echo.pid]).begin()
