"""With a crowd of silent connections at a listening port, its service continues."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from attackers import Insiders
from hostile_support import TOKEN, Victim, descriptors, dice, listening, processes_of
from ports import free_port
from process_harness import until
from snapshot_server_support import Node, Worker

import elastane
from elastane.dashboard import connections
from elastane.doctor import probes
from elastane.doctor.network_rules import CONNECTED
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
    "process/health.py": "health check, dashboard and metrics",
    "agent/process_group_store.py": "process-group store",
    "snapshots/replication.py": "snapshot server",
    "elastic/rendezvous/static_tcp_rendezvous.py": "store of an agent without a handler",
    # For the two minutes of `elastane doctor --nodes`; no job uses its ports.
    "doctor/probes.py": "probes between nodes",
    # Other users and hosts do not get to these.
    "agent/snapshot_server.py": "a socket of mode 0600 in a folder of mode 0700",
    "elastic/rendezvous/etcd_server.py": "finds a free port, and serves nothing",
}
_CALLS = {"listen", "create_server", "start_server", "start_unix_server", "serve_forever"}
# More than any of the bounds, and fewer than a process may have open.
_CROWD = 2 * max(
    UNPROVEN_MAX, PEERS_UNPROVEN_MAX, health._CONNECTIONS_MAX, connections.UNPROVEN_MAX
)
# Descriptors beyond those of a crowd: the asker's, and a folder that is read meanwhile.
_SPARE = 8


def test_every_file_that_listens_is_listed():
    root = Path(elastane.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CALLS:
                found.add(str(path.relative_to(root)))
    assert found == set(LISTENERS)


@contextlib.contextmanager
def crowd(port, count=_CROWD, said=b"ELASTANE\r"):
    """Hold silent connections; some have sent the first bytes of `said`, or all of it."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                sock.send(said[: len(said) * (number % 9) // 8])
        yield


def test_probes_between_nodes_answer_again_after_a_crowd():
    key = b"one node"
    server = probes.ProbeServer(key, ("127.0.0.1",))
    server.start()
    with contextlib.closing(server):
        with crowd(server.ports[0], said=b"p\x00\x00"):
            pass
        until(
            lambda: probes._outcome("127.0.0.1", server.ports[0], key, 1) == CONNECTED,
            "a probe is answered",
        )


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
    """The crowd is larger than all bounds together, and reconnects while copies are sent."""
    with contextlib.ExitStack() as stack:
        workers = []
        for name in "ab":
            (tmp_path / name).mkdir()
            node = stack.enter_context(Node(tmp_path / name, TEST_NEIGHBOURS="s" * 32))
            workers.append(Worker(slots=4, group="g"))
        a, b = workers
        port = int(b.client.replica_address.rpartition(":")[2])
        for step in range(1, 4):
            stack.enter_context(crowd(port, PEERS_UNPROVEN_MAX + 16))
            a.save(step, replica=Replica(b.client.replica_address, "g", ""), replicated=False)
            until(lambda nonce=f"{step:08x}": nonce in a.client.progress().copied, "it is copied")
        assert len(os.listdir(f"/proc/{node.server_pid}/task")) < PEERS_UNPROVEN_MAX + 32


class Dashboard:
    """A dashboard that requires a token; `bounds` replaces some of `connections`."""

    def __init__(self, folder, **bounds):
        secret = folder / "token"
        secret.write_text(TOKEN)
        changed = "".join(f"connections.{name} = {value}; " for name, value in bounds.items())
        code = f"from elastane.dashboard import connections; {changed}"
        code += "import sys; from elastane.cli.main import main; sys.exit(main())"
        options = ("--port", "0", "--token-file", str(secret), "--log-dir", str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "dashboard", *options], stdout=subprocess.PIPE, text=True
        )
        self.port = int(re.search(r":(\d+)/", self.process.stdout.readline())[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def connect(self):
        sock = socket.create_connection(("127.0.0.1", self.port), 60)
        sock.settimeout(60)
        return sock

    def status(self):
        """Return the status of a request of a user who has the token."""
        with self.connect() as sock:
            sock.sendall(request("/api/jobs", f"Authorization: Bearer {TOKEN}"))
            return sock.recv(12)


def request(path, *headers, method="GET"):
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_the_dashboard_answers(tmp_path):
    """Unproven clients send nothing, half a request, or a whole one without the token."""
    with Dashboard(tmp_path, REQUEST_S=600.0) as one:
        assert one.status() == b"HTTP/1.1 200"
        before = descriptors(one.process.pid)
        with crowd(one.port, said=request("/api/jobs")):
            assert one.status() == b"HTTP/1.1 200"
            held = descriptors(one.process.pid) - before
            assert held <= connections.UNPROVEN_MAX + _SPARE
        until(lambda: descriptors(one.process.pid) <= before, "descriptors return", 60.0)


def test_the_dashboard_closes_a_connection_whose_request_does_not_end(tmp_path):
    proof = f"Authorization: Bearer {TOKEN}"
    whole = request("/api/jobs", proof)
    pieces = {
        "nothing": b"",
        "half a request": whole[:-2],
        "half a second request": whole + whole[:9],
        "no body": request("/login", "Content-Length: 20", method="POST") + b"token=",
        "no body after the answer": request("/api/jobs", proof, "Content-Length: 9") + b"{",
    }
    with Dashboard(tmp_path, REQUEST_S=0.5) as one:
        for name, piece in pieces.items():
            print(name)
            with one.connect() as sock, contextlib.suppress(ConnectionResetError):
                sock.sendall(piece)
                while sock.recv(1 << 16):
                    pass
        assert one.status() == b"HTTP/1.1 200"


def test_the_dashboard_closes_a_connection_that_does_not_read(tmp_path):
    page = request("/page.js", f"Authorization: Bearer {TOKEN}")
    with Dashboard(tmp_path, SEND_S=0.5) as one, one.connect() as sock:
        with pytest.raises(ConnectionError):
            while True:
                sock.sendall(page)
        assert one.status() == b"HTTP/1.1 200"


# The rule that those ports share.


def test_the_oldest_unproven_connection_is_closed_after_its_time_for_a_new_one():
    unproven = Unproven[str](2, min_s=1.0)
    unproven.add("first", 10.0)
    assert unproven.wait_s(10.0) == 0.0 and unproven.make_room() is None
    unproven.add("second", 10.4)
    assert unproven.wait_s(10.5) == 0.5
    assert unproven.wait_s(11.0) == 0.0 and unproven.make_room() == "first"
    unproven.add("third", 11.0)
    assert [*unproven] == ["second", "third"]


def test_a_proven_connection_does_not_count_as_unproven():
    unproven = Unproven[str](1, min_s=1.0)
    unproven.add("first", 10.0)
    assert unproven.discard("first") and not unproven.discard("first")
    assert not unproven.is_full and unproven.wait_s(10.0) == 0.0
