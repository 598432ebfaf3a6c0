"""The error file is readable by torch, torch's by us, and ours are ordered within a second."""

import json
import os
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from elastane.process.errorfile import read_error_file, write_content, write_error_file


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_torchs_error_file_is_read(tmp_path, monkeypatch):
    path = str(tmp_path / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    before = int(time.time())
    try:
        raise ValueError("of torch's")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    error = read_error_file(path)
    assert error.message == "ValueError: of torch's"
    assert "Traceback" in error.callstack and "of torch's" in error.callstack
    assert before <= error.time_ns // 10**9 <= time.time()
    assert error.monotonic_ns == 0 and error.error_code is None


def test_torch_reads_our_error_file(tmp_path):
    path = str(tmp_path / "error.json")
    write_error_file(path, raised(KeyError("of ours")))
    failure = ProcessFailure(local_rank=3, pid=7, exitcode=1, error_file=path)
    assert failure.message["message"] == "KeyError: 'of ours'"
    assert "Traceback" in failure.message["extraInfo"]["py_callstack"]
    assert failure.timestamp == read_error_file(path).time_ns // 10**9


def test_two_failures_of_one_host_within_a_millisecond_have_an_order(tmp_path):
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    write_error_file(first, raised(ValueError("1")))
    write_error_file(second, raised(ValueError("2")))
    one, other = read_error_file(first), read_error_file(second)
    assert one.monotonic_ns < other.monotonic_ns <= time.monotonic_ns()
    assert one.time_ns <= other.time_ns


def test_the_time_of_the_fault_may_be_given(tmp_path):
    path = str(tmp_path / "error.json")
    ago_ns = time.time_ns() - 5 * 10**9
    write_error_file(path, raised(ValueError("earlier")), time_ns=ago_ns)
    error = read_error_file(path)
    assert error.time_ns == ago_ns
    assert 4.9 < (time.monotonic_ns() - error.monotonic_ns) / 1e9 < 60


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b'"text"', b"[" * 100_000, b'{"message": {"mess'],
)
def test_a_torn_or_foreign_file_is_none(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error_file(str(path)) is None
    assert read_error_file(str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"message": "plain"}, "plain"),
        ({"message": {"message": 7, "extraInfo": []}}, "7"),
        ({"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}, "x"),
        ({"other": 1}, ""),
    ],
)
def test_other_shapes_give_what_they_have(tmp_path, content, message):
    path = tmp_path / "error.json"
    path.write_text(json.dumps(content))
    error = read_error_file(str(path))
    assert (error.message, error.time_ns, error.callstack) == (message, 0, "")


def test_an_exit_code_is_read_and_nothing_else_is_taken_for_one(tmp_path):
    path = tmp_path / "error.json"
    for value, code in ((3, 3), (-9, -9), (True, None), ("3", None)):
        path.write_text(json.dumps({"message": {"message": "m", "errorCode": value}}))
        assert read_error_file(str(path)).error_code == code


def test_an_exception_with_a_broken_str_is_still_written(tmp_path):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no")

    path = str(tmp_path / "error.json")
    write_error_file(path, raised(Broken()))
    assert read_error_file(path).message.startswith("Broken: <no text: RuntimeError")


def test_a_reader_finds_a_whole_file_while_it_is_written_again_and_again(tmp_path):
    path = str(tmp_path / "error.json")
    write_content(path, {"message": "0" * 50_000})
    over = threading.Event()

    def write():
        for _ in range(200):
            write_content(path, {"message": "0" * 50_000})
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        assert len(read_error_file(path).message) == 50_000
    writer.join()
    assert os.listdir(tmp_path) == ["error.json"], "no part is left behind"


def test_a_folder_that_cannot_be_written_raises_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write_error_file(str(tmp_path / "file" / "error.json"), ValueError("x"))
