"""Launching from Python with elastane's rendezvous: values, failures, signals, no leftovers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from agent_functions import put
from launch_support import SUPPORT, LocalHandler, program
from ports import free_port
from process_harness import until
from supervise import alive, marked

from elastane.elastic import metrics
from elastane.elastic.launcher import api
from elastane.elastic.launcher.api import LaunchConfig, elastic_launch, launch_agent
from elastane.elastic.multiprocessing import DefaultLogsSpecs, Std
from elastane.elastic.multiprocessing.errors import ChildFailedError, record
from elastane.elastic.rendezvous import RendezvousTimeoutError, rendezvous_handler_registry
from elastane.errors import ConfigurationError
from elastane.functions.job import EndedJob
from elastane.observe.report import FinalReport, ReportedFailure

theirs = importlib.import_module("torch.distributed.launcher.api")
CONFIGS = {"elastane": LaunchConfig, "torch": theirs.LaunchConfig}
WORDS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")


def config(**more):
    given = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "run_id": f"run-{uuid.uuid4().hex[:6]}",
        "max_restarts": 0,
    }
    return LaunchConfig(**{**given, **more})


def signals():
    """Return how this program handles signals."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [signal.getsignal(one) for one in names]


def shape(kind):
    return [(f.name, f.default, f.default_factory) for f in dataclasses.fields(kind)]


def test_the_configuration_has_the_fields_and_defaults_of_torch(monkeypatch):
    assert shape(LaunchConfig) == shape(theirs.LaunchConfig)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "17")
    for more in (
        {},
        {"rdzv_timeout": 5},
        {"rdzv_configs": {"timeout": 7}},
        {"shutdown_timeout": 0},
    ):
        mine, reference = (dataclasses.asdict(kind(1, 2, 3, **more)) for kind in CONFIGS.values())
        mine.pop("logs_specs"), reference.pop("logs_specs")
        assert mine == reference
    for kind in CONFIGS.values():
        assert type(kind(1, 1, 1).logs_specs).__name__ == "DefaultLogsSpecs"
        with pytest.raises(ValueError, match="shutdown_timeout must be non-negative, got -1"):
            kind(1, 1, 1, shutdown_timeout=-1)


def test_a_partial_of_a_closure_gives_values_by_rank_after_a_restart_also_from_a_thread(
    monkeypatch,
):
    begun, base = signals(), 40

    def fail_once(more, word):
        """Fail on rank 1 of the first attempt; the others wait until they are stopped."""
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                raise RuntimeError("once")
            while True:
                time.sleep(600)
        return word, base + more, os.environ["TORCHELASTIC_RESTART_COUNT"]

    put = []
    monkeypatch.setitem(metrics.api._metrics_map, "torchelastic", Numbers(put))
    launched = elastic_launch(config(max_restarts=1), functools.partial(fail_once, 2))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launched, "word-${local_rank}")
        assert running.result(60) == {0: ("word-0", 42, "1"), 1: ("word-1", 42, "1")}
    assert signals() == begun
    names = {name.removeprefix("workers.default_role."): value for name, value in put}
    assert {name for name in names if name.startswith("run_") and names[name]} == {
        "run_total",
        "run_success_with_retries",
    }
    assert (names["remaining_restarts"], names["flakiness"], names["succeeded"]) == (0, 50, 1)


class Numbers(metrics.MetricHandler):
    def __init__(self, put):
        self.put = put

    def emit(self, metric_data):
        self.put.append((metric_data.name, metric_data.value))


def fail_at(rank):
    if int(os.environ["RANK"]) == rank:
        raise LookupError(f"the one of rank {rank}")
    while True:
        time.sleep(600)


def test_a_failed_function_is_a_child_failed_error_with_its_rank_and_traceback(
    tmp_path, monkeypatch
):
    own = tmp_path / "own-error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
    with pytest.raises(ChildFailedError) as caught:
        record(elastic_launch(config(logs_specs=logs), fail_at))(1)
    error = caught.value
    rank, failure = error.get_first_failure()
    assert (error.name, rank, failure.local_rank, failure.exitcode) == ("fail_at", 1, 1, 1)
    assert failure.message["message"] == "LookupError: the one of rank 1"
    trace = failure.message["extraInfo"]["py_callstack"]
    assert f'File "{__file__}"' in trace and "in fail_at" in trace
    assert "LookupError: the one of rank 1" in str(error) and "fail_at FAILED" in str(error)
    assert failure.error_file.startswith(str(tmp_path / "logs"))
    assert json.loads(Path(failure.error_file).read_text())["message"] == failure.message
    copied = json.loads(own.read_text())["message"]
    assert copied == {**failure.message, "errorCode": 1}, "record() copies it"
    assert error.report.root_cause.rank == 1
    assert abs(failure.timestamp - time.time()) < 60


def test_the_root_cause_is_the_coordinators_verdict_also_of_another_node():
    first = ReportedFailure(
        node="b",
        rank=5,
        local_rank=1,
        pid=7,
        exit_code=1,
        exit="exit code 1",
        time_ns=9 * 10**9,
        message="Traceback\n  ...\nKeyError: 'x'\n",
    )
    other = msgspec.structs.replace(first, node="a", rank=0, exit_code=-6, time_ns=8 * 10**9)
    report = FinalReport(
        job="j", ok=False, exit_code=1, reason="r", root_cause=first, failures=[other, first]
    )
    with pytest.raises(ChildFailedError) as caught:
        api._raise_failure("train", EndedJob(1, report))
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.local_rank, failure.timestamp) == (5, 1, 9)
    assert failure.message["message"] == "KeyError: 'x'"
    assert caught.value.failures[0].exitcode == -6


TELLING = "import os, sys; print([os.environ[n] for n in {!r}], sys.argv[1:]); sys.exit({})"


def test_a_command_gets_its_ranks_and_its_output_goes_to_the_given_folder(tmp_path):
    logs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)
    wanted = config(logs_specs=logs, max_restarts=4, run_id="named")
    script = TELLING.format(WORDS, 0)
    values = elastic_launch(wanted, sys.executable)("-c", script, "${local_rank}", 7)
    assert values == {0: None, 1: None}
    lines = sorted(path.read_text().strip() for path in tmp_path.rglob("*/stdout.log"))
    places = [[str(rank), str(rank), "2", "named", "4"] for rank in range(2)]
    assert lines == [f"{place} {[str(rank), '7']}" for rank, place in enumerate(places)]


def test_a_failed_command_is_named_and_has_its_exit_code(tmp_path):
    script = tmp_path / "the_script.py"
    script.write_text("import os, sys; sys.exit(3 * int(os.environ['RANK']))")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(), sys.executable)("-u", str(script))
    rank, failure = caught.value.get_first_failure()
    assert (caught.value.name, rank, failure.exitcode) == (str(script), 1, 3)
    assert failure.error_file == "<N/A>" and "enable traceback" in failure.message


def test_nodes_that_do_not_come_are_the_timeout_that_torchs_callers_catch():
    wanted = config(min_nodes=2, max_nodes=2, rdzv_configs={"join_timeout": 1})
    wanted.rdzv_endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
        elastic_launch(wanted, sys.executable)("-c", "")


def test_an_unusable_configuration_is_refused_before_any_start():
    with pytest.raises(AssertionError, match="entrypoint is missing"):
        launch_agent(config(), None, [])
    with pytest.raises(ValueError, match=r"HOST:PORT|port"):
        elastic_launch(config(rdzv_backend="static", rdzv_endpoint="host"), "true")()
    with pytest.raises(ConfigurationError, match=r"argument 0 of fail_at\(\)"):
        elastic_launch(config(), fail_at)(threading.Lock())
    with pytest.raises(ValueError, match="no-such"):
        elastic_launch(config(rdzv_backend="no-such"), "true")()


def test_a_queue_for_the_workers_has_the_agent_run_here():
    queue = multiprocessing.get_context("spawn").Queue()
    assert elastic_launch(config(), put)(queue, "${local_rank}") == {0: "put", 1: "put"}
    assert sorted(queue.get(timeout=90) for _ in range(2)) == ["0", "1"]
    queue.close()
    queue.join_thread()


class Health:
    """A health check server that another program started."""

    def __init__(self):
        self.stopped = 0

    def stop(self):
        self.stopped += 1


@pytest.mark.parametrize("backend", ["c10d", "local-test"])
def test_a_health_check_server_of_the_callers_is_stopped_at_the_end(backend, registered):
    health = Health()
    elastic_launch(config(rdzv_backend=backend), "true", health)()
    assert health.stopped == 1


@pytest.fixture
def registered():
    """A handler of another package, known by name."""
    handler = LocalHandler()
    rendezvous_handler_registry._registry["local-test"] = lambda params: handler
    yield handler
    rendezvous_handler_registry._registry.pop("local-test")


def test_a_registered_handler_has_the_agent_run_here_and_is_shut_down(registered, monkeypatch):
    monkeypatch.setattr(api, "run_command", None)  # no agent in a child process
    before = signals()
    wanted = config(rdzv_backend="local-test", max_restarts=1)
    script = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    assert elastic_launch(wanted, sys.executable)("-c", script) == {0: None, 1: None}
    assert (registered.rounds, registered.shutdowns) == (2, 1)
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(wanted, sys.executable)("-c", "raise SystemExit(5)")
    assert {f.exitcode for f in caught.value.failures.values()} <= {5, -15}
    assert registered.shutdowns == 2
    assert signals() == before


def test_a_registered_handler_is_used_from_a_thread_too(registered):
    before = signals()
    with ThreadPoolExecutor(1) as pool:
        launched = elastic_launch(config(rdzv_backend="local-test"), "true")
        assert pool.submit(launched).result(90) == {0: None, 1: None}
    assert signals() == before


HANGING = """
    import launch_support
    from elastane.elastic.rendezvous import rendezvous_handler_registry

    handler = launch_support.LocalHandler()
    rendezvous_handler_registry.register("local-test", lambda params: handler)
    old = {one: (lambda *_: None) for one in (signal.SIGTERM, signal.SIGINT)}
    for one, handle in old.items():
        signal.signal(one, handle)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    config = LaunchConfig(
        1, 1, 2, rdzv_backend=os.environ["BACKEND"], rdzv_endpoint="localhost:0", run_id="x",
        max_restarts=0, shutdown_timeout=5,
    )
    work = (
        "import os, pathlib, signal, sys, time;"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));"
        "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('finish'), True)]"
    )
    end = {}
    try:
        elastic_launch(config, sys.executable)("-c", work, str(HERE / "worker.${local_rank}"))
        end["how"] = "finished"
    except SignalException as error:
        end["how"] = error.sigval.name
    end["restored"] = all(signal.getsignal(one) is handle for one, handle in old.items())
    end["hup"] = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    end["quit"] = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    end["shutdowns"] = handler.shutdowns
    tell("end", end)
"""


def wait_workers(folder):
    def pids():
        return [int(p.read_text() or 0) for p in folder.glob("worker.*")]

    until(lambda: len(pids()) == 2 and all(pids()), "both workers run")
    return pids()


@pytest.mark.parametrize(
    ("backend", "sent"),
    [
        ("c10d", signal.SIGTERM),
        pytest.param("c10d", signal.SIGINT, marks=pytest.mark.soak),
        pytest.param("local-test", signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_signal_is_a_signal_exception_and_no_process_is_left(tmp_path, backend, sent):
    with program(tmp_path, HANGING, BACKEND=backend, **SUPPORT) as one:
        wait_workers(tmp_path)
        os.kill(one.process.pid, sent)
        end = one.told("end")
        assert end == {
            "how": sent.name,
            "restored": True,
            "hup": True,
            "quit": True,
            "shutdowns": 0,
        }
        assert one.wait() == 0
        one.gone()


@pytest.mark.parametrize("backend", ["c10d", pytest.param("local-test", marks=pytest.mark.soak)])
def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path, backend):
    with program(tmp_path, HANGING, BACKEND=backend, **SUPPORT) as one:
        wait_workers(tmp_path)
        os.kill(one.process.pid, signal.SIGHUP)
        (tmp_path / "finish").touch()
        end = one.told("end")
        assert (end["how"], end["hup"], end["restored"]) == ("finished", True, True)
        assert end["shutdowns"] == (backend == "local-test")


@pytest.mark.parametrize("backend", ["c10d", pytest.param("local-test", marks=pytest.mark.soak)])
def test_a_killed_caller_leaves_no_worker(tmp_path, backend):
    with program(tmp_path, HANGING, BACKEND=backend, **SUPPORT) as one:
        workers = wait_workers(tmp_path)
        assert all(alive(pid) for pid in workers) and set(workers) <= marked(one.mark)
        one.process.kill()
        one.gone()


TWO_NODES = """
    def where(word):
        return word, int(os.environ["GROUP_RANK"]), int(os.environ["WORLD_SIZE"])

    if __name__ == "__main__":
        config = LaunchConfig(
            2, 2, 2, rdzv_backend="c10d", rdzv_endpoint=os.environ["ENDPOINT"], run_id="two",
        )
        tell(os.environ["NODE"], elastic_launch(config, where)(os.environ["NODE"]))
"""


@pytest.mark.soak
def test_two_programs_launch_one_job_and_each_gets_its_own_values(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    with (
        program(tmp_path, TWO_NODES, ENDPOINT=endpoint, NODE="a") as a,
        program(tmp_path, TWO_NODES, ENDPOINT=endpoint, NODE="b") as b,
    ):
        found = {"a": a.told("a"), "b": b.told("b")}
        assert [a.wait(), b.wait()] == [0, 0]
    assert sorted([*found["a"], *found["b"]]) == ["0", "1", "2", "3"]
    for name, values in found.items():
        ranks = sorted(map(int, values))
        assert ranks in ([0, 1], [2, 3])
        assert list(values.values()) == [[name, ranks[0] // 2, 4]] * 2
