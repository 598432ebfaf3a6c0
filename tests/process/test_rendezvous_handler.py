"""Handlers as agents use them: ranks, stores, changes and ends, over every kind of backend."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from etcd_server import need_etcd
from jobs import until
from ports import free_port

from elastane.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elastane.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from elastane.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)
from elastane.elastic.rendezvous.etcd_server import EtcdServer
from elastane.elastic.rendezvous.registry import get_rendezvous_handler

WAIT_S = 90.0
BARRIER = "torchelastic/agent/terminal_state/num_members"
CONF = {"last_call": "0.3", "gather": "0.2"}
Make = Callable[..., RendezvousHandler]


def example() -> ModuleType:
    """Return the documented example, imported as a user does."""
    path = Path(__file__).parents[2] / "examples" / "sqlite_rendezvous.py"
    spec = importlib.util.spec_from_file_location("sqlite_rendezvous", path)
    assert spec is not None and spec.loader is not None
    if "sqlite_rendezvous" not in sys.modules:
        sys.modules["sqlite_rendezvous"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["sqlite_rendezvous"]


class Handlers:
    """Makes the handlers of one job, and runs their calls in threads."""

    def __init__(self, make: Make, pool: ThreadPoolExecutor) -> None:
        self._make, self._pool = make, pool
        self.made: list[RendezvousHandler] = []

    def new(self, low: int = 2, high: int = 2, **conf: object) -> RendezvousHandler:
        self.made.append(self._make(low, high, **conf))
        return self.made[-1]

    def run(self, call: Callable[[], object]) -> Future:
        return self._pool.submit(call)

    def all_of(self, *calls: Callable[[], object]) -> list:
        futures = [self.run(call) for call in calls]
        return [future.result(WAIT_S) for future in futures]

    def meet(self, *members: RendezvousHandler) -> list:
        """Return the result of each handler, in the order of rank."""
        infos = self.all_of(*(member.next_rendezvous for member in members))
        return sorted(infos, key=lambda info: info.rank)


@functools.cache
def etcd_server() -> EtcdServer:
    """Start the server of this test process; it ends with it."""
    need_etcd()
    server = EtcdServer()
    server.start(stderr=subprocess.DEVNULL)
    return server


def by_name(backend: str, endpoint: str, **more: object) -> Make:
    def make(low: int, high: int, **conf: object) -> RendezvousHandler:
        return get_rendezvous_handler(
            RendezvousParameters(backend, endpoint, "run", low, high, **{**CONF, **more, **conf})
        )

    return make


def over(backend: Callable[[], RendezvousBackend], store: dist.Store | None) -> Make:
    def make(low: int, high: int, **conf: object) -> RendezvousHandler:
        params = RendezvousParameters("any", "", "run", low, high, **conf)
        return create_handler(store, backend(), params)

    return make


KINDS: dict[str, Callable[[Path], Make]] = {
    "elastane": lambda folder: by_name("elastane", f"127.0.0.1:{free_port()}"),
    "c10d": lambda folder: by_name("c10d", f"127.0.0.1:{free_port()}"),
    "etcd": lambda folder: by_name("etcd", etcd_server().get_endpoint(), etcd_prefix=folder.name),
    "file": lambda folder: by_name("file", str(folder / "shared")),
    "torch store": lambda folder: _over_a_torch_store(),
    "sqlite": lambda folder: over(
        lambda: example().SqliteBackend(str(folder / "rendezvous.db"), "run"), None
    ),
}


def _over_a_torch_store() -> Make:
    store = dist.HashStore()
    return over(lambda: C10dRendezvousBackend(store, "run"), store)


@pytest.fixture(params=sorted(KINDS))
def handlers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Handlers]:
    yield from _handlers(KINDS[request.param](tmp_path))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Handlers]:
    yield from _handlers(KINDS["elastane"](tmp_path))


def _handlers(make: Make) -> Iterator[Handlers]:
    with ThreadPoolExecutor(8) as pool:
        made = Handlers(make, pool)
        yield made
        made.all_of(*(member.shutdown for member in made.made))


def test_nodes_meet_at_a_store_that_is_new_for_each_attempt(handlers: Handlers) -> None:
    a, b = handlers.new(), handlers.new()
    first = handlers.meet(a, b)
    assert [(info.rank, info.world_size) for info in first] == [(0, 2), (1, 2)]
    first[0].store.set("key", "of the first")
    assert first[1].store.get("key") == b"of the first"
    assert (a.num_nodes_waiting(), b.num_nodes_waiting()) == (0, 0)
    second = handlers.meet(a, b)  # as agents do whose workers failed
    assert not second[0].store.check(["key"])
    assert not second[1].store.check(["key"])
    where = [info.bootstrap_store_info for info in (*first, *second)]
    assert where[0] == where[1] and where[2] == where[3] and where[0] != where[2]


def test_the_workers_store_is_served_and_has_none_of_the_agents_keys(plain: Handlers) -> None:
    infos = plain.meet(plain.new(), plain.new())
    infos[0].store.set("torchelastic/role_info/0", "agents")
    where = infos[0].bootstrap_store_info
    client = dist.TCPStore(where.master_addr, where.master_port, 2, False)
    assert not client.check(["torchelastic/role_info/0"])
    client.set("key", "workers")
    assert not infos[1].store.check(["key"])


def test_agents_are_told_to_meet_again_after_an_arrival(handlers: Handlers) -> None:
    a, b = handlers.new(1, 2), handlers.new(1, 2)
    a.next_rendezvous()
    assert a.num_nodes_waiting() == 0
    arriving = handlers.run(b.next_rendezvous)
    until(lambda: a.num_nodes_waiting() > 0, "the arrival is told")
    assert a.next_rendezvous().world_size == 2
    assert arriving.result(WAIT_S).world_size == 2


def test_agents_that_all_succeeded_shut_down_together(handlers: Handlers) -> None:
    a, b = handlers.new(), handlers.new()
    infos = handlers.meet(a, b)
    for info in infos:
        info.store.add(BARRIER, 1)
    first = handlers.run(a.shutdown)
    assert b.shutdown()
    assert first.result(WAIT_S)
    assert a.is_closed() and b.is_closed()
    for member in (a, b):
        with pytest.raises(RendezvousClosedError, match="succeeded"):
            member.next_rendezvous()


def test_an_agent_that_failed_for_good_ends_the_job_of_all(handlers: Handlers) -> None:
    a, b = handlers.new(), handlers.new()
    for info in handlers.meet(a, b):
        info.store.set(f"torchelastic/role_info/{info.rank}", "x")
    closing = handlers.run(a.shutdown)
    until(lambda: b.num_nodes_waiting() > 0, "b is told")
    with pytest.raises(RendezvousClosedError, match="failed for good"):
        b.next_rendezvous()
    assert closing.result(WAIT_S)


def test_others_may_finish_after_set_closed_and_no_node_can_join_any_more(
    handlers: Handlers,
) -> None:
    a, b = handlers.new(), handlers.new()
    handlers.meet(a, b)
    assert not a.is_closed() and not b.is_closed()
    a.set_closed()
    until(b.is_closed, "b hears that the job is closed")
    assert (a.num_nodes_waiting(), b.num_nodes_waiting()) == (0, 0)
    for member in (a, b):
        with pytest.raises(RendezvousClosedError):
            member.next_rendezvous()


def test_a_waiting_spare_ends_without_failure_when_the_job_succeeds(plain: Handlers) -> None:
    a, spare = plain.new(1, 1), plain.new(1, 1)
    a.next_rendezvous().store.add(BARRIER, 1)
    waiting = plain.run(spare.next_rendezvous)
    assert not a.num_nodes_waiting()
    a.shutdown()
    error = waiting.exception(WAIT_S)
    assert isinstance(error, (RendezvousGracefulExitError, RendezvousClosedError))


def test_too_few_nodes_time_out_and_are_counted(plain: Handlers) -> None:
    member = plain.new(join_timeout="1", last_call_timeout="1")
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
        member.next_rendezvous()


def test_a_node_that_was_never_in_a_world_closes_nothing(plain: Handlers) -> None:
    a = plain.new(1, 2)
    a.next_rendezvous()
    assert plain.new(1, 2).shutdown()
    refused = plain.new(1, 3)
    with pytest.raises(Exception, match="config-mismatch"):
        refused.next_rendezvous()
    assert refused.shutdown()
    assert not a.is_closed()


def test_a_store_whose_host_is_dying_is_left_for_the_next_world(
    plain: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastane.elastic.rendezvous import dynamic_rendezvous as module

    a, b = plain.new(1, 2), plain.new(1, 2)
    opened, lost = module.open_attempt_store, threading.Event()

    def fails_once(place, timeout):
        if place.node_rank == 1 and not lost.is_set():
            lost.set()
            raise RuntimeError("connection reset")
        return opened(place, timeout)

    monkeypatch.setattr(module, "open_attempt_store", fails_once)
    joining = [plain.run(a.next_rendezvous), plain.run(b.next_rendezvous)]
    until(lost.is_set, "the store is lost")
    until(lambda: any(each.done() for each in joining), "the store's host has its world")
    gone = next(each for each in joining if each.done())
    leaving, other = (a, joining[1]) if gone is joining[0] else (b, joining[0])
    gone.result(WAIT_S)
    leaving._membership.leave("it dies")
    assert other.result(WAIT_S).world_size == 1


def test_a_store_out_of_reach_in_a_world_that_stays_is_raised(
    plain: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastane.elastic.rendezvous import dynamic_rendezvous as module

    def fails(place, timeout):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(module, "_LOSS_MARGIN_S", 0.1)
    monkeypatch.setattr(module, "open_attempt_store", fails)
    with pytest.raises(RendezvousConnectionError, match="connection reset"):
        plain.new(1, 1, silence="1", heartbeat="0.4").next_rendezvous()


def test_a_handler_in_a_forked_child_is_refused(plain: Handlers) -> None:
    member = plain.new(1, 1)
    member.next_rendezvous()
    member._membership._pid = os.getpid() + 1
    with pytest.raises(RendezvousStateError, match="membership-forked"):
        member.num_nodes_waiting()
    member._membership._pid = os.getpid()


class _Exploding:
    def __reduce__(self) -> tuple:
        return os.abort, ()


def test_a_register_that_holds_a_pickle_is_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    backend = example().SqliteBackend(str(tmp_path / "db"), "run")
    backend.set_state(pickle.dumps(_Exploding()))
    member = DynamicRendezvousHandler.from_backend("run", None, backend, 1, 1)
    with pytest.raises(RendezvousStateError, match="store-record"):
        member.next_rendezvous()


def test_a_backend_that_is_away_is_a_connection_error(tmp_path: Path) -> None:
    backend = example().SqliteBackend(str(tmp_path / "no" / "folder" / "db"), "run")
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    member = DynamicRendezvousHandler.from_backend("run", None, backend, 1, 1)
    with pytest.raises(RendezvousConnectionError, match="unable to open"):
        member.next_rendezvous()


def test_a_backend_away_for_a_while_stops_no_node(tmp_path: Path) -> None:
    class Sometimes(example().SqliteBackend):
        away = False

        def ask(self, sql, *values):
            if self.away:
                raise RendezvousConnectionError("away")
            return super().ask(sql, *values)

    backend = Sometimes(str(tmp_path / "db"), "run")
    member = DynamicRendezvousHandler.from_backend("run", None, backend, 1, 1)
    member.next_rendezvous()
    backend.away = True
    until_s = time.monotonic() + 3.0  # longer than the lease
    until(lambda: member.num_nodes_waiting() or time.monotonic() > until_s, "time passes")
    assert member.num_nodes_waiting() == 0
    backend.away = False
    assert member.next_rendezvous().rank == 0
    assert member.shutdown()


def test_torchs_store_types_make_a_backend(tmp_path: Path) -> None:
    for kind, endpoint in (("file", str(tmp_path / "f")), ("tcp", f"127.0.0.1:{free_port()}")):
        params = RendezvousParameters("c10d", endpoint, "run", 1, 1, store_type=kind)
        backend, store = create_backend(params)
        member = create_handler(store, backend, params)
        assert (member.next_rendezvous().rank, member.get_backend()) == (0, "c10d")
        member.shutdown()
    by_name = RendezvousParameters("c10d", str(tmp_path / "n"), "run", 1, 1, store_type="file")
    member = get_rendezvous_handler(by_name)
    assert member.next_rendezvous().rank == 0
    member.shutdown()
    assert (tmp_path / "n").is_file()
    with pytest.raises(ValueError, match="store_type"):
        create_backend(RendezvousParameters("c10d", "", "run", 1, 1, store_type="redis"))


def test_the_example_has_at_most_forty_lines_and_leaves_only_its_file(tmp_path: Path) -> None:
    text = Path(example().__file__).read_text()
    code = [line for line in text.split('"""')[2].splitlines() if line.strip()]
    assert len(code) <= 40
    page = (Path(__file__).parents[2] / "docs" / "custom-rendezvous.md").read_text()
    shown = page.split("## An example\n")[1].split("```python\n")[1].split("```")[0].splitlines()
    assert [line for line in shown if line.strip() and line not in code] == []
    path = tmp_path / "rendezvous.db"
    member = get_rendezvous_handler(RendezvousParameters("sqlite", str(path), "run", 1, 1))
    assert member.next_rendezvous().rank == 0
    member.shutdown()
    with sqlite3.connect(path) as file:
        ((state,),) = file.execute("SELECT state FROM states").fetchall()
    assert len(state) < 10_000
