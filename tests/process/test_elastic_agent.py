"""LocalElasticAgent with real workers: values, failures, restarts, environment, watches, ends."""

from __future__ import annotations

import importlib
import json
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from agent_functions import break_down, value
from launch_support import HANG, LocalHandler, gone, kill, told, worker
from ports import free_port
from process_harness import until

from elastane.elastic.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from elastane.elastic.agent.server import local_elastic_agent as module
from elastane.elastic.multiprocessing import DefaultLogsSpecs, Std
from elastane.elastic.multiprocessing.errors import ProcessFailure
from elastane.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo


def spec_of(handler=None, kind=WorkerSpec, **more):
    given = {
        "role": "trainer",
        "local_world_size": 2,
        "rdzv_handler": handler or LocalHandler(),
        "entrypoint": sys.executable,
        "max_restarts": 0,
        "monitor_interval": 0.02,
        "local_addr": "127.0.0.1",
    }
    return kind(**{**given, **more})


def agent_of(logs=None, handler=None, timeout=5, **more):
    spec = spec_of(handler, **more)
    return LocalElasticAgent(spec, logs or DefaultLogsSpecs(), shutdown_timeout=timeout)


@pytest.fixture(autouse=True)
def quiet_signals():
    """Restore the signal handlers that torch's agents and ours install in the main thread."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {one: signal.getsignal(one) for one in names}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def run():
    """Run agents in threads, and end those that a failed test left."""
    agents = []
    with ThreadPoolExecutor(2) as pool:

        def running(agent):
            agents.append(agent)
            return pool.submit(agent.run)

        yield running
        for agent in agents:
            agent._remaining_restarts = 0
            agent._close_workers(signal.SIGKILL, 1)


class SecondOfTwo(LocalHandler):
    """Makes its agent the second node of two; the first never sends anything."""

    def next_rendezvous(self):
        where = RendezvousStoreInfo("127.0.0.1", self.port)
        return RendezvousInfo(dist.HashStore(), 1, 2, where)


def test_a_callables_values_come_by_global_rank(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    spec = spec_of(SecondOfTwo(), entrypoint=value, args=("rank-${local_rank}", 3))
    result = LocalElasticAgent(spec, DefaultLogsSpecs(), exit_barrier_timeout=0.1).run()
    assert result.state == WorkerState.SUCCEEDED
    assert result.return_values == {2: ("rank-0", 3, 2, 4), 3: ("rank-1", 3, 3, 4)}


def test_a_callables_failure_has_its_error_file_and_the_stopped_one_is_none(tmp_path):
    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    result = agent_of(logs, entrypoint=break_down, args=("1",)).run()
    assert result.is_failed() and set(result.failures) == {1}
    failure = result.failures[1]
    assert isinstance(failure, ProcessFailure)
    assert (failure.local_rank, failure.exitcode) == (1, 1)
    assert failure.message["message"] == "ArithmeticError: no such sum"
    assert "in break_down" in failure.message["extraInfo"]["py_callstack"]
    assert tmp_path in Path(failure.error_file).parents


def test_a_command_has_its_macros_and_prefixes_and_no_value(tmp_path, capfd):
    args = ("-c", "import sys; print('word', sys.argv[1])", "${local_rank}")
    spec = spec_of(args=args)
    agent = LocalElasticAgent(
        spec,
        DefaultLogsSpecs(log_dir=str(tmp_path), tee=Std.OUT),
        log_line_prefix_template="<${role_name}:${local_rank}:${rank}>",
    )
    assert agent.run().return_values == {0: None, 1: None}
    shown = capfd.readouterr().out.splitlines()
    assert {"<trainer:0:0>word 0", "<trainer:1:1>word 1"} <= set(shown)


def test_a_killed_worker_restarts_all_until_the_budget_is_used_up(tmp_path, run):
    handler = LocalHandler()
    agent = agent_of(handler=handler, args=(worker(tmp_path),), max_restarts=1)
    running = run(agent)
    first = told(tmp_path, 2)
    kill(first[1])
    second = told(tmp_path, 2, TORCHELASTIC_RESTART_COUNT="1")
    assert gone(first), "the other one was stopped"
    kill(second[0])
    result = running.result(90)
    assert {rank: f.exitcode for rank, f in result.failures.items()} == {0: -9}
    assert "Signal 9 (SIGKILL) received by PID" in result.failures[0].message
    assert handler.rounds == 2
    assert gone(second)


ADDED = {"ELASTANE_JOB", "ELASTANE_NODE", "ELASTANE_ROUND", "ELASTANE_ATTEMPT"}
ADDED |= {"PYTHONFAULTHANDLER", "OMP_NUM_THREADS"}
CASES = {
    "plain": ({}, {}),
    "variables that are set": (
        {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "MINE": "x"},
        {},
    ),
    "devices": ({"CUDA_VISIBLE_DEVICES": "5,7"}, {}),
    "virtual local rank": ({"CUDA_VISIBLE_DEVICES": "5, 7"}, {"virtual_local_rank": True}),
    "virtual local rank of all": ({}, {"virtual_local_rank": True}),
    "an address of the spec's": ({}, {"master_addr": "there", "master_port": 1, "role": "other"}),
    "restarts": ({}, {"max_restarts": 2}),
    "timers": ({"TORCHELASTIC_TIMER_FILE": "/tmp/some-pipe"}, {}),
    "an outer job": ({"TORCHELASTIC_ERROR_FILE": "/outer", "RANK": "7", "WORLD_SIZE": "8"}, {}),
}


def environments(kind, folder, more):
    """Return the environments of the workers of our agent, and of torch's."""
    folder.mkdir()
    package = {"elastane": "elastane.elastic", "torch": "torch.distributed.elastic"}[kind]
    server = importlib.import_module(f"{package}.agent.server.local_elastic_agent")
    logs = importlib.import_module(f"{package}.multiprocessing").DefaultLogsSpecs()
    last = more.get("max_restarts", 0)
    then = f"sys.exit(int(env['TORCHELASTIC_RESTART_COUNT']) < {last})"
    handler = LocalHandler()
    handler.use_agent_store = bool(more)
    spec = spec_of(handler, server.WorkerSpec, args=(worker(folder, then),), **more)
    assert not server.LocalElasticAgent(spec, logs).run().is_failed()
    return told(folder, 2, TORCHELASTIC_RESTART_COUNT=str(last))


@pytest.mark.parametrize("case", CASES)
def test_workers_have_the_variables_that_torchs_agent_gives(case, tmp_path, monkeypatch):
    variables, more = CASES[case]
    for name in (*ADDED, "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_TIMER_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    mine = environments("elastane", tmp_path / "mine", more)
    reference = environments("torch", tmp_path / "reference", more)
    for env, there in zip(mine, reference, strict=True):
        assert set(there) <= set(env)
        assert set(env) - set(there) == ADDED - set(variables)
        differing = {key for key in there if env[key] != there[key]}
        assert differing == {"TORCHELASTIC_ERROR_FILE", "PID"}
        # As torch names it, below a folder of the run's own.
        files = [one["TORCHELASTIC_ERROR_FILE"].split("/")[-3:] for one in (env, there)]
        assert files[0] == files[1]
        assert env["ELASTANE_JOB"] == env["TORCHELASTIC_RUN_ID"] == "local-run"


def test_a_missing_device_is_refused_as_in_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=3"):
        agent_of(args=("-c", ""), virtual_local_rank=True).run()


def test_the_shutdown_timeout_holds_where_a_failure_stops_the_others(tmp_path):
    then = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (here / ("ignores-" + env["RANK"])).touch()
        while not (here / "ignores-0").exists() or env["RANK"] == "0":
            time.sleep(0.01)
        sys.exit(4)
    """
    started_s = time.monotonic()
    result = agent_of(args=(worker(tmp_path, then),), timeout=1).run()
    assert time.monotonic() - started_s < 25.0, "the default is 30 s"
    assert {rank: f.exitcode for rank, f in result.failures.items()} == {1: 4}
    assert gone(told(tmp_path, 2))


def ask(port):
    """Return the status of a health check, 0 without an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_health_checks_are_answered_over_restarts_and_no_more_at_the_end(
    tmp_path, run, monkeypatch
):
    port = free_port()
    monkeypatch.setenv(module.TORCHELASTIC_HEALTH_CHECK_PORT, str(port))
    agent = agent_of(args=(worker(tmp_path),), max_restarts=1)
    running = run(agent)
    first = told(tmp_path, 2)
    until(lambda: ask(port) == 200, "it is well")
    server = agent._health_check_server
    kill(first[0])
    second = told(tmp_path, 2, TORCHELASTIC_RESTART_COUNT="1")
    assert agent._health_check_server is server and ask(port) == 200
    monkeypatch.setattr(agent, "_worker_watchdog", _Old())
    assert ask(port) == 503, "the timers tell of no progress"
    agent._worker_watchdog = None
    kill(second[0])
    assert running.result(90).is_failed()
    assert ask(port) == 0


class _Old:
    """A watchdog whose last progress was long ago."""

    def get_last_progress_time(self):
        return int(time.time()) - 3600

    def stop(self):
        pass


@pytest.mark.parametrize("port", ["no-number", "taken"])
def test_an_unusable_port_only_disables_the_health_checks(port, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = str(taken.getsockname()[1]) if port == "taken" else port
        monkeypatch.setenv(module.TORCHELASTIC_HEALTH_CHECK_PORT, text)
        with caplog.at_level("WARNING"):
            assert not agent_of(args=("-c", "")).run().is_failed()
        assert "no health checks" in caplog.text and text in caplog.text


TIMER = """
import {package}.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
if env["RANK"] == "0":
    with timer.expires(after=0.3):
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "package",
    ["elastane.elastic", pytest.param("torch.distributed.elastic", marks=pytest.mark.soak)],
)
def test_a_timer_that_expires_ends_its_worker(package, tmp_path, monkeypatch):
    monkeypatch.setenv(module.TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.delenv(module.TORCHELASTIC_TIMER_FILE, raising=False)
    agent = agent_of(args=(worker(tmp_path, TIMER.format(package=package)),))
    seen = []
    monkeypatch.setattr(module.SimpleElasticAgent, "_record", lambda self, e: seen.append(e))
    result = agent.run()
    assert {rank: f.exitcode for rank, f in result.failures.items()} == {0: -9}
    (event,) = [event for event in seen if event.name == "kill worker process"]
    about = json.loads(event.metadata["metadata"])
    (first,) = told(tmp_path, 1, RANK="0")  # the other may not have come as far
    assert about["worker_pid"] == first["PID"]
    assert event.metadata["run_id"] == "local-run"
    pipe = Path(first["TORCHELASTIC_TIMER_FILE"])
    assert not pipe.exists(), "the pipe is gone with the agent"


def test_a_worker_that_sleeps_in_the_kernel_for_too_long_fails_the_group(monkeypatch):
    monkeypatch.setattr(module, "read_proc_state", lambda pid: "D")
    handler = LocalHandler()
    agent = LocalElasticAgent(
        spec_of(handler, args=("-c", "import time; " + HANG), max_restarts=3),
        DefaultLogsSpecs(),
        shutdown_timeout=1,
        uninterruptible_state_timeout=0.1,
    )
    result = agent.run()
    assert result.is_failed() and not result.failures
    assert handler.rounds == 1, "no restart: the next worker would hang there too"


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, "", 0.0), (None, "2.5", 2.5), (None, "x", 0.0), (3, "2.5", 3.0), (-1, "2", 0.0)],
)
def test_the_bound_on_such_sleep_is_read_as_torch_reads_it(given, variable, expected, monkeypatch):
    torchs = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    monkeypatch.setenv(module.TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, variable)
    assert module._stuck_timeout_s(given) == expected
    assert torchs._resolve_uninterruptible_state_timeout(given) == expected


def test_workers_that_are_not_the_agents_own_are_an_unknown_state(tmp_path, run):
    agent = agent_of(args=(worker(tmp_path),))
    running = run(agent)
    envs = told(tmp_path, 2)
    agent.get_worker_group().workers[0].id = 1
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        running.result(90)
    assert gone(envs)
