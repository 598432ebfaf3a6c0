"""metrics, events, timer, utils, redirects, tail_log: what their documentation promises."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistStoreError, HashStore
from torch.distributed.elastic.utils.data import CyclingIterator as TorchsCycling

from elastane.elastic import events, metrics, timer
from elastane.elastic.control_plane import worker_main
from elastane.elastic.utils import get_env_variable_or_raise, get_socket_with_port, macros
from elastane.elastic.utils.data import CyclingIterator, ElasticDistributedSampler
from elastane.elastic.utils.distributed import create_c10d_store, get_free_port
from elastane.elastic.utils.logging import get_logger
from elastane.elastic.utils.process_state import is_uninterruptible_state, read_proc_state
from elastane.elastic.utils.store import barrier, get_all, store_timeout, synchronize


class Kept(metrics.MetricHandler):
    def __init__(self):
        self.data = []

    def emit(self, metric_data):
        self.data.append((metric_data.group_name, metric_data.name, metric_data.value))


@pytest.fixture
def kept():
    handler = Kept()
    metrics.configure(handler, "mine")
    return handler


def test_a_metric_goes_to_the_handler_of_its_group_only(kept):
    metrics.put_metric("n", 3, "mine")
    metrics.put_metric("n", 4)
    metrics.getStream("mine").add_value("m", 5)
    assert kept.data == [("mine", "n", 3), ("mine", "m", 5)]


def test_prof_times_a_function_and_counts_how_it_ended(kept):
    @metrics.prof(group="mine")
    def good():
        return 7

    class Thing:
        @metrics.prof(group="mine")
        def bad(self):
            raise ValueError("x")

    assert good() == 7
    with pytest.raises(ValueError, match="x"):
        Thing().bad()
    names = [name for _, name, _ in kept.data]
    assert any(name.endswith("good.success") for name in names)
    assert any(name.endswith("Thing.bad.failure") for name in names)
    assert sum(name.endswith(".duration.ms") for name in names) == 2


def test_the_deprecated_names_warn_and_work(kept):
    with pytest.warns(FutureWarning):
        metrics.publish_metric("mine", "n", 1)
    with pytest.warns(FutureWarning):
        wrap = metrics.profile("mine")
    wrap(len)("ab")
    assert ("mine", "n", 1) in kept.data and ("mine", "len.success", 1) in kept.data


def test_metrics_are_set_up_from_a_configuration(capsys):
    metrics.initialize_metrics(metrics.MetricsConfig({"handler": "console", "group": "shown"}))
    metrics.put_metric("n", 3, "shown")
    assert "[shown]: n=3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="one of console, null"):
        metrics.initialize_metrics(metrics.MetricsConfig({"handler": "graphite"}))
    assert metrics.get_elapsed_time_ms(time.time() - 2) >= 2000


def test_an_event_comes_back_from_its_line_and_has_a_time():
    event = events.Event("e", events.EventSource.WORKER, metadata={"a": 1})
    assert events.Event.deserialize(event.serialize()) == event
    assert events.Event.deserialize(str(event)).timestamp > 1_600_000_000_000
    told = events.RdzvEvent("n", "run", "m", "host", 3, events.NodeState.FAILED, rank=2)
    assert events.RdzvEvent.deserialize(str(told)) == told


def test_events_go_to_a_handler_that_was_added_and_each_once():
    from elastane.elastic.events import handlers

    stream = io.StringIO()
    handlers._log_handlers["mine"] = logging.StreamHandler(stream)
    handlers._log_handlers["dynamic_rendezvous"] = logging.StreamHandler(stream)
    try:
        events.record(events.Event("hello", events.EventSource.AGENT), "mine")
        events._loggers.pop("dynamic_rendezvous", None)
        events.construct_and_record_rdzv_event("run", "joined", events.NodeState.RUNNING)
    finally:
        handlers._log_handlers["dynamic_rendezvous"] = logging.NullHandler()
        events._loggers.pop("dynamic_rendezvous", None)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["name"] == "hello"
    assert second["name"].startswith("test_small_modules.py:test_events_go_to")
    with pytest.raises(KeyError, match="one of"):
        events.get_logging_handler("nowhere")


class FakeClient(timer.TimerClient):
    def __init__(self):
        self.log = []

    def acquire(self, scope_id, expiration_time):
        self.log.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id):
        self.log.append(("release", scope_id))


def test_expires_sets_and_releases_and_names_the_line():
    client = FakeClient()
    with timer.expires(after=60, scope="mine", client=client):
        assert client.log[0][1] == "mine" and 59 < client.log[0][2] - time.time() <= 60
    assert client.log[1] == ("release", "mine")
    with contextlib.suppress(ValueError), timer.expires(after=1, client=client):
        raise ValueError
    assert "test_small_modules.py#" in client.log[2][1]
    assert client.log[3] == ("release", client.log[2][1])


SLEEPER = """
import sys, time
from elastane.elastic.timer import FileTimerClient, configure, expires
configure(FileTimerClient(sys.argv[1]))
with expires(after=0.2, scope="stuck"):
    print("in", flush=True)
    time.sleep(60)
"""


def test_the_file_timer_ends_a_process_that_misses_its_timer(tmp_path):
    told = []
    server = timer.FileTimerServer(
        str(tmp_path / "pipe"), "run", 0.1, log_event=lambda name, request: told.append(name)
    )
    server.start()
    try:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER, str(tmp_path / "pipe")])
        assert child.wait(20) == -9
    finally:
        server.stop()
    assert told == [
        "watchdog started", "timer expired", "kill worker process", "watchdog stopped",
    ]  # fmt: skip
    assert not (tmp_path / "pipe").exists()


def test_a_released_file_timer_ends_no_process(tmp_path):
    server = timer.FileTimerServer(str(tmp_path / "pipe"), "run", 0.1)
    client = timer.FileTimerClient(str(tmp_path / "pipe"), signal=0)
    client.acquire("a", time.time() - 1)
    client.release("a")
    server.start()
    server.run_once()
    server.stop()
    with pytest.raises(BrokenPipeError):
        client.acquire("a", 1)


def test_the_local_timer_takes_and_releases_by_process():
    import multiprocessing

    queue = multiprocessing.get_context("spawn").Queue()
    server, client = timer.LocalTimerServer(queue, max_interval=0.1), timer.LocalTimerClient(queue)
    client.acquire("a", 5.0)
    client.acquire("b", 50.0)
    client.release("b")
    found = []
    while len(found) < 3:
        found += server._request_queue.get(3, 1.0)
    server.register_timers(found)
    expired = server.get_expired_timers(10.0)
    assert [t.scope_id for t in expired[os.getpid()]] == ["a"]
    server.clear_timers({os.getpid()})
    assert server.get_expired_timers(100.0) == {}


def in_threads(world, work):
    results, threads = [None] * world, []
    for rank in range(world):

        def run(rank=rank):
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads.append(threading.Thread(target=run))
    [t.start() for t in threads]
    [t.join(30) for t in threads]
    return results


def test_synchronize_returns_all_data_in_rank_order():
    store = HashStore()
    found = in_threads(3, lambda rank: synchronize(store, f"{rank}".encode(), rank, 3, "k", 20))
    assert found == [[b"0", b"1", b"2"]] * 3


def test_a_barrier_names_the_missing_ranks():
    store = HashStore()

    def arrive(rank):
        barrier(store, 4, "b", 0.5, rank, lambda r: f"host{r}", 0.2)

    errors = in_threads(2, arrive)
    assert all(isinstance(error, DistStoreError) for error in errors)
    assert "missing_ranks=[host2, host3]" in str(errors[0])
    assert "check rank 0 (host0)" in str(errors[1])
    assert in_threads(2, lambda rank: barrier(store, 2, "other", 20)) == [None, None]
    with pytest.raises(AssertionError):
        barrier(store, 2, "b", 1, None, str)


def test_the_store_timeout_is_restored_after_an_error():
    store = HashStore()
    store.set_timeout(timedelta(seconds=9))
    with pytest.raises(ValueError, match="x"), store_timeout(store, 1.5):
        assert store.timeout == timedelta(seconds=1.5)
        raise ValueError("x")
    assert store.timeout == timedelta(seconds=9)
    store.set("a0", b"1")
    assert get_all(store, 0, "a", 1) == [b"1"]


def test_a_store_of_ones_own_is_served_and_a_taken_port_is_refused():
    store = create_c10d_store(is_server=True, server_addr="localhost", timeout=10)
    store.set("k", "v")
    assert store.get("k") == b"v"
    with pytest.raises(RuntimeError, match="already in use"):
        create_c10d_store(True, "localhost", store.port, timeout=2)
    with pytest.raises(ValueError, match="server_port"):
        create_c10d_store(True, "localhost", world_size=2)
    assert 0 < get_free_port() < 65536
    with contextlib.closing(get_socket_with_port()) as held:
        assert held.getsockname()[1] > 0


@pytest.mark.parametrize("length", [1, 7, 100])
@pytest.mark.parametrize("worlds", [(1, 3), (4, 2), (3, 5)])
@pytest.mark.parametrize("start", [0, 3, 50])
def test_an_epoch_resumed_in_another_world_uses_each_sample_once(length, worlds, start):
    if start >= length:
        with pytest.raises(ValueError, match="should be less than dataset size"):
            ElasticDistributedSampler(range(length), 1, 0, start)
        return
    before, after = worlds

    def dealt(world, begin):
        samplers = [ElasticDistributedSampler(range(length), world, r, begin) for r in range(world)]
        for sampler in samplers:
            sampler.set_epoch(5)
        lists = [list(sampler) for sampler in samplers]
        assert {len(each) for each in lists} == {len(samplers[0])}
        return [index for step in zip(*lists, strict=True) for index in step]

    seen = dealt(before, 0)[:start] + dealt(after, start)[: length - start]
    assert sorted(seen) == list(range(length))


def test_the_order_of_a_whole_epoch_is_torchs():
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler as Torchs

    data = list(range(11))
    for rank in range(3):
        mine, theirs = ElasticDistributedSampler(data, 3, rank), Torchs(data, 3, rank)
        mine.set_epoch(2), theirs.set_epoch(2)
        assert list(mine) == list(theirs) and len(mine) == len(theirs)
    with pytest.raises(TypeError):
        ElasticDistributedSampler(torch.utils.data.IterableDataset(), 1, 0)


@pytest.mark.parametrize(("n", "start"), [(1, 0), (3, 0), (3, 1), (2, 5)])
def test_cycling_goes_through_the_epochs_as_torchs_does(n, start):
    make = lambda epoch: iter([epoch] * epoch)  # noqa: E731
    assert list(CyclingIterator(n, make, start)) == list(TorchsCycling(n, make, start))
    # Empty epochs in a row: torch's recurses once for each.
    assert list(CyclingIterator(5000, lambda epoch: iter([]))) == []


def test_small_helpers(monkeypatch):
    monkeypatch.setenv("SET", "1")
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    assert get_env_variable_or_raise("SET") == "1"
    with pytest.raises(ValueError, match="UNSET"):
        get_env_variable_or_raise("UNSET")
    assert macros.substitute(["a${local_rank}", "$x", 7], "3") == ["a3", "$x", 7]
    assert get_logger().name == __name__ and get_logger("n").level == logging.ERROR
    assert read_proc_state(os.getpid()) in "RS" and read_proc_state(2**22 + 1) is None
    assert is_uninterruptible_state("D+") and not is_uninterruptible_state(None)


def test_worker_main_records_and_serves(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_WORKER_SERVER_SOCKET", raising=False)
    with worker_main():
        pass
    path = str(tmp_path / "socket")
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", path)

    @worker_main()
    def main():
        return os.path.exists(path)

    assert main() is True


def test_a_health_check_answers():
    import urllib.request

    from elastane.elastic.agent.server.health_check_server import create_healthcheck_server

    server = create_healthcheck_server(lambda: int(time.time()), get_free_port(), 60)
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server._port}/", timeout=5) as answer:
            assert answer.status == 200
    finally:
        server.stop()
        server.stop()
