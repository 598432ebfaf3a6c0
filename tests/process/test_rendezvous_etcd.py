"""EtcdServer, EtcdStore, the register in etcd and the oldest handler, against a real server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from etcd_server import need_etcd
from jobs import until

from elastane.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from elastane.elastic.rendezvous.dynamic_rendezvous import create_handler
from elastane.elastic.rendezvous.etcd_rendezvous import create_rdzv_handler
from elastane.elastic.rendezvous.etcd_rendezvous_backend import (
    EtcdRendezvousBackend,
    create_backend,
)
from elastane.elastic.rendezvous.etcd_server import EtcdServer
from elastane.elastic.rendezvous.etcd_store import EtcdStore
from elastane.elastic.rendezvous.registry import get_rendezvous_handler
from elastane.errors import StoreError

SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    need_etcd()
    started = EtcdServer()
    started.start(stderr=subprocess.DEVNULL)
    yield started
    started.stop()


@pytest.fixture
def stores(server: EtcdServer, tmp_path: Path) -> list[EtcdStore]:
    """Return two stores of one prefix, each with a client of its own."""
    return [EtcdStore(server.get_client(), f"/tests/{tmp_path.name}", SECOND) for _ in range(2)]


def test_a_store_keeps_any_key_and_any_value(stores: list[EtcdStore]) -> None:
    one, other = stores
    for key in ("plain", "with/slash", "space and ü", "x" * 500, "", "..", "@entry"):
        one.set(key, f"of {key}")
        assert other.get(key) == f"of {key}".encode()
        one.set(key, b"\x00\xff")
        assert other.get(key) == b"\x00\xff"


def test_a_counter_that_two_add_to_at_once_loses_nothing(stores: list[EtcdStore]) -> None:
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda n: stores[n % 2].add("count", 3), range(40)))
    assert sorted(seen) == list(range(3, 121, 3))
    assert stores[0].add("count", -120) == 0
    assert stores[1].get("count") == b"0"


def test_a_get_waits_for_its_key_and_no_longer_than_its_time(stores: list[EtcdStore]) -> None:
    one, other = stores
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.get, "later")
        other.set("later", "now")
        assert waiting.result(90) == b"now"
    begun = time.monotonic()
    with pytest.raises(LookupError, match="never"):
        one.get("never")
    with pytest.raises(LookupError, match="never"):
        one.wait(["later", "never"], timedelta(milliseconds=200))
    assert 1.0 <= time.monotonic() - begun < 30.0, "torch waits 300 s"
    one.wait(["later"])
    assert (one.check(["later"]), one.check(["later", "never"])) == (True, False)


def test_compare_set_and_delete_are_as_torchs_own_store_has_them(stores: list[EtcdStore]) -> None:
    oracle = dist.HashStore()
    for store in (oracle, stores[0]):
        seen = [
            store.compare_set("k", "", "a"),
            store.compare_set("k", "b", "c"),
            store.compare_set("k", "a", "c"),
        ]
        assert seen == [b"a", b"a", b"c"], store
        assert (store.delete_key("k"), store.delete_key("k")) == (True, False)


def test_a_client_removes_a_key_and_all_below_one(server: EtcdServer) -> None:
    client = server.get_client()
    for key in ("gone/a", "gone/b/c", "gone2", "kept"):
        client.compare_and_set(key, b"x", 0)
    client.delete("/gone", recursive=True)
    client.delete("gone2")
    client.delete("never-there")
    found = {key for key in ("gone/a", "gone/b/c", "gone2", "kept") if client.get(key)}
    assert found == {"kept"}


def test_a_server_of_3_4_or_3_5_serves_v2_as_well(server: EtcdServer) -> None:
    params = RendezvousParameters("etcd-v2", server.get_endpoint(), "of-v2", 1, 1)
    handler = get_rendezvous_handler(params)
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
    finally:
        handler.shutdown()


def test_torch_itself_can_use_the_store(stores: list[EtcdStore]) -> None:
    """C++ calls come in through torch's own wrapper."""
    one, other = (dist.PrefixStore("prefix", store) for store in stores)
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert other.add("count", 2) == 2
    assert other.check(["key"])
    other.wait(["key"], SECOND)


def test_a_register_replaces_only_what_its_token_is_of(server: EtcdServer) -> None:
    one, other = (EtcdRendezvousBackend(server.get_client(), "a run", "/a/b") for _ in range(2))
    assert one.get_state() is None
    state, token, written = one.set_state(b"1")
    assert (state, written) == (b"1", True)
    assert other.set_state(b"2") == (b"1", token, False)
    assert other.set_state(b"2", "no token") == (b"1", token, False)
    _, newer, written = other.set_state(b"2", token)
    assert written
    assert one.set_state(b"3", token) == (b"2", newer, False)
    assert one.get_state() == (b"2", newer)


@pytest.mark.parametrize("kind", ["backend", "handler"])
def test_nodes_meet_by_parts_and_by_the_oldest_handler(server: EtcdServer, kind: str) -> None:
    params = RendezvousParameters("etcd", server.get_endpoint(), kind, 2, 2, last_call_timeout=1)
    if kind == "backend":
        made = [create_handler(*reversed(create_backend(params)), params) for _ in range(2)]
    else:
        made = [create_rdzv_handler(params) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda member: member.next_rendezvous(), made))
        assert sorted(info.rank for info in infos) == [0, 1]
        infos[0].store.set("key", "value")
        assert infos[1].store.get("key") == b"value"
        assert all(pool.map(lambda member: member.shutdown(), made))


def test_etcd_out_of_reach_is_a_connection_error() -> None:
    gone = EtcdServer()
    gone.start(stderr=subprocess.DEVNULL)
    client = gone.get_client()
    gone.stop()
    assert gone.get_port() == -1
    with pytest.raises(RendezvousConnectionError):
        EtcdRendezvousBackend(client, "run").get_state()
    with pytest.raises(StoreError):
        EtcdStore(client, "x").set("key", "value")


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "from elastane.elastic.rendezvous.etcd_server import EtcdServer\n"
        f"server = EtcdServer({str(tmp_path)!r})\n"
        "server.start(stderr=subprocess.DEVNULL)\n"
        "print(server.get_port(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        (pid,) = [int(p) for p in _children(owner.pid)]
        assert port > 0
        owner.communicate(timeout=90)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the server has ended")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_server_that_cannot_start_is_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(broken))
    with pytest.raises(TimeoutError, match="exit code"):
        EtcdServer().start(num_retries=2)
