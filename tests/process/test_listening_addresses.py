"""The listening addresses of a job's processes: no wider than its machines need."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import until
from ports import free_port
from process_harness import worker_environment

from elastane.agent.process_group_store import OfferedPort
from elastane.process.endpoint import bound, is_loopback, listen, local_addresses, meets_here, reach
from elastane.snapshots.messages import ReplicationSettings
from elastane.snapshots.replication import SnapshotListener

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
here = Path(sys.argv[1])
(here / f"up.{dist.get_rank()}").touch()
enough = torch.zeros(1)
while not enough.item():  # Both ranks decide alike: one of them may look before the file is there.
    enough = torch.tensor([float((here / "go").exists())])
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    time.sleep(0.05)
dist.barrier()
os._exit(0)
"""


def listening(session):
    """Return the addresses at which processes of a session tree listen, by process."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(words[1]), []).append(int(status.parent.name))
    waiting, found = [session], {}
    sockets = _listening_inodes()
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            links = list(_links(pid))
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        for link in links:
            if link.startswith("socket:[") and link[8:-1] in sockets:
                found.setdefault(sockets[link[8:-1]], set()).add(f"{pid} {line[:80]}")
    return found


def _links(pid):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(fd)


def _listening_inodes():
    found = {}
    for name, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # TCP_LISTEN
                raw = bytes.fromhex(words[1].partition(":")[0])
                parts = struct.unpack(f">{size // 4}I", raw)
                packed = struct.pack(f"<{size // 4}I", *parts)
                family = socket.AF_INET if size == 4 else socket.AF_INET6
                found[words[9]] = socket.inet_ntop(family, packed)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ("--standalone",),
        pytest.param(
            ("--nnodes", "1:2", "--rdzv-endpoint", "localhost:{port}"), marks=pytest.mark.soak
        ),
    ],
    ids=["standalone", "loopback"],
)
def test_a_job_on_one_machine_listens_on_the_loopback_alone(tmp_path, options):
    options = [option.format(port=free_port()) for option in options]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "elastane.run", *options, "--nproc-per-node", "2"),
            *(str(script), str(tmp_path)),
        ],
        env=worker_environment(TMPDIR=str(tmp_path)),
        cwd=tmp_path,
    )
    try:
        until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "both ranks have met", 60)
        found = listening(job.pid)
        assert len(found) >= 1 and sum(map(len, found.values())) >= 3, "coordinator, store, gloo"
        assert [where for where in found if not is_loopback(where)] == [], json.dumps(
            {where: sorted(who) for where, who in found.items()}, indent=1
        )
        (tmp_path / "go").touch()
        assert job.wait(60) == 0
    finally:
        job.terminate()
        job.wait()


OWN = sorted(a for a in local_addresses() if "." in a and not a.startswith("127."))[:1]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7", *OWN])
def test_a_node_binds_its_listeners_to_the_named_address(address):
    port = OfferedPort(listening=True, host=address)
    port.open()
    replicas = SnapshotListener(
        ReplicationSettings("job", (b"x" * 32,), host=address), lambda offer, line: None
    )
    where = replicas.open()
    with listen(address, 0) as listener:
        assert listener.getsockname()[0] == address
        assert port.socket.getsockname()[0] == address
        assert where.startswith(f"{address}:") and replicas._listener.getsockname()[0] == address
        taken = port.hand_over()
        taken.close()
        port.open()
        assert port.socket.getsockname()[0] == address, "the next one too"
    port.close()


@pytest.mark.parametrize("host", ["", "a-name", "192.0.2.77"])
def test_a_name_and_an_address_of_another_machine_are_served_on_all(host):
    with bound(host, 0) as found:
        assert found.getsockname()[0] in {"::", "0.0.0.0"}


@pytest.mark.parametrize(
    ("local_addr", "alone", "expected"),
    [("", True, "127.0.0.1"), ("", False, ""), ("10.0.0.1", True, "10.0.0.1"), ("n", False, "n")],
)
def test_others_reach_a_node_only_at_its_announced_address(local_addr, alone, expected):
    assert reach(local_addr, alone=alone) == expected


@pytest.mark.parametrize(
    ("endpoint", "local_addr", "here"),
    [
        ("localhost", "", True),
        ("127.0.0.1", "", True),
        ("::1", "127.0.0.1", True),
        ("localhost", "10.0.0.1", False),
        ("node-a", "", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("", "", False),
    ],
)
def test_agents_that_meet_at_the_loopback_are_on_one_machine(endpoint, local_addr, here):
    assert meets_here(endpoint, local_addr) is here
