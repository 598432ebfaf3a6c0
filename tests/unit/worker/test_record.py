"""`elastane.record` behaves like torch's, with more precise times."""

import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import record as torchs_record

import elastane
from elastane.process.errorfile import read_error_file, write_error_file


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def outcome(record, act):
    """Return what the caller gets."""
    try:
        return "returned", record(act)()
    except BaseException as error:
        return type(error).__name__, str(error)


def leave(code):
    return lambda: sys.exit(code)


def fail():
    raise ValueError("bad data")


@pytest.mark.parametrize(
    "act", [lambda: 7, fail, leave(0), leave(None), leave(3), leave("why"), lambda: 1 / 0]
)
def test_the_caller_sees_what_it_sees_with_torchs(error_file, act):
    ours = outcome(elastane.record, act)
    written = error_file.exists()
    error_file.unlink(missing_ok=True)
    theirs = outcome(torchs_record, act)
    # sys.exit() and sys.exit(None) are success too; torch's raises them.
    assert ours == theirs or (ours, theirs) == (("returned", None), ("SystemExit", ""))
    assert written == error_file.exists()


def test_the_exception_is_on_file_with_its_traceback_and_nanoseconds(error_file):
    with pytest.raises(ValueError, match="bad data"):
        elastane.record(fail)()
    error = read_error_file(str(error_file))
    assert error.message == "ValueError: bad data"
    assert "in fail" in error.callstack
    assert error.monotonic_ns > 0 and error.time_ns % 10**9


def test_record_works_bare_and_called_and_keeps_name_and_arguments(error_file):
    @elastane.record
    def bare(a, b=2):
        """Its words."""
        return a + b

    @elastane.record()
    def called(a):
        return a

    assert (bare(1, b=5), called(4)) == (6, 4)
    assert (bare.__name__, bare.__doc__) == ("bare", "Its words.")


def test_a_users_own_handler_is_called(error_file):
    asked = []

    class Handler:
        def initialize(self):
            asked.append("initialize")

        def record_exception(self, e):
            asked.append(str(e))

    with pytest.raises(ValueError, match="bad data"):
        elastane.record(error_handler=Handler())(fail)()
    assert asked == ["initialize", "bad data"]
    assert not error_file.exists()


def test_a_launch_that_failed_within_hands_on_the_file_of_its_first_failure(error_file, tmp_path):
    child = tmp_path / "child.json"
    write_error_file(str(child), ValueError("of the child"))

    class Failure:
        error_file = str(child)
        exitcode = 13

    class ChildFailed(Exception):
        def get_first_failure(self):
            return 0, Failure

    def launch():
        raise ChildFailed

    with pytest.raises(ChildFailed):
        elastane.record(launch)()
    assert read_error_file(str(error_file)).message == "ValueError: of the child"
    assert read_error_file(str(error_file)).error_code == 13
    assert ProcessFailure(0, 1, 13, str(error_file)).message["errorCode"] == 13


def test_without_the_variable_nothing_is_written_and_nothing_is_said(monkeypatch, capfd):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(ValueError, match="bad data"):
        elastane.record(fail)()
    assert capfd.readouterr().err == ""


def test_a_file_that_cannot_be_written_never_hides_the_exception(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))
    with pytest.raises(ValueError, match="bad data"):
        elastane.record(fail)()
    assert "cannot be written" in capfd.readouterr().err


def test_record_does_not_import_torch():
    code = "import sys, elastane; elastane.record; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout == "False\n"
