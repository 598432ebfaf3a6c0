"""How snapshot servers end: the final flush of nodes and of workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_harness import DEADLINE_S, until, worker_environment
from snapshot_server_support import SLOT_BYTES, Node, Worker, persist_to, published
from supervise import alive

from elastane.protocol.checkpoints import Key


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as one:
        yield one


def test_groups_share_a_snapshot_server_and_nothing_else(node, tmp_path):
    stores = {group: tmp_path / group for group in ("model", "ema")}
    workers = {group: Worker(group=group) for group in stores}
    assert len({worker.client.id for worker in workers.values()}) == 1
    for number, (group, worker) in enumerate(workers.items()):
        worker.client.layout("L", {"layout.json": b"{}"}, persist_to(stores[group]))
        for step in range(1, 5):
            worker.save(10 * number + step, layout="L")
    assert {group: worker.steps() for group, worker in workers.items()} == {
        "model": [4, 3],
        "ema": [14, 13],
    }
    for worker in workers.values():
        worker.client.close()
    node.leave()
    assert [published(store) for store in stores.values()] == [
        [(4, "final flush")],
        [(14, "final flush")],
    ]


def test_a_killed_agents_snapshot_server_flushes_and_ends(node, tmp_path):
    store = tmp_path / "store"
    worker = Worker()
    worker.client.layout("L", {"layout.json": b"{}"}, persist_to(store))
    worker.save(7, layout="L")
    pid = node.server_pid
    node.kill()
    worker.client.close()
    until(lambda: not alive(pid), "the snapshot server ends")
    assert published(store) == [(7, "final flush")]
    until(lambda: not node.path.exists(), "the socket is gone")


def test_a_leaving_agent_waits_for_the_final_flush(node, tmp_path):
    store = tmp_path / "store"
    worker = Worker()
    worker.client.layout("L", {"layout.json": b"{}"}, persist_to(store))
    worker.save(1, persist_to(store), layout="L")
    worker.client.wait(Key(0, 1, 0, 1), DEADLINE_S)
    worker.save(2, layout="L")
    worker.client.close()
    node.leave()
    assert published(store) == [(2, "final flush"), (1, "step")]


def test_a_durable_snapshot_is_not_flushed_again(node, tmp_path):
    store = tmp_path / "store"
    worker = Worker()
    worker.save(1, persist_to(store))
    worker.client.close()
    node.leave()
    assert published(store) == [(1, "step")]


def test_the_snapshot_of_workers_that_stay_away_is_flushed(node, tmp_path):
    store = tmp_path / "store"
    worker = Worker()
    worker.save(1, persist_to(store))
    worker.client.wait(Key(0, 1, 0, 1), DEADLINE_S)
    worker.client.layout("L", {"layout.json": b"{}"}, persist_to(store))
    worker.save(2, layout="L")
    worker.client.close()
    until(lambda: len(published(store)) == 2, "the final flush")
    assert published(store)[0] == (2, "final flush")
    assert Worker().steps() == [2, 1], "and what it holds is held on"


def test_servers_of_two_nodes_publish_one_checkpoint_and_one_final_flush(tmp_path):
    store, half = tmp_path / "store", SLOT_BYTES
    folders = [tmp_path / "a", tmp_path / "b"]
    workers, nodes = [], []
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            nodes.append(stack.enter_context(Node(folder)))
            workers.append(Worker(slot_bytes=2 * half))
        for part, worker in enumerate(workers):
            ranges = ((f"__{part}_0.distcp", part * half, (part + 1) * half),)
            share = persist_to(store, ranges=ranges, part=part, parts=2, small=part == 0)
            whole = persist_to(store, 2 * half)
            worker.client.layout("L", {"layout.json": b"{}"}, whole)
            worker.save(1, share, layout="L")
        for worker in workers:
            worker.client.wait(Key(0, 1, 0, 1), DEADLINE_S)
        assert published(store) == [(1, "step")]
        for worker in workers:
            worker.save(2, layout="L")
            worker.client.close()
        for node in nodes:
            node.agent.stdin.write(b"leave\n")
            node.agent.stdin.flush()
        assert [node.agent.wait(DEADLINE_S) for node in nodes] == [0, 0]
        assert published(store) == [(2, "final flush"), (1, "step")]


def test_a_sharded_save_without_a_lost_nodes_part_is_followed_by_the_newest_snapshot(tmp_path):
    """Each survivor writes its part of it, so a wait for the lost save ends well on both."""
    store, lost = tmp_path / "store", Key(0, 1, 0, 1)
    with contextlib.ExitStack() as stack:
        workers = []
        for part in range(2):
            folder = tmp_path / str(part)
            folder.mkdir()
            stack.enter_context(Node(folder))
            workers.append(Worker())
        for nodes, key in ((3, lost), (2, Key(0, 2, 0, 5))):
            for part, worker in enumerate(workers):
                at = {"first": part * SLOT_BYTES, "end": (part + 1) * SLOT_BYTES}
                at["image_bytes"] = nodes * SLOT_BYTES
                ranges = ((f"__{part}_0.distcp", at["first"], at["end"]),)
                more = {"ranges": ranges, "part": part, "parts": nodes, "small": part == 0}
                share = persist_to(store, wait_s=2.0, **more)
                worker.client.layout(f"of {nodes}", {"layout.json": b"{}"}, share)
                # Storage is busy with the first one while the second is kept.
                persist = share if key == lost else None
                at |= {"replicated": False, "layout": f"of {nodes}", "key": key}
                worker.save(key.step, persist, **at)
        for worker in workers:
            assert worker.client.wait(lost, DEADLINE_S).failure_of(lost) is None
        assert published(store) == [(5, "final flush")]


@pytest.mark.soak
def test_the_final_flush_of_a_sharded_state_is_the_newest_whole_on_all_nodes(tmp_path):
    """Takes 20 s: the servers wait so long for the newest save, which only one of them has."""
    store, half = tmp_path / "store", SLOT_BYTES
    with contextlib.ExitStack() as stack:
        nodes = []
        for part, steps in enumerate([(1, 2), (1,)]):
            folder = tmp_path / str(part)
            folder.mkdir()
            nodes.append(stack.enter_context(Node(folder)))
            worker = Worker()
            at = {"first": part * half, "end": (part + 1) * half, "image_bytes": 2 * half}
            ranges = ((f"__{part}_0.distcp", at["first"], at["end"]),)
            share = persist_to(store, ranges=ranges, part=part, parts=2, small=part == 0)
            worker.client.layout("L", {"layout.json": b"{}"}, share)
            for step in steps:
                worker.save(step, layout="L", replicated=False, **at)
            worker.client.close()
        for node in nodes:
            node.agent.stdin.write(b"leave\n")
            node.agent.stdin.flush()
        assert [node.agent.wait(4 * DEADLINE_S) for node in nodes] == [0, 0]
        assert published(store) == [(1, "final flush")]


def test_a_final_flush_keeps_the_deadline_of_its_agent(tmp_path):
    """The other part never comes; without a deadline the server would wait 20 s for it."""
    store, half = tmp_path / "store", SLOT_BYTES
    with Node(tmp_path, TEST_OUT_WITHIN_S="2") as node:
        worker = Worker()
        at = {"first": 0, "end": half, "image_bytes": 2 * half}
        share = persist_to(store, ranges=(("__0_0.distcp", 0, half),), part=0, parts=2)
        worker.client.layout("L", {"layout.json": b"{}"}, share)
        worker.save(1, layout="L", replicated=False, **at)
        worker.client.close()
        begun_s = time.monotonic()
        node.leave()
        assert time.monotonic() - begun_s < 15
        assert not published(store)


def test_a_worker_without_an_agent_has_a_server_that_outlives_it_briefly(tmp_path):
    store = tmp_path / "store"
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from snapshot_server_support import Worker, persist_to, snapshot_servers\n"
        "w = Worker(); assert not w.client.survives\n"
        "w.client.layout('L', {'layout.json': b''}, persist_to(sys.argv[2]))\n"
        "w.save(1, persist_to(sys.argv[2]), layout='L'); w.save(2, layout='L')\n"
        "print(w.client.id, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code, here, str(store)],
        env=worker_environment(PROBE=str(tmp_path)),
        stdout=subprocess.PIPE,  # Not held open by the snapshot server.
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    mine = f"PROBE={tmp_path}".encode()
    until(lambda: not carrying(mine), "the snapshot server ends")
    assert published(store) == [(2, "final flush"), (1, "step")]


def carrying(words):
    """Return the processes that were started with this text in their environment."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if words in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    return found
