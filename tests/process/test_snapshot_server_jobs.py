"""Snapshot servers of real jobs: `elastane run`, workers that save, and kills of all kinds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from process_harness import until
from snapshot_server_support import published, snapshot_servers
from supervise import agent, alive, command_line

# Two workers, each with half of the image; a snapshot a step, from where the last ones got to.
BODY = """
import mmap, sys
from elastane.protocol.checkpoints import Key
from elastane.snapshots.client import SnapshotClient
from elastane.snapshots.messages import PersistRequest, Snapshot

N, STORE = 1 << 16, str(FOLDER / "store")
client = SnapshotClient.connect()
held = client.held()
step = held[0].key.step if held else 0
for one in held:
    pieces = [os.pread(fd, N, 0) for _, _, fd in one.pieces]
    assert pieces == [bytes([one.key.step % 251]) * N] * 2, one.key
    client.release(one)
tell("found", step)
fds = client.slots(3, N)
slots = [mmap.mmap(fd, N) for fd in fds]
wish = dict(where=STORE, job="job", world=2, versions={}, reason="step", keep=2)
wish["ranges"] = (("__0_0.distcp", 0, 2 * N),)
client.layout("L", {"layout.json": b"{}"}, PersistRequest(**wish))


def save(step, durable=False):
    slot = client.grant(60.0)
    slots[slot][:] = bytes([step % 251]) * N
    key = Key(0, int(os.environ["ELASTANE_ROUND"]), int(os.environ["ELASTANE_ATTEMPT"]), step)
    local = int(os.environ["LOCAL_RANK"])
    client.keep(slot, Snapshot(
        key=key, nonce=f"{step:08x}", local=local, locals=2, first=local * N,
        end=local * N + N, image_bytes=2 * N, layout="L",
        persist=PersistRequest(**wish) if durable else None,
    ))
    return key


def save_until(word):
    global step
    while not (FOLDER / word).exists():
        step += 1
        save(step)
        tell("at", step)
        time.sleep(0.002)
"""
CONF = ("--nproc-per-node", "2", "--max-restarts", "3")


def at(one, restarts=0):
    """Return the step that both workers have reached."""
    one.told(f"at.0.{restarts}")
    one.told(f"at.1.{restarts}")
    texts = [(one.folder / f"at.{rank}.{restarts}").read_text() for rank in (0, 1)]
    return min(map(int, texts))


def sockets(folder):
    return [*folder.glob("elastane-*/snapshots/*")]


def test_restarted_workers_restore_from_memory_and_the_end_is_durable(tmp_path):
    body = BODY + "save_until('enough' if RESTARTS else 'never')\n"
    with agent(tmp_path, *CONF, body=body) as one:
        until(lambda: at(one) >= 5, "snapshots")
        before, pid = at(one), max(snapshot_servers(one.pid))
        victim = next(p for p in one.left() if "script.py" in command_line(p) and p != one.pid)
        os.kill(victim, signal.SIGKILL)
        found = {int(one.told(f"found.{rank}.1")) for rank in (0, 1)}
        assert min(found) >= before
        until(lambda: at(one, 1) > max(found), "they go on")
        assert max(snapshot_servers(one.pid)) == pid, "it outlived the workers"
        (tmp_path / "enough").touch()
        assert one.wait() == 0
        ((newest, reason),) = published(tmp_path / "store")
        assert reason == "final flush"
        assert newest >= at(one, 1)
        assert not alive(pid)
        assert not sockets(tmp_path)
        one.gone()


def test_an_agent_asked_to_leave_flushes_the_newest_snapshot(tmp_path):
    with agent(tmp_path, *CONF, body=BODY + "save_until('never')\n") as one:
        until(lambda: at(one) >= 3, "snapshots")
        before = at(one)
        one.send(signal.SIGTERM)
        one.wait()
        ((newest, reason),) = published(tmp_path / "store")
        assert reason == "final flush"
        assert newest >= before
        one.gone()


def test_a_killed_agent_leaves_a_checkpoint_and_nothing_else(tmp_path):
    with agent(tmp_path, *CONF, body=BODY + "save_until('never')\n") as one:
        until(lambda: at(one) >= 3, "snapshots")
        before, pid = at(one), max(snapshot_servers(one.pid))
        assert len(sockets(tmp_path)) == 1
        one.send(signal.SIGKILL)
        until(lambda: not alive(pid), "the snapshot server ends")
        ((newest, reason),) = published(tmp_path / "store")
        assert reason == "final flush"
        assert newest >= before
        one.gone()
        until(lambda: not sockets(tmp_path), "its socket is gone")


def test_a_killed_snapshot_server_costs_its_snapshots_but_not_the_job(tmp_path):
    body = (
        BODY
        + """
try:
    save_until('never')
except ConnectionError as error:
    tell("lost", error)
client = SnapshotClient.connect()
assert client.held() == []
fds = client.slots(3, N)
slots = [mmap.mmap(fd, N) for fd in fds]
client.layout("L", {"layout.json": b"{}"}, PersistRequest(**wish))
client.wait(save(1000, durable=True), 60.0)
"""
    )
    with agent(tmp_path, *CONF, body=body) as one:
        until(lambda: at(one) >= 3, "snapshots")
        os.kill(max(snapshot_servers(one.pid)), signal.SIGKILL)
        assert "lost" in one.told("lost.0.0")
        assert one.wait() == 0, one.err
        assert published(tmp_path / "store") == [(1000, "step")]
        assert "snapshot-server-lost" in one.err


def test_a_job_without_snapshots_has_no_snapshot_server(tmp_path):
    body = "tell('path', os.environ['ELASTANE_SNAPSHOT_SERVER'])\nwait_for('enough')\n"
    with agent(tmp_path, body=body) as one:
        path = Path(one.told("path.0.0"))
        assert path.is_socket()
        assert not snapshot_servers(one.pid)
        (tmp_path / "enough").touch()
        assert one.wait() == 0
        assert not path.exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_snapshot_server_outlives_the_signals_that_end_its_job(tmp_path, signum):
    with agent(tmp_path, *CONF, body=BODY + "save_until('never')\n") as one:
        until(lambda: at(one) >= 3, "snapshots")
        pid = max(snapshot_servers(one.pid))
        os.kill(pid, signum)
        before = at(one)
        until(lambda: at(one) > before + 3, "it goes on")
        assert alive(pid)
