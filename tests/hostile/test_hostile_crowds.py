"""A crowd of silent connections at each listening port: what the port is there for goes on."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
from attackers import Insiders
from hostile_support import Victim, dice, listening, processes_of
from jobs import free_port
from process_harness import until
from snapshot_server_support import Node, Worker

import elastane
from elastane.process import health
from elastane.process.endpoint import Unproven
from elastane.process.rpc.listener import UNPROVEN_MAX
from elastane.protocol.messages import Query, Report
from elastane.protocol.model import Fence
from elastane.snapshots.limits import PEERS_UNPROVEN_MAX
from elastane.snapshots.messages import Replica

# Every file of the package that listens, and the test of its port's crowd. A new one is added here
# together with a test.
LISTENERS = {
    "process/endpoint.py": "coordinator",
    "process/health.py": "health check",
    "agent/process_group_store.py": "process-group store",
    "snapshots/replication.py": "snapshot server",
    "elastic/rendezvous/static_tcp_rendezvous.py": "store of an agent without a handler",
    # Other users and hosts do not get to these.
    "agent/snapshot_server.py": "a socket of mode 0600 in a folder of mode 0700",
    "elastic/rendezvous/etcd_server.py": "finds a free port, and serves nothing",
}
_CALLS = {"listen", "create_server", "start_server", "start_unix_server", "serve_forever"}
# More than any of the bounds, and fewer than a process may have open.
_CROWD = 2 * max(UNPROVEN_MAX, PEERS_UNPROVEN_MAX, health._CONNECTIONS_MAX)


def test_every_file_that_listens_is_listed():
    root = Path(elastane.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CALLS:
                found.add(str(path.relative_to(root)))
    assert found == set(LISTENERS)


@contextlib.contextmanager
def crowd(port, count=_CROWD):
    """Hold silent connections; some of them said a few bytes."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                sock.send(b"ELASTANE\r"[: number % 9])
        yield


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(free_port())}
    with Victim(tmp_path_factory.mktemp("crowds"), **env) as one:
        yield one


def test_the_coordinator_answers(victim):
    from test_hostile_coordinator import spec_of

    last = victim.job.seen()[-1]
    insider = Insiders(victim.port, spec_of(victim), ("a", "b"), Fence(last.round, last.attempt))

    async def answer():
        async with insider.session(dice("crowd")) as one:
            await one.send(Query())
            return await one.answer()

    with victim.watch(), crowd(victim.port):
        assert isinstance(asyncio.run(answer()), Report)


def test_the_health_check_answers(victim):
    port = int(victim.env["TORCHELASTIC_HEALTH_CHECK_PORT"])
    with victim.watch(), crowd(port), socket.create_connection(("127.0.0.1", port), 60) as probe:
        probe.settimeout(60)
        probe.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert probe.recv(100).startswith(b"HTTP/1.1 200")


def test_the_process_group_store_answers(victim):
    from torch.distributed import TCPStore

    others = {step.pid for step in victim.job.seen()}
    others |= {victim.a.process.pid, victim.b.process.pid}
    (port,) = listening([pid for pid in processes_of(victim.job) if pid not in others])
    with victim.watch(), crowd(port):
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("crowd", "is borne")
        assert store.get("crowd") == b"is borne"


def test_the_store_of_an_agent_without_a_handler_answers():
    from torch.distributed import TCPStore

    from elastane.elastic.rendezvous.static_tcp_rendezvous import OneMachineRendezvous

    handler = OneMachineRendezvous()
    info = handler.next_rendezvous()
    port = info.bootstrap_store_info.master_port
    with crowd(port):
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("crowd", "is borne")
        assert store.get("crowd") == b"is borne"


def test_the_snapshot_server_takes_copies(tmp_path):
    """The crowd is larger than all bounds together, and comes back while copies are sent."""
    with contextlib.ExitStack() as stack:
        workers = []
        for name in "ab":
            (tmp_path / name).mkdir()
            node = stack.enter_context(Node(tmp_path / name, TEST_NEIGHBOURS="s" * 32))
            workers.append(Worker(slots=4, group="g"))
        a, b = workers
        port = int(b.client.door.rpartition(":")[2])
        for step in range(1, 4):
            stack.enter_context(crowd(port, PEERS_UNPROVEN_MAX + 16))
            a.save(step, replica=Replica(b.client.door, "g", ""), replicated=False)
            until(lambda nonce=f"{step:08x}": nonce in a.client.progress().copied, "it is copied")
        assert len(os.listdir(f"/proc/{node.server_pid}/task")) < PEERS_UNPROVEN_MAX + 32


# The rule that those ports share.


def test_the_oldest_makes_room_once_it_has_had_its_time():
    unproven = Unproven[str](2, min_s=1.0)
    unproven.add("first", 10.0)
    assert unproven.wait_s(10.0) == 0.0 and unproven.make_room() is None
    unproven.add("second", 10.4)
    assert unproven.wait_s(10.5) == 0.5
    assert unproven.wait_s(11.0) == 0.0 and unproven.make_room() == "first"
    unproven.add("third", 11.0)
    assert [*unproven] == ["second", "third"]


def test_one_that_is_proven_takes_no_place_of_the_unproven():
    unproven = Unproven[str](1, min_s=1.0)
    unproven.add("first", 10.0)
    assert unproven.discard("first") and not unproven.discard("first")
    assert not unproven.is_full and unproven.wait_s(10.0) == 0.0
