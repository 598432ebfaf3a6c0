"""Timers that workers set on themselves: the table, the lines, the pipe."""

import os
import signal

import pytest

from elastane.errors import ConfigurationError
from elastane.process.timers import (
    REQUEST_BYTES_MAX,
    TIMERS_MAX,
    TimerPipe,
    TimerTable,
    WorkerTimer,
    parse_request,
)


def timer(scope="step", at=10.0, pid=7, signum=9):
    return WorkerTimer(pid, scope, at, signum)


def test_a_timer_expires_at_its_deadline_and_not_before():
    table = TimerTable()
    table.update(timer(at=10.0))
    assert table.due_s == 10.0
    assert table.expired(9.999) == []
    assert table.expired(10.0) == [timer(at=10.0)]
    assert table.expired(11.0) == [], "it expires once"
    assert table.due_s is None


def test_a_negative_time_cancels_the_timer_and_a_new_one_replaces_the_old():
    table = TimerTable()
    table.update(timer(at=10.0))
    table.update(timer(at=20.0))
    table.update(timer("load", 15.0))
    assert table.expired(12.0) == []
    table.update(timer("load", -1, signum=0))
    assert table.expired(16.0) == []
    assert table.expired(20.0) == [timer(at=20.0)]


def test_the_first_timer_with_a_signal_expires_and_drops_the_processs_others():
    table = TimerTable()
    for request in (timer("a", 1.0, signum=0), timer("c", 3.0), timer("b", 2.0), timer("d", 99.0)):
        table.update(request)
    table.update(timer("other", 2.5, pid=8, signum=0))
    assert table.expired(5.0) == [timer("b", 2.0), timer("other", 2.5, pid=8, signum=0)]
    assert len(table) == 0


def test_the_number_of_timers_is_bounded():
    table = TimerTable()
    assert all(table.update(timer(str(n))) for n in range(TIMERS_MAX))
    assert not table.update(timer("one more"))
    assert table.update(timer("0", 5.0)), "one that is set can still be changed"
    table.forget([7])
    assert len(table) == 0


def test_the_lines_of_torchs_client_are_read():
    torch_timer = pytest.importorskip("torch.distributed.elastic.timer")
    sent = torch_timer.FileTimerRequest(
        worker_pid=7, scope_id='a "b"\u20ac', expiration_time=1.5, signal=signal.SIGKILL
    )
    assert parse_request(sent.to_json().encode()) == WorkerTimer(7, 'a "b"\u20ac', 1.5, 9)


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"\xff", b"[1]", b'{"pid": 0, "scope_id": "", "expiration_time": 1}',
     b'{"pid": 1, "scope_id": "", "expiration_time": 1, "signal": 65}',
     b'{"pid": "1", "scope_id": "", "expiration_time": 1}'],
)  # fmt: skip
def test_a_malformed_request_is_rejected(line):
    assert parse_request(line) is None


@pytest.mark.parametrize("named", [True, False])
def test_torchs_client_reaches_the_pipe_and_the_pipe_leaves_nothing_behind(tmp_path, named):
    torch_timer = pytest.importorskip("torch.distributed.elastic.timer")
    pipe = TimerPipe(str(tmp_path / "timers") if named else "")
    pipe.open()
    assert pipe.path.startswith(str(tmp_path) if named else "/proc/")
    client = torch_timer.FileTimerClient(pipe.path)
    client.acquire("scope", 5.0)
    client.release("scope")
    assert pipe.read() == [
        WorkerTimer(os.getpid(), "scope", 5.0, 9),
        WorkerTimer(os.getpid(), "scope", -1, 0),
    ]
    assert pipe.read() == []
    pipe.close()
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(pipe.path)


def test_garbage_is_counted_and_does_not_hide_what_follows(tmp_path):
    pipe = TimerPipe()
    pipe.open()
    with open(pipe.path, "wb", buffering=0) as end:
        end.write(b"x" * (REQUEST_BYTES_MAX + 1))
        assert pipe.read() == []
        end.write(b"y\n" + b'{"pid": 1, "scope_id": "s", "expira')
        assert pipe.read() == []
        end.write(b'tion_time": 2}\n')
        assert pipe.read() == [WorkerTimer(1, "s", 2.0)]
    assert pipe.refused == 2
    pipe.close()


def test_a_pipe_that_a_killed_agent_left_is_replaced_and_one_in_use_is_left_alone(tmp_path):
    wished = str(tmp_path / "timers")
    os.mkfifo(wished)
    first, second = TimerPipe(wished), TimerPipe(wished)
    first.open()
    assert first.path == wished
    second.open()
    assert second.path == f"{wished}.{os.getpid()}"
    second.close()
    assert os.path.exists(wished)
    first.close()


def test_a_file_at_the_path_is_never_removed(tmp_path):
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(ConfigurationError) as caught:
        TimerPipe(str(path)).open()
    assert caught.value.slug == "timer-file"
    assert path.read_text() == "precious"


@pytest.mark.parametrize("when", ["before", "while the pipe is made"])
def test_a_symbolic_link_at_the_path_is_refused_and_not_followed(tmp_path, monkeypatch, when):
    path, aim = tmp_path / "timers", tmp_path / "aim"
    if when == "before":
        os.mkfifo(aim)
        path.symlink_to(aim)
    else:
        aim.write_text("precious")
        monkeypatch.setattr(os, "mkfifo", lambda name, _: os.symlink(aim, name))
    with pytest.raises(ConfigurationError) as caught:
        TimerPipe(str(path)).open()
    assert caught.value.slug == "timer-file"
    assert path.is_symlink() and aim.exists()
