"""Scalars reach each sink once per committed step, for any writers and torn lines."""

import contextlib
import json
import os
import subprocess
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastane.errors import JobError
from elastane.worker.scalars import KEPT_MAX, JsonLines, ScalarLog, TensorBoard
from elastane.worker.service_sinks import RETRY_FIRST_S, RETRY_MAX_S


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path, name="loss"):
    return [line["step"] for line in lines(path) if name in line]


def made(log, number, **values):
    """Log in the body of a step, and commit the step."""
    log.begin()
    log.add(values or {"loss": number / 10}, number - 1)
    log.leave()
    log.commit(number)


def worker(*targets):
    log = ScalarLog()
    log.add_sinks(targets)
    return log


def writer(*targets, committed=0, is_first=True):
    log = worker(*targets)
    log.enter(is_writer=True, committed=committed, is_first=is_first)
    return log


def test_a_retried_body_replaces_its_values(tmp_path):
    log = writer(tmp_path / "a.jsonl")
    log.begin()
    log.add({"loss": 9.0, "only_in_the_first_try": 1.0}, 0)
    log.leave()
    made(log, 1, loss=0.5)
    (line,) = lines(tmp_path / "a.jsonl")
    assert line["loss"] == 0.5 and line["step"] == 1 and "only_in_the_first_try" not in line


def test_values_between_steps_are_of_the_steps_committed_so_far(tmp_path):
    log = writer(tmp_path / "a.jsonl")
    made(log, 1)
    log.add({"accuracy": 0.9}, 1)
    made(log, 2)
    assert steps(tmp_path / "a.jsonl", "accuracy") == [1]
    assert steps(tmp_path / "a.jsonl") == [1, 2]


def test_another_writer_fills_in_what_the_lost_one_had_not_written(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second = writer(path), worker(path)
    for number in range(1, 6):
        made(second, number)
        if number < 4:
            made(first, number)
    second.enter(is_writer=True, committed=5, is_first=False)
    made(second, 6)
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_line_that_was_torn_is_written_again(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second = writer(path), worker(path)
    for number in (1, 2):
        made(first, number), made(second, number)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    second.enter(is_writer=True, committed=2, is_first=False)
    assert steps(path) == [1, 2]


def test_steps_that_are_made_again_after_a_restart_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    before = writer(path)
    for number in range(1, 2001):
        made(before, number)
        if number % 1000 == 0:
            before.add({"accuracy": 0.5}, number)
    restarted = writer(path, committed=900, is_first=False)
    for number in range(901, 2003):
        made(restarted, number)
        if number % 1000 == 0:
            restarted.add({"accuracy": 0.5}, number)
    assert steps(path) == [*range(1, 2003)] and steps(path, "accuracy") == [1000, 2000]


def test_another_run_begins_again_and_a_later_writer_looks_at_its_lines_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    old = writer(path)
    for number in range(1, 51):
        made(old, number)
    old.add({"accuracy": 0.5}, 50)
    new, other = writer(path), worker(path)
    for number in range(1, 50):
        made(new, number), made(other, number)
    made(other, 50)
    other.add({"accuracy": 0.6}, 50)
    other.enter(is_writer=True, committed=50, is_first=False)
    assert steps(path) == [*range(1, 51), *range(1, 51)]
    assert steps(path, "accuracy") == [50, 50]


@pytest.fixture
def clock(monkeypatch):
    """Seconds of the monotonic clock, which the test sets."""
    now_s = [1000.0]
    monkeypatch.setattr("elastane.worker.scalars.time.monotonic", lambda: now_s[0])
    return now_s


def test_no_value_is_lost_while_a_file_cannot_be_written(tmp_path, capsys, clock):
    path = tmp_path / "a.jsonl"
    path.mkdir()
    log = writer(path, tmp_path / "b.jsonl")
    made(log, 1), made(log, 2)
    told = capsys.readouterr().err
    assert told.count("cannot be written: Is a directory") == 1 and str(path) in told
    path.rmdir()
    made(log, 3)
    assert steps(tmp_path / "b.jsonl") == [1, 2, 3] and not path.exists(), "after a pause alone"
    clock[0] += RETRY_FIRST_S
    made(log, 4)
    assert steps(path) == steps(tmp_path / "b.jsonl") == [1, 2, 3, 4]
    assert capsys.readouterr().err == f"elastane: job.log: {path} is written again\n"


def test_a_sink_that_stays_away_is_tried_less_and_less_often_and_once_more_at_the_end(
    tmp_path, clock
):
    path = tmp_path / "a.jsonl"
    path.mkdir()
    log, tries = writer(path), []
    log._sinks[0].open = lambda after_step, first=log._sinks[0].open: (
        tries.append(clock[0]) or first(after_step)
    )
    for number in range(1, 601):
        made(log, number)
        clock[0] += 1.0
    assert 8 < len(tries) < 18 and tries[-1] - tries[-2] == RETRY_MAX_S
    path.rmdir()
    log.end()
    assert steps(path) == [*range(1, 601)]


def test_a_line_that_a_full_disk_took_in_part_is_written_again(
    tmp_path, monkeypatch, capsys, clock
):
    path, write = tmp_path / "a.jsonl", os.write
    log = writer(path)
    made(log, 1)
    monkeypatch.setattr("elastane.worker.scalars.os.write", lambda fd, data: write(fd, data[:9]))
    made(log, 2)
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    log.end()
    assert steps(path) == [1, 2]


def test_lines_written_before_a_failure_are_not_read_again(tmp_path, monkeypatch, clock):
    sink = JsonLines(tmp_path / "a.jsonl")
    log, opened = writer(sink), []
    for number in range(1, 50):
        made(log, number)
    monkeypatch.setattr(
        sink, "open", lambda step, first=sink.open: opened.append(step) or first(step)
    )
    monkeypatch.setattr(sink, "write", lambda scalars: (_ for _ in ()).throw(OSError(28, "full")))
    made(log, 50)
    made(log, 51)
    assert opened == [49]


def test_a_symbolic_link_is_refused_and_the_file_behind_it_left_alone(tmp_path, capsys):
    behind, path = tmp_path / "own", tmp_path / "a.jsonl"
    behind.write_text("half a line")
    path.symlink_to(behind)
    made(writer(JsonLines(path)), 1)
    assert "a symbolic link, which is not followed" in capsys.readouterr().err
    assert behind.read_text() == "half a line"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)) == 1024:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["lines", pytest.param("tensorboard", marks=pytest.mark.torch)])
def test_a_full_disk_loses_no_value_and_is_reported_once(small_disk, capfd, kind):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    target = TensorBoard(small_disk / "t") if kind == "tensorboard" else small_disk / "t"
    log, values = writer(target), {f"v{n}": 0.5 for n in range(20)}
    made(log, 1, **values)
    fill(small_disk / "fill")
    for number in range(2, 40):
        made(log, number, **values)
    said = capfd.readouterr().err
    assert said.count("cannot be written: No space left on device") == 1
    assert said.count("Traceback") <= 1, "TensorBoard's own, at the first failure"
    (small_disk / "fill").unlink()
    log.end()
    assert "is written again" in capfd.readouterr().err
    if kind == "lines":
        assert steps(small_disk / "t", "v0") == [*range(1, 40)]
        return
    events = tensorboard.EventAccumulator(str(small_disk / "t"), size_guidance={"scalars": 0})
    assert [one.step for one in events.Reload().Scalars("v0")] == [*range(1, 40)]
    assert len([*(small_disk / "t").iterdir()]) <= 5


def test_a_sink_that_fails_later_is_opened_again_and_nothing_comes_twice(tmp_path, clock):
    class Failing(JsonLines):
        fails = False

        def write(self, scalars):
            if self.fails:
                raise RuntimeError("away")
            super().write(scalars)

    sink = Failing(tmp_path / "a.jsonl")
    log = writer(sink)
    made(log, 1)
    sink.fails = True
    made(log, 2), made(log, 3)
    sink.fails = False
    clock[0] += RETRY_FIRST_S
    made(log, 4)
    assert steps(sink.path) == [1, 2, 3, 4]


def test_the_folder_of_the_job_gets_each_name_once_a_second(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTANE_JOB_FOLDER", str(tmp_path))
    monkeypatch.setenv("ELASTANE_NODE", "node/a")
    clock = iter([100.0, 100.5, 100.6, 101.2])
    here, real = threading.current_thread(), time.time
    monkeypatch.setattr(
        "time.time", lambda: next(clock) if threading.current_thread() is here else real()
    )
    log = ScalarLog()
    log.show_in_job()
    log.enter(is_writer=True, committed=0, is_first=True)
    assert not [*tmp_path.iterdir()], "a script that logs nothing has no file"
    made(log, 1), made(log, 2)
    log.add({"accuracy": 0.5}, 2)
    made(log, 3)
    [path] = tmp_path.glob("scalars.*.jsonl")
    assert steps(path) == [1, 3] and steps(path, "accuracy") == [2]


def test_the_member_with_the_last_committed_step_writes():
    behind, newest, newcomer = ScalarLog(), ScalarLog(), ScalarLog()
    for number in (1, 2, 3):
        made(newest, number)
        if number < 3:
            made(behind, number)
    assert min(behind.place(0), newest.place(1), newcomer.place(2)) == newest.place(1)
    assert newest.place(0) < newest.place(1) and 0 < newest.place(1) < 1 << 62


def test_kept_values_have_a_bound():
    log = ScalarLog()
    for number in range(1, KEPT_MAX + 100):
        made(log, number)
    assert len(log._kept) == KEPT_MAX


@pytest.mark.parametrize("value", ["text", [1, 2], None, object()])
def test_a_value_that_is_no_number_is_named(value):
    with pytest.raises(JobError) as caught:
        ScalarLog().add({"loss": value}, 0)
    assert caught.value.slug == "job-log" and "loss" in caught.value.what


def test_unusable_sinks_and_folders_are_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for target in (3, tmp_path / "file" / "a.jsonl"):
        with pytest.raises(JobError) as caught:
            ScalarLog().add_sinks((target,))
        assert caught.value.slug == "job-log" and str(target) in caught.value.what


def test_values_that_are_not_finite_are_texts_that_json_has(tmp_path):
    log = writer(tmp_path / "a.jsonl")
    made(log, 1, loss=float("nan"), norm=float("inf"), low=float("-inf"))
    (line,) = lines(tmp_path / "a.jsonl")
    assert (line["loss"], line["norm"], line["low"]) == ("NaN", "Infinity", "-Infinity")


@given(st.data())
def test_each_step_is_logged_once_whichever_writer_dies_and_when(tmp_path_factory, data):
    """All workers make the same steps; the writer dies after some lines, the last maybe torn."""
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    workers = [worker(path) for _ in range(4)]
    workers[0].enter(is_writer=True, committed=0, is_first=True)
    number = 0
    while workers:
        for _ in range(data.draw(st.integers(0, 3))):
            number += 1
            for each in workers:
                made(each, number)
        number += 1
        survivors = workers[1:]
        if data.draw(st.booleans()):  # it wrote the step in which it died
            made(workers[0], number)
        elif survivors and path.exists() and data.draw(st.booleans()):
            with path.open("ab") as file:
                file.write(b'{"step": 1')
        for each in survivors:
            made(each, number)
        if survivors:
            survivors[0].enter(is_writer=True, committed=number, is_first=False)
        workers = survivors
    found = steps(path)
    assert found == [*range(1, found[-1] + 1)] and found[-1] >= number - 1
