"""elastane.elastic's small modules: which are torch's own, and the others' differences."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elastane.elastic import metrics, timer
from elastane.elastic.control_plane import worker_main
from elastane.elastic.utils.data import ElasticDistributedSampler
from elastane.elastic.utils.process_state import is_uninterruptible_state, read_proc_state

ROOT = Path(__file__).resolve().parents[3]
TORCHS_OWN = [
    *("events.api", "events.handlers", "metrics.api", "multiprocessing.redirects"),
    *("timer.debug_info_logging", "timer.local_timer", "utils.api", "utils.distributed"),
    *("utils.data.cycling_iterator", "utils.log_level", "utils.logging", "utils.store"),
]


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_a_module_that_works_unchanged_is_torchs_own(name):
    ours = importlib.import_module(f"elastane.elastic.{name}")
    assert ours is importlib.import_module(f"torch.distributed.elastic.{name}")
    parent, _, last = f"elastane.elastic.{name}".rpartition(".")
    assert getattr(importlib.import_module(parent), last) is ours


def test_the_decision_record_lists_the_modules_that_are_torchs_own():
    record = (ROOT / "docs" / "decisions" / "elastic-api.md").read_text()
    told = set(re.findall(r"^\| `([a-z_.0-9]+)` \| torch's own", record, re.M))
    assert told == set(TORCHS_OWN)


def test_metrics_are_set_up_from_a_configuration(capsys):
    metrics.initialize_metrics(metrics.MetricsConfig({"handler": "console", "group": "shown"}))
    metrics.put_metric("n", 3, "shown")
    assert "[shown]: n=3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="one of console, null"):
        metrics.initialize_metrics(metrics.MetricsConfig({"handler": "graphite"}))


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
        assert child.wait(60) == -9
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


def test_the_state_of_a_process_is_its_letter():
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

    server = create_healthcheck_server(lambda: int(time.time()), 0, 60)
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server._port}/", timeout=5) as answer:
            assert answer.status == 200
    finally:
        server.stop()
        server.stop()
