"""The event log's files: several writers, reading by time, and the losses of a bad disk."""

import logging
import os
import shutil
import threading

import pytest

from elastane.observe import events as events_module
from elastane.observe.events import EventLog, EventReader, follow, read_events
from elastane.protocol.log_events import EventKind, LogEvent


def note(reason, kind=EventKind.INCIDENT):
    return LogEvent(kind=kind, reason=reason)


@pytest.fixture
def log(tmp_path):
    made = []

    def make(host="host-a", base_dir=tmp_path, job="job"):
        made.append(EventLog(str(base_dir), job, "node", host))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reasons(folder):
    return [event.reason for event in read_events(folder)]


def test_events_of_all_hosts_are_read_in_the_order_of_time(log, tmp_path):
    one, other = log("host-a"), log("host-b")
    for number in range(6):
        (one if number % 2 else other).log(note(str(number)), "agent")
    assert one.flush()
    assert other.flush()
    assert reasons(tmp_path / "job") == list("012345")
    assert len(list((tmp_path / "job").glob("events.*.jsonl"))) == 2


def test_two_agents_of_one_host_share_a_file_without_tearing_lines(log, tmp_path):
    logs = [log(), log()]

    def tell_many(each):
        for number in range(300):
            each.log(note(f"{number}" + "x" * 500), "agent")

    threads = [threading.Thread(target=tell_many, args=(each,)) for each in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.flush() for each in logs)
    lines = logs[0].path.read_bytes().splitlines()
    told = [event for event in read_events(tmp_path / "job") if event.kind == "incident"]
    lost = sum(e.data["events"] for e in read_events(tmp_path / "job") if e.kind == "events-lost")
    assert len(told) + lost == 600
    assert len(list(read_events(tmp_path / "job"))) == len(lines)


def test_a_second_run_appends(log, tmp_path):
    first = log()
    first.log(note("first"), "agent")
    first.close()
    second = log()
    second.log(note("second"), "agent")
    assert second.flush()
    assert reasons(tmp_path / "job") == ["first", "second"]


def test_line_torn_by_a_death_costs_that_line_only(log, tmp_path):
    first = log()
    first.log(note("whole"), "agent")
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"time":"torn')
    second = log()
    second.log(note("after"), "agent")
    assert second.flush()
    assert reasons(tmp_path / "job") == ["whole", "after"]


def test_full_disk_is_reported_once_and_the_loss_is_written_afterwards(
    log, tmp_path, monkeypatch, caplog
):
    full = os.open("/dev/full", os.O_WRONLY)
    each = log()
    with monkeypatch.context() as patch:
        patch.setattr(events_module, "open_append", lambda path: os.dup(full))
        patch.setattr(events_module, "_ends_torn", lambda path: False)
        with caplog.at_level(logging.WARNING, "elastane.events"):
            for number in range(5):
                each.log(note(str(number)), "agent")
            assert each.flush()
    os.close(full)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    each.log(note("again"), "agent")
    assert each.flush()
    told = {event.kind: event for event in read_events(tmp_path / "job")}
    assert told["incident"].reason == "again"
    assert told["events-lost"].data == {"events": 5}


def test_folder_that_cannot_be_made_raises_nothing(log, tmp_path):
    (tmp_path / "file").write_text("")
    each = log(base_dir=tmp_path / "file")
    each.log(note("x"), "agent")
    assert each.flush()


def test_hanging_disk_blocks_no_caller(log, monkeypatch, tmp_path):
    release = threading.Event()
    real = events_module.open_append
    monkeypatch.setattr(
        events_module, "open_append", lambda path: real(path) if release.wait(30) else -1
    )
    each = log()
    for number in range(5000):
        each.log(note("x" * 900 + str(number)), "agent")
    assert not each.flush(0.05)
    release.set()
    assert each.flush(30)
    each.log(note("after"), "agent")
    assert each.flush()
    told = list(read_events(tmp_path / "job"))
    lost = sum(event.data["events"] for event in told if event.kind == "events-lost")
    assert lost > 0
    assert lost + sum(event.kind == "incident" for event in told) == 5001


@pytest.mark.parametrize("base_dir", ["", "/dev/null"])
def test_without_a_folder_nothing_is_written(log, base_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each = log(base_dir=base_dir)
    each.log(note("x"), "agent")
    assert each.flush()
    assert list(tmp_path.iterdir()) == []


def test_names_of_job_and_host_cannot_leave_the_folder(log, tmp_path):
    each = log(host="../../h", job="../j")
    each.log(note("x"), "agent")
    assert each.flush()
    assert each.path.resolve().is_relative_to(tmp_path.resolve())
    assert each.path.exists()


def test_reader_gives_each_event_once_as_the_files_grow(log, tmp_path):
    reader = EventReader(tmp_path / "job")
    assert reader.poll() == []
    one = log("host-a")
    one.log(note("1"), "agent")
    assert one.flush()
    assert [event.reason for event in reader.poll()] == ["1"]
    other = log("host-b")
    one.log(note("2"), "agent")
    assert one.flush()
    other.log(note("3"), "agent")
    assert other.flush()
    assert [event.reason for event in reader.poll()] == ["2", "3"]
    with one.path.open("ab") as file:
        file.write(b'{"half')
    assert reader.poll() == []


def test_reader_from_now_skips_older_events(log, tmp_path):
    one = log()
    one.log(note("old"), "agent")
    assert one.flush()
    reader = EventReader(tmp_path / "job", from_now=True)
    assert reader.poll() == []
    one.log(note("new"), "agent")
    assert one.flush()
    assert [event.reason for event in reader.poll()] == ["new"]


def test_follow_gives_all_and_ends_when_is_over_holds(log, tmp_path):
    one = log()
    for number in range(3):
        one.log(note(str(number)), "agent")
    assert one.flush()
    followed = follow(tmp_path / "job", is_over=lambda: True)
    assert [event.reason for event in followed] == ["0", "1", "2"]


@pytest.mark.parametrize("gone", ["folder", "file", "renamed"])
def test_a_removed_log_is_made_again_with_a_warning(log, tmp_path, caplog, gone):
    one = log()
    one.log(note("before"), "agent")
    assert one.flush()
    match gone:
        case "folder":
            shutil.rmtree(tmp_path / "job")
        case "file":
            one.path.unlink()
        case "renamed":
            one.path.rename(one.path.with_suffix(".1"))
    one.log(note("after"), "agent")
    assert one.flush()
    assert reasons(tmp_path / "job") == ["after"]
    assert caplog.text.count("was removed or replaced") == 1
