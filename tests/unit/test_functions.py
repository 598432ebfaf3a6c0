"""Functions as jobs, without real runs: packing, texts of errors, output, signals."""

from __future__ import annotations

import functools
import io
import json
import linecache
import os
import pickle
import signal
import sys
import threading

import cloudpickle
import pytest

from elastane.errors import (
    ConfigurationError,
    ElastaneError,
    JobClosedError,
    JoinTimeoutError,
    MembershipError,
    NodeUnfitError,
)
from elastane.functions.agent import Relay
from elastane.functions.failure import FunctionFailedError, error_of
from elastane.functions.payload import FunctionCall, collect, name_of, pack
from elastane.functions.signals import raise_on, with_default_handler
from elastane.observe.report import FinalReport, ReportedFailure
from elastane.worker import call


def train(lr):
    return lr


class Trainer:
    def fit(self):
        """Do nothing; it is launched as a method."""

    def __call__(self):
        """Do nothing; its object is launched."""


@pytest.fixture(autouse=True)
def _no_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# What is packed, and what is collected


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (train, "train"),
        (functools.partial(functools.partial(train), 1), "train"),
        (Trainer().fit, "Trainer.fit"),
        (Trainer(), "Trainer"),
        (lambda: 0, "<lambda>"),
    ],
    ids=["function", "partial", "method", "object", "lambda"],
)
def test_a_function_is_named_as_in_its_source(fn, name):
    assert name_of(fn) == name


def test_a_packed_function_is_called_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    monkeypatch.setattr(sys, "path", ["", "/there"])
    files = pack(FunctionCall(train, (1,), {"lr": 2}))
    assert pickle.loads(files[call.CALL]) == (train, [1], {"lr": 2})
    header = json.loads(files[call.HEADER])
    assert header["argv"] == ["prog", "--flag"]
    assert header["path"] == [str(tmp_path), "/there"]


@pytest.mark.parametrize(
    ("parts", "culprit"),
    [
        (lambda bad: (lambda: bad, (), {}), r"<lambda>\(\) itself"),
        (lambda bad: (train, (0, bad), {}), r"argument 1 of train\(\)"),
        (lambda bad: (train, (0,), {"lr": bad}), r"argument lr of train\(\)"),
    ],
    ids=["function", "positional", "keyword"],
)
def test_an_argument_that_cannot_be_pickled_is_named(parts, culprit):
    with pytest.raises(ConfigurationError, match=f"^{culprit} cannot be sent") as caught:
        pack(FunctionCall(*parts(threading.Lock())))
    assert caught.value.slug == "unpicklable"


def test_cells_of_a_notebook_go_along_and_files_do_not(monkeypatch):
    cells = {"/tmp/ipykernel_1/a.py": "def f():\n    pass\n", "/tmp/ipykernel_1/b.py": "f()\n"}
    for name, text in cells.items():
        monkeypatch.setitem(
            linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name)
        )
    linecache.getlines(__file__)
    sources = json.loads(pack(FunctionCall(train))[call.HEADER])["sources"]
    assert cells.items() <= sources.items()
    assert __file__ not in sources


def leave(folder, attempt, **values):
    """Write the files that workers leave; `r0=None` is a worker that only began."""
    at = folder / call.VALUES / attempt
    at.mkdir(parents=True)
    for rank, content in values.items():
        (at / f"{rank[1:]}{call.BEGUN}").touch()
        if content is not None:
            (at / f"{rank[1:]}{call.VALUE}").write_bytes(content)


def test_values_are_of_the_attempt_that_ended_the_job(tmp_path):
    leave(tmp_path, "9.1", r0=pickle.dumps("old"), r1=None)
    leave(tmp_path, "10.0", r0=pickle.dumps("a"), r10=pickle.dumps("b"), r2=pickle.dumps("c"))
    assert list(collect(tmp_path, "f", "10.0").items()) == [(0, "a"), (2, "c"), (10, "b")]
    assert collect(tmp_path, "f", "10.1") == {}, "this node's workers were not in the last world"


def test_a_node_without_workers_has_no_values(tmp_path):
    assert collect(tmp_path, "f", "1.0") == {}


def test_ranks_without_a_result_are_named(tmp_path):
    leave(tmp_path, "1.0", r0=pickle.dumps(0), r1=None, r3=None)
    with pytest.raises(ConfigurationError, match=r"f\(\) did not return on rank 1, 3:") as caught:
        collect(tmp_path, "f", "1.0")
    assert caught.value.slug == "no-result"


@pytest.mark.parametrize("content", [b"", b"torn", b"cno_such_module\nf\n."], ids=str)
def test_a_value_that_cannot_be_loaded_is_an_error_of_its_rank(tmp_path, content):
    leave(tmp_path, "1.0", r3=content)
    with pytest.raises(ConfigurationError, match="returned on rank 3 cannot be loaded") as caught:
        collect(tmp_path, "f", "1.0")
    assert caught.value.slug == "unpicklable"


def test_a_worker_refuses_a_folder_that_others_may_write_in(tmp_path):
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigurationError, match="not this user's alone"):
        call.main([str(tmp_path)])


def test_the_main_of_a_worker_has_the_classes_that_came_from_the_callers(monkeypatch):
    def pickled_by_name(value):
        return pickle.loads(pickle.dumps(value)) is value

    made = type("Config", (Trainer,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", call._Main("__main__"))
    assert pickled_by_name(made)
    assert not hasattr(sys.modules["__main__"], "NoSuchClass")
    assert not hasattr(sys.modules["__main__"], "__file__")


# How it failed


def failure(message="", **more):
    facts = {"node": "n1", "rank": 3, "local_rank": 1, "pid": 7, "exit_code": 1, "time_ns": 0}
    return ReportedFailure(**{**facts, "exit": "exit code 1", "message": message, **more})


def report(**more):
    return FinalReport(**{"job": "j", "ok": False, "exit_code": 1, "reason": "so", **more})


TRACE = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    raise ValueError("first")
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    raise RuntimeError(text)
RuntimeError: line one
line two
  line three
"""


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (TRACE, "RuntimeError: line one"),
        ("", "exit code 1"),
        ("\n \n", "exit code 1"),
        ("some words\nFatal: killed\n", "Fatal: killed"),
        ("elastane.errors.ConfigurationError: what\n  next: do\n", "elastane.errors"),
        ("Traceback (most recent call last):\n", "exit code 1"),
    ],
)
def test_a_failed_function_is_reported_with_rank_and_exception_line(message, headline):
    error = error_of("f", report(root_cause=failure(message), round=2, attempt=1), 1)
    assert isinstance(error, FunctionFailedError)
    assert str(error).startswith(f"f() failed on rank 3: {headline}")
    assert "job j, round 2, attempt 1, node n1, rank 3 (local rank 1, pid 7)" in str(error)
    assert str(error).endswith(message.strip("\n"))
    assert error.report.root_cause.rank == 3


def test_advice_is_in_the_words_of_python():
    said = "mend the script; to let the job survive such failures: --max-restarts N"
    error = error_of("f", report(root_cause=failure(), next_step=said, log_dir="/logs"), 1)
    assert error.next_step == (
        "mend f(); to let the job survive such failures: max_restarts=N; logs: /logs"
    )


@pytest.mark.parametrize(
    ("slug", "code", "kind"),
    [
        ("rdzv-timeout", 75, JoinTimeoutError),
        ("rdzv-closed", 75, JobClosedError),
        ("store-timeout", 75, MembershipError),
        ("wrong-job", 78, ConfigurationError),
        ("no-gpu", 69, NodeUnfitError),
        ("", 143, ElastaneError),
    ],
)
def test_a_job_that_ended_without_a_failed_worker_is_an_error_of_its_kind(slug, code, kind):
    error = error_of("f", report(slug=slug, cause="because", next_step="do"), code)
    assert type(error) is kind
    assert str(error).startswith(f"f(): because [{slug or 'agent-lost'}]")
    assert error.next_step == "do"


@pytest.mark.parametrize(("code", "how"), [(-9, "by SIGKILL"), (1, "with exit code 1")])
def test_an_agent_that_left_no_report_is_lost(code, how):
    error = error_of("f", None, code)
    assert error.slug == "agent-lost"
    assert how in error.what


def test_an_error_survives_a_pickle():
    """Nested launches and pools pickle errors."""
    error = error_of("f", report(root_cause=failure("x")), 1)
    again = pickle.loads(cloudpickle.dumps(error))
    assert (type(again), str(again), again.report) == (type(error), str(error), error.report)


# Output and signals


class Broken(io.StringIO):
    def write(self, text):
        raise ValueError("closed")


def test_a_pipe_is_still_read_after_its_target_failed():
    theirs, mine = os.pipe()
    os.write(mine, b"one")
    os.close(mine)
    relay = Relay(Broken())
    assert relay.forward(theirs)
    assert not relay.forward(theirs)
    os.close(theirs)


def test_a_character_that_comes_in_two_parts_is_one():
    theirs, mine = os.pipe()
    target = io.StringIO()
    relay = Relay(target)
    for part in ("é".encode()[:1], "é".encode()[1:], "€".encode()[:2]):
        os.write(mine, part)
        relay.forward(theirs)
    os.close(mine)
    relay.forward(theirs)
    os.close(theirs)
    assert target.getvalue() == "é\N{REPLACEMENT CHARACTER}"


def test_only_a_plain_file_is_handed_to_the_agent(tmp_path):
    with open(tmp_path / "out", "w") as file:
        assert Relay(file).stdio() == file.fileno()
    closed = Relay(file)
    in_memory = (io.StringIO(), io.TextIOWrapper(io.BytesIO()), None)
    assert {relay.stdio() for relay in (closed, *map(Relay, in_memory))} == {-1}


def test_signal_handlers_are_set_for_a_call_and_restored():
    def mine(signum, frame):
        """A signal handler of the program."""

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        assert with_default_handler(signal.SIGUSR1, signal.SIGUSR2) == (signal.SIGUSR2,)
        with pytest.raises(KeyError), raise_on([signal.SIGUSR1], lambda one: KeyError(one.name)):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
