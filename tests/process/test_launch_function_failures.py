"""elastane.launch and failures: each one raises an error that names it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import tempfile
import threading

import pytest
from function_harness import calls
from launched import arguments, ranked

import elastane
from elastane.errors import ConfigurationError, UsageError, WorkerFailedError
from elastane.functions.failure import FunctionFailedError


@pytest.fixture
def call(tmp_path, monkeypatch):
    with calls(tmp_path, monkeypatch) as launch:
        yield launch


FORKED = {"no_zygote": False, "preload": "json"}


@pytest.mark.parametrize("options", [{}, FORKED], ids=["exec", "fork"])
def test_an_exception_is_raised_with_rank_and_trace_and_without_frames_of_ours(
    call, capfd, options
):
    def lose(table):
        return table["weights"]

    def train():
        if os.environ["RANK"] == "1":
            lose({})
        threading.Event().wait()

    with pytest.raises(FunctionFailedError, match="rank 1: KeyError: 'weights'") as caught:
        call(train, nproc=2, **options)
    error = caught.value
    assert isinstance(error, WorkerFailedError)
    assert error.report.root_cause.rank == 1
    files = re.findall(r'File "([^"]+)"', error.trace)
    assert files == [__file__, __file__], error.trace
    assert 'return table["weights"]' in error.trace
    shown = capfd.readouterr().err
    assert "worker/call.py" not in shown and "runpy" not in shown, shown


def test_a_function_that_was_killed_is_called_again(call, tmp_path):
    def train():
        import signal
        import time

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    assert call(train, nproc=2, max_restarts=1) == {0: "1", 1: "1"}
    with pytest.raises(FunctionFailedError, match=r"SIGKILL"):
        call(train, nproc=2)


def test_an_exit_with_code_0_is_a_return_and_any_other_a_failure(call):
    assert call(sys.exit) == {0: None}
    assert call(sys.exit, (0,)) == {0: None}
    with pytest.raises(FunctionFailedError, match=r"exit\(\) failed on rank 0: exit code 3"):
        call(sys.exit, (3,))


def test_a_process_that_ends_without_returning_has_no_result(call):
    with pytest.raises(ConfigurationError, match=r"_exit\(\) did not return on rank 0") as caught:
        call(os._exit, (0,))
    assert caught.value.slug == "no-result"


def test_an_argument_that_cannot_be_pickled_is_named_before_the_start(call, monkeypatch):
    monkeypatch.setattr("elastane.functions.launch.run_function", None)
    with pytest.raises(ConfigurationError, match="argument lock of arguments"):
        call(arguments, kwargs={"lock": threading.Lock()})


def test_a_result_that_cannot_be_pickled_is_named(call):
    with pytest.raises(FunctionFailedError, match=r"what .* returned cannot be pickled: lock"):
        call(lambda: threading.Lock())  # noqa: PLW0108


def test_a_module_that_workers_lack_is_named(call, monkeypatch):
    module = type(sys)("only_here")
    exec("def f(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(FunctionFailedError, match="No module named 'only_here'") as caught:
        call(module.f)
    assert "[function-load]" in caught.value.trace


def test_a_temporary_folder_that_is_not_there_is_named(call, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigurationError, match=r"cannot be left in /no/such/folder") as caught:
        call(ranked)
    assert caught.value.slug == "function-folder"


def test_a_machine_without_a_temporary_folder_is_an_error_that_says_so(call, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigurationError, match="No usable temporary directory") as caught:
        call(ranked)
    assert caught.value.slug == "function-folder"


@contextlib.contextmanager
def files_of_at_most(size):
    """Simulate a full disk for a process: no file grows beyond `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_arguments_is_an_error_of_the_folder(call):
    with (
        files_of_at_most(1 << 20),
        pytest.raises(ConfigurationError, match=r"arguments \(3\d+ bytes\)") as caught,
    ):
        call(arguments, (b"x" * (3 << 20),))
    assert caught.value.slug == "function-folder"


def test_no_room_for_a_result_is_an_error_of_the_folder(call):
    with (
        files_of_at_most(1 << 20),
        pytest.raises(FunctionFailedError, match=r"what .* returned \(3\d+ bytes\)") as caught,
    ):
        call(lambda: b"x" * (3 << 20))
    assert "[function-folder]" in caught.value.trace


@pytest.mark.parametrize("fn", ["train", None, 3])
def test_an_object_that_is_not_callable_is_refused(fn):
    with pytest.raises(TypeError, match="is no function"):
        elastane.launch(fn)


NO_SEQUENCES = ["abc", b"abc", 0.1, {"lr": 1}, iter(())]


@pytest.mark.parametrize("args", NO_SEQUENCES, ids=lambda args: type(args).__name__)
def test_arguments_that_are_no_sequence_are_refused(args):
    with pytest.raises(TypeError, match=r"expected a tuple"):
        elastane.launch(ranked, args)


def test_a_misspelt_option_is_refused_with_the_nearest_name(call):
    with pytest.raises(UsageError, match="did you mean max_restarts"):
        call(ranked, max_restart=3)


def test_a_failed_nested_call_is_a_failure_of_its_worker(call):
    def outer():
        elastane.launch(ranked, ("too", "many"), nproc=1, no_zygote=True)

    with pytest.raises(FunctionFailedError, match=r"TypeError.*positional arguments"):
        call(outer)
