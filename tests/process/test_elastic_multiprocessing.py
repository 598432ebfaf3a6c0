"""start_processes with real children: results, failures, ends, and no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from process_harness import until
from supervise import alive

from elastane.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SignalException,
    Std,
    SubprocessContext,
    start_processes,
)
from elastane.errors import ConfigurationError

SPECS = DefaultLogsSpecs
# A spawned child imports this module, and torch, beside whatever else this host does.
WAIT_S = 180.0


def echo(value):
    print(f"out {value}")
    print(f"err {value}", file=sys.stderr)
    return {"value": value, "mine": os.environ["MINE"]}


def large(value):
    return b"x" * value


def fail_at(rank, bad):
    if rank == bad:
        raise ValueError(f"of rank {rank}")
    time.sleep(200)  # until it is stopped


def unpicklable(rank):
    return threading.Lock()


def tensors(rank):
    import torch

    # A forked child of a process that has used OpenMP's threads waits for them for ever.
    torch.set_num_threads(1)
    return {"weights": torch.full((300, 300), float(rank)), "rank": rank}


class Sentinel:
    """Aborts a process that destroys its modules at exit, as torch's threads sometimes do."""

    def __init__(self, abort):
        self.abort = abort

    def __del__(self):
        self.abort()


def return_with_a_sentinel(rank):
    import atexit

    sys.modules["atexit"].sentinel = Sentinel(os.abort)
    threading.Thread(target=lambda: print("joined")).start()
    atexit.register(print, "at exit")
    sys.stdout.write("unflushed ")
    if rank:
        raise ValueError("of rank 1")


def die(rank):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(rank):
    os._exit(0)


def args_of(count, *more):
    return {rank: (rank, *more) for rank in range(count)}


def envs_of(count):
    return {rank: {"MINE": str(rank)} for rank in range(count)}


def start(fn, args, specs=None, method="fork"):
    return start_processes("t", fn, args, envs_of(len(args)), specs or SPECS(), start_method=method)


@pytest.mark.parametrize(
    "method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.soak)]
)
def test_values_and_output_of_each_function_come_back(method):
    context = start(echo, args_of(2), SPECS(redirects=Std.ALL), method)
    assert isinstance(context, MultiprocessContext)
    result = context.wait(WAIT_S)
    assert result.return_values == {r: {"value": r, "mine": str(r)} for r in range(2)}
    assert not result.is_failed()
    assert [Path(result.stdouts[r]).read_text() for r in range(2)] == ["out 0\n", "out 1\n"]
    assert [Path(result.stderrs[r]).read_text() for r in range(2)] == ["err 0\n", "err 1\n"]


def test_a_value_larger_than_a_pipe_comes_back():
    result = start(large, {0: (5_000_000,)}).wait(WAIT_S)
    assert len(result.return_values[0]) == 5_000_000


@pytest.mark.parametrize(
    "method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.soak)]
)
def test_tensors_come_back_by_value(method):
    result = start(tensors, args_of(2), method=method).wait(WAIT_S)
    assert not result.is_failed()
    for rank, found in result.return_values.items():
        assert found["rank"] == rank
        assert found["weights"].tolist() == [[float(rank)] * 300] * 300


def test_a_value_that_cannot_be_loaded_here_is_named(monkeypatch):
    context = start(tensors, args_of(1), method="spawn")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        patched.setitem(sys.modules, "torch._utils", None)
        with pytest.raises(ConfigurationError, match=r"what tensors\(\) returned on rank 0"):
            context.wait(WAIT_S)
    context.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spawned_child_leaves_without_the_interpreters_teardown(rank):
    context = start(return_with_a_sentinel, {0: (rank,)}, SPECS(redirects=Std.ALL), "spawn")
    result = context.wait(WAIT_S)
    assert [failure.exitcode for failure in result.failures.values()] == [1] * rank
    shown = Path(result.stdouts[0]).read_text()
    assert sorted(shown.split()) == ["at", "exit", "joined", "unflushed"]
    assert ("ValueError: of rank 1" in Path(result.stderrs[0]).read_text()) == bool(rank)


def test_the_first_failure_ends_the_others_at_once_and_they_are_no_failures():
    context = start(fail_at, args_of(3, 1))
    pids = context.pids()
    began = time.monotonic()
    result = context.wait(WAIT_S, period=WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2, "an end is noticed at once, not at a period's"
    assert set(result.failures) == {1} and result.return_values == {}
    assert result.failures[1].message["message"] == "ValueError: of rank 1"
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.parametrize(
    ("fn", "exitcode", "said"),
    [
        (unpicklable, 1, "what unpicklable() returned cannot be pickled: lock"),
        (die, -9, "Signal 9"),
        (leave, 0, "enable traceback"),
    ],
)
def test_a_child_that_gives_no_value_has_failed(fn, exitcode, said):
    result = start(fn, args_of(1)).wait(WAIT_S)
    failure = result.failures[0]
    assert failure.exitcode == exitcode and said in str(failure.message)


def test_commands_run_in_sessions_of_their_own_and_fail_by_exit_code():
    script = "import os, sys; sys.exit(3 if os.environ['MINE'] == '1' else 0)"
    args = dict.fromkeys(range(2), ("-c", script))
    context = start_processes("t", sys.executable, args, envs_of(2), SPECS())
    assert isinstance(context, SubprocessContext)
    result = context.wait(WAIT_S)
    assert {r: f.exitcode for r, f in result.failures.items()} == {1: 3}
    assert all(os.getsid(0) != pid for pid in context.pids().values())


def test_close_ends_a_child_that_ignores_sigterm_and_what_it_started(tmp_path):
    script = "trap '' TERM; sleep 300 & echo $! > child; mv child pid; while :; do sleep 1; done"
    context = start_processes(
        "t", "/bin/sh", {0: ("-c", f"cd {tmp_path}; {script}")}, envs_of(1), SPECS()
    )
    until((tmp_path / "pid").exists, "the grandchild runs")
    grandchild = int((tmp_path / "pid").read_text())
    began = time.monotonic()
    context.close(timeout=1)
    assert time.monotonic() - began < 60
    until(lambda: not alive(grandchild), "the grandchild is gone")
    assert not alive(context.pids()[0])
    context.close()


def test_wait_with_timeout_zero_returns_at_once():
    context = start(fail_at, args_of(1, 5))
    try:
        assert context.wait(0) is None
        assert context.wait(0.05) is None
    finally:
        context.close(signal.SIGKILL)


def test_teed_output_is_shown_under_its_name_and_matching_lines_are_copied(capfd, tmp_path):
    specs = SPECS(str(tmp_path), tee=Std.ALL)
    context = start_processes(
        "t",
        "/bin/sh",
        dict.fromkeys(range(2), ("-c", "echo keep $MINE; echo drop $MINE")),
        envs_of(2),
        specs,
        duplicate_stdout_filters=["keep"],
    )
    result = context.wait(WAIT_S)
    shown = capfd.readouterr().out
    assert "[t0]:keep 0" in shown and "[t1]:drop 1" in shown
    (filtered,) = tmp_path.rglob("filtered_stdout.log")
    assert sorted(filtered.read_text().splitlines()) == ["[t0]:keep 0", "[t1]:keep 1"]
    assert not result.is_failed()


def test_maps_that_are_not_of_all_local_ranks_are_refused():
    with pytest.raises(RuntimeError, match="mismatch"):
        start_processes("t", "true", {0: (), 2: ()}, envs_of(2), SPECS())
    with pytest.raises(RuntimeError, match="mismatch"):
        start_processes("t", "true", {0: ()}, envs_of(2), SPECS())
    with pytest.raises(FileNotFoundError):
        start_processes("t", "/no/such/program", {0: ()}, envs_of(1), SPECS())


def test_processes_can_start_from_a_thread_and_foreign_children_are_left_alone():
    foreign = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    found = []
    thread = threading.Thread(target=lambda: found.append(start(echo, args_of(2)).wait(WAIT_S)))
    thread.start()
    thread.join(WAIT_S)
    assert set(found[0].return_values) == {0, 1}
    assert foreign.wait(WAIT_S) == 7, "its exit code was left to who started it"


PARENT = """
import sys, time
from elastane.elastic.multiprocessing import DefaultLogsSpecs, start_processes
context = start_processes("t", "/bin/sleep", {0: ("300",), 1: ("300",)}, {0: {}, 1: {}},
                          DefaultLogsSpecs())
print(*context.pids().values(), flush=True)
time.sleep(300)
"""


def test_children_die_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    parent.kill()
    parent.wait(WAIT_S)
    until(lambda: not any(map(alive, pids)), "the children are gone")


IN_ITS_MAKING = """
import os, signal, time
from elastane.elastic.multiprocessing import DefaultLogsSpecs, start_processes
os.register_at_fork(after_in_child=lambda: time.sleep(1))
context = start_processes("t", time.sleep, {0: (300,)}, {0: {}}, DefaultLogsSpecs(),
                          start_method="fork")
os.kill(context.pids()[0], signal.SIGTERM)
result = context.wait(90)
print("it lives on" if result is None else f"failed: {result.is_failed()}")
context.close(signal.SIGKILL)
"""


def test_a_signal_in_the_middle_of_a_childs_making_is_not_lost():
    said = subprocess.check_output([sys.executable, "-c", IN_ITS_MAKING], text=True, timeout=WAIT_S)
    assert said == "failed: True\n"


def test_a_signal_becomes_an_exception_in_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    context = start(fail_at, args_of(1, 5))
    try:
        with pytest.raises(SignalException) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        assert caught.value.sigval is signal.SIGTERM
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, before if number == signal.SIGTERM else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        context.close(signal.SIGKILL)
