"""ProcessFailure and ChildFailedError are like torch's, and find the first failure."""

from __future__ import annotations

import json
import signal
import socket

import pytest
from torch.distributed.elastic.multiprocessing import errors as torchs

from elastane.elastic.multiprocessing import errors as ours
from elastane.process.errorfile import write_error_file


def torch_file(path, message="ValueError: bad", at="1684514398"):
    extra = {"py_callstack": "Traceback:\n  line\n" + message, "timestamp": at}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return str(path)


def failures(module, files):
    return {
        7 + local: module.ProcessFailure(local, 100 + local, code, file)
        for local, (code, file) in files.items()
    }


@pytest.fixture
def same_clock(monkeypatch):
    import time

    monkeypatch.setattr(time, "time", lambda: 1684514400.25)
    monkeypatch.setattr(time, "time_ns", lambda: 1684514400250000000)
    monkeypatch.setattr(socket, "getfqdn", lambda *a: "host.example")


@pytest.mark.parametrize("count", [1, 3])
def test_the_report_is_torchs_to_the_letter(tmp_path, same_clock, count):
    files = {
        0: (1, torch_file(tmp_path / "0", at="1684514399")),
        1: (-9, ""),
        2: (3, torch_file(tmp_path / "2", "KeyError: 'first'", at="1684514398")),
    }
    files = dict(list(files.items())[:count])
    mine = ours.ChildFailedError("train.py", failures(ours, files))
    theirs = torchs.ChildFailedError("train.py", failures(torchs, files))
    assert str(mine) == str(theirs)
    assert mine.get_first_failure()[0] == theirs.get_first_failure()[0]


@pytest.mark.parametrize("code", [0, 1, -9, -11, -64, 255])
def test_a_failure_without_a_file_has_torchs_fields(same_clock, code):
    mine = ours.ProcessFailure(2, 17, code, "/no/such/file")
    theirs = torchs.ProcessFailure(2, 17, code, "/no/such/file")
    for name in ("local_rank", "pid", "exitcode", "error_file", "message", "timestamp"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.signal_name() == theirs.signal_name()
    assert mine.timestamp_isoformat() == theirs.timestamp_isoformat()


def test_of_two_failures_in_one_second_the_first_is_the_root_cause(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    write_error_file(first, ValueError("first"))
    write_error_file(second, ValueError("second"))
    found = {0: ours.ProcessFailure(0, 1, 1, second), 5: ours.ProcessFailure(1, 2, 1, first)}
    rank, failure = ours.ChildFailedError("x", found).get_first_failure()
    assert (rank, failure.message["message"]) == (5, "ValueError: first")


def test_a_torn_file_is_no_file_and_no_exception(tmp_path):
    path = tmp_path / "error.json"
    path.write_text('{"message": {"mess')
    failure = ours.ProcessFailure(0, 1, 1, str(path))
    assert failure.error_file == "<N/A>" and "enable traceback" in failure.message


def test_an_error_without_failures_is_none():
    with pytest.raises(AssertionError):
        ours.ChildFailedError("x", {})


def test_record_passes_on_the_first_failure_of_a_launch(tmp_path, monkeypatch):
    own = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    failure = ours.ProcessFailure(0, 1, -signal.SIGSEGV, torch_file(tmp_path / "child"))

    @ours.record
    def main():
        raise ours.ChildFailedError("x", {0: failure})

    with pytest.raises(ours.ChildFailedError):
        main()
    assert json.loads(own.read_text())["message"]["errorCode"] == -11


def test_a_users_error_handler_may_be_a_subclass(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "own.json"))

    class Mine(ours.ErrorHandler):
        def record_exception(self, e):
            self.seen = e

    handler = Mine()
    with pytest.raises(ZeroDivisionError):
        ours.record(lambda: 1 / 0, error_handler=handler)()
    assert isinstance(handler.seen, ZeroDivisionError)
    assert isinstance(ours.get_error_handler(), ours.ErrorHandler)


@pytest.mark.parametrize(
    "content",
    [
        {"message": "a text", "timestamp": 10},
        {"message": "a text", "timestamp": "11"},
        {"message": "a text"},
        {"message": {"message": "m", "extraInfo": {"timestamp": "12"}}, "timestamp": 10},
    ],
)
def test_the_time_of_an_error_file_is_read_as_torch_reads_it(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_text(json.dumps(content))
    mine, reference = (kind.ProcessFailure(0, 1, 1, str(path)) for kind in (ours, torchs))
    assert (mine.message, mine.timestamp) == (reference.message, reference.timestamp)


@pytest.mark.parametrize("kind", [ours, torchs], ids=["ours", "torchs"])
def test_record_writes_no_file_for_a_launch_whose_failure_has_none(tmp_path, monkeypatch, kind):
    own = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))

    @kind.record
    def main():
        raise kind.ChildFailedError("x", {0: kind.ProcessFailure(0, 1, -9, "")})

    with pytest.raises(kind.ChildFailedError):
        main()
    assert not own.exists()
